"""Tokens a second of one rank: our step against the same decoder of transformers in a plain PyTorch loop.

Both train the same weights on the same tokens, fp32, with fused AdamW, clipping and schedule set alike, on
one thread; rounds of steps are interleaved in one process. Ours is what a run does between two batches: the
model as core builds it (FSDP2 over one rank, the loss without logits kept), and core's own step. Theirs is
`AutoModelForCausalLM` with SDPA, as its documentation trains it; packed documents reach it by position_ids.
Time is the process's CPU time: with one thread it is the time on a machine that has nothing else to do.

    python bench/decoder.py [--rounds 8] [--steps 5]
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from hpctrain.config import schema
from hpctrain.config.huggingface import make_config_json
from hpctrain.core.hybrid import Hybrid
from hpctrain.core.optim import build_optimizer, learning_rate
from hpctrain.core.step import TrainStep
from hpctrain.data.token_batch import TokenBatch
from hpctrain.models.decoder_spec import SPEC
from hpctrain.models.init import make_initial
from hpctrain.models.spec import make_parameter_groups
from hpctrain.plan.plan import make_plan

OURS, THEIRS = "hpctrain", "transformers"
SEQUENCES, LENGTH, NUM_BATCHES, STEPS_PER_EPOCH = 4, 256, 8, 100
OPTIM = schema.OptimConfig(
    lr=1e-3,
    weight_decay=0.1,
    betas=[0.9, 0.95],
    clip_norm=1.0,
    global_batch_size=SEQUENCES,
    warmup_epochs=0.1,
)

Step = Callable[[int], Any]


@dataclass(frozen=True)
class Case:
    """A decoder, and how long the documents in its sequences are."""

    name: str
    model: schema.DecoderConfig
    document_tokens: int  #: on average; `LENGTH` for one document a sequence


def qwen3(hidden: int, inner: int, layers: int, vocab: int) -> schema.DecoderConfig:
    return schema.DecoderConfig(
        family=schema.DecoderFamily.qwen3,
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 64,
        head_dim=32,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=True,
    )


CASES = [
    Case("tiny, packed", qwen3(128, 320, 4, 1024), 64),
    Case("small, packed", qwen3(384, 1024, 4, 8192), 64),
    Case("small, one document a sequence", qwen3(384, 1024, 4, 8192), LENGTH),
]


def make_batch(number: int, case: Case) -> TokenBatch:
    random = torch.Generator().manual_seed(number)
    shape = (SEQUENCES, LENGTH)
    token_BL = torch.randint(case.model.vocab_size, shape, generator=random)
    starts_BL = torch.rand(shape, generator=random) < 1 / case.document_tokens
    if case.document_tokens == LENGTH:
        starts_BL[:] = False
    starts_BL[:, 0] = True
    index_L = torch.arange(LENGTH)
    ends_BL = starts_BL.roll(-1, dims=1)
    weight_BL = (~ends_BL).float()
    return TokenBatch(
        token_BL=token_BL,
        label_BL=token_BL.roll(-1, dims=1),
        weight_BL=weight_BL,
        position_BL=index_L - torch.where(starts_BL, index_L, 0).cummax(1).values,
        document_BL=starts_BL.cumsum(1).int(),
        sample_id_B=torch.arange(SEQUENCES),
        epoch=0,
        step=number,
        counts={"nll": float(weight_BL.sum())},
    )


def build_ours(case: Case, batches: list[TokenBatch]) -> tuple[Step, nn.Module]:
    config = schema.Config(
        model=case.model,
        cluster=schema.ClusterConfig(ranks_per_node=1),
        data=schema.TokenDataConfig(root="", sequence_length=LENGTH),
        optim=OPTIM,
    )
    assert SPEC.staged is not None
    hybrid = Hybrid(config, make_plan(config), SPEC.staged, torch.device("cpu"))
    optimizer = build_optimizer(make_parameter_groups(hybrid.model, OPTIM.weight_decay), OPTIM)
    train = TrainStep(hybrid, optimizer, ema=None, optim=OPTIM, steps_per_epoch=STEPS_PER_EPOCH)
    return lambda step: train([batches[step % NUM_BATCHES]], step)["loss"], hybrid.model


def build_theirs(case: Case, batches: list[TokenBatch]) -> tuple[Step, nn.Module]:
    content = make_config_json(case.model, "float32")
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**content), attn_implementation="sdpa", dtype=torch.float32
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(make_initial(name, tuple(parameter.shape), parameter.dtype, 0, case.model))
    groups = make_parameter_groups(model, OPTIM.weight_decay)
    optimizer = torch.optim.AdamW(groups, lr=OPTIM.lr, betas=(0.9, 0.95), fused=True)
    inputs = [theirs_from(batch) for batch in batches]

    def step(number: int) -> Tensor:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(number, optim=OPTIM, steps_per_epoch=STEPS_PER_EPOCH)
        optimizer.zero_grad()
        loss: Tensor = model(**inputs[number % NUM_BATCHES], use_cache=False).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    return step, model.train()


def theirs_from(batch: TokenBatch) -> dict[str, Tensor]:
    """The same batch: `labels` are the tokens themselves, -100 where none is to be predicted."""
    labels_BL = batch.token_BL.masked_fill(batch.position_BL == 0, -100)
    return {"input_ids": batch.token_BL, "position_ids": batch.position_BL, "labels": labels_BL}


def measure(case: Case, num_rounds: int, num_steps: int) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Seconds a step of each round, and the loss of the step after all of them."""
    batches = [make_batch(number, case) for number in range(NUM_BATCHES)]
    steps = {OURS: build_ours(case, batches)[0], THEIRS: build_theirs(case, batches)[0]}
    times_s: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    for round_ in range(num_rounds + 1):
        for name in names if round_ % 2 else names[::-1]:
            start = time.process_time()
            for number in range(round_ * num_steps, (round_ + 1) * num_steps):
                steps[name](number)
            times_s[name].append((time.process_time() - start) / num_steps)
    losses = {name: float(step((num_rounds + 1) * num_steps)) for name, step in steps.items()}
    return {name: times[1:] for name, times in times_s.items()}, losses


def report(case: Case, times_s: dict[str, list[float]], losses: dict[str, float]) -> None:
    print(f"\n{case.name}\n\n| | CPU ms a step | lowest … highest | tokens/s |\n|---|---|---|---|")
    for name, values in times_s.items():
        ms = [1000 * value for value in values]
        rate = SEQUENCES * LENGTH / statistics.median(values)
        print(f"| {name} | {statistics.median(ms):.1f} | {min(ms):.1f} … {max(ms):.1f} | {rate:,.0f} |")
    print(f"\nloss after the same steps: {', '.join(f'{n} {loss:.6f}' for n, loss in losses.items())}")
    # fp32 sums in another order drift apart from step to step
    assert abs(losses[OURS] - losses[THEIRS]) < 1e-3 * losses[THEIRS], "these loops train something else"
    ratios = [theirs / ours for ours, theirs in zip(times_s[OURS], times_s[THEIRS], strict=True)]
    spread = f"{min(ratios):.3f} … {max(ratios):.3f}"
    print(f"speed of {OURS} / {THEIRS}: {statistics.median(ratios):.3f} ({spread}; aim 1.0)")


def machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "?")
    return (
        f"{model}, {len(os.sched_getaffinity(0))} cores, Python {platform.python_version()}, "
        f"torch {torch.__version__}, transformers {transformers.__version__}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(machine())
    sizes = f"{options.steps} steps of {SEQUENCES}×{LENGTH} tokens"
    print(f"medians of {options.rounds} interleaved rounds of {sizes}")
    with tempfile.TemporaryDirectory(prefix="hpctrain-bench-") as folder:
        dist.init_process_group("gloo", f"file://{folder}/store", rank=0, world_size=1)
        for case in CASES:
            report(case, *measure(case, options.rounds, options.steps))
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
