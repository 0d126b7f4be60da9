"""Traces of one rank: memory against the closed form, collectives against arithmetic from the papers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from hpctrain import cli
from hpctrain.config.schema import (
    Checkpointing,
    ClusterConfig,
    ClusterKind,
    Config,
    DecoderConfig,
    DecoderFamily,
    Device,
    GpuRequest,
    OptimConfig,
    ParallelismConfig,
    Precision,
    TokenDataConfig,
)
from hpctrain.core import clip, pipeline, tensor, trace
from hpctrain.core.trace import trace_step
from hpctrain.core.tracker import Trace, Tracker, Traffic
from hpctrain.errors import ConfigError
from hpctrain.plan.memory import GIB
from hpctrain.plan.plan import RunPlan, make_plan
from tests.helpers.ranks import run_ranks


def trace_places(
    config: Config, plan: RunPlan, places: list[int], change: Callable[[], None] | None = None
) -> list[Trace]:
    """Each place in a process of its own."""

    def trace_one(rank: int, world: int) -> Trace:
        dist.destroy_process_group()
        if change is not None:
            change()
        return trace_step(config, plan, places[rank])

    return run_ranks(len(places), trace_one, timeout_s=300)


# Memory

PAGE = Path(__file__).parents[2] / "docs" / "layout_32b.md"


def test_the_32b_model_on_32_cards_stays_below_22_gib() -> None:
    """First, fullest middle and last stage of finance_callbot. The closed form adds maxima that do not meet,
    and outputs that are on their way to the next stage."""
    (point,) = cli.compose(["+exp=finance_callbot", "data.root=calls"])
    config = point.resolve()
    plan = make_plan(config)
    assert (plan.layout.pp, plan.layout.tp, plan.world_size) == (16, 2, 32)
    middle = max(range(1, 15), key=lambda place: plan.memory[place].tensors)
    places = [0, middle, 15]
    for place, traced in zip(places, trace_places(config, plan, places), strict=True):
        memory = plan.memory[place]
        states = memory.weights + memory.gradients + memory.optimizer
        assert traced.peak_bytes < 22 * GIB
        assert traced.peak_bytes == pytest.approx(memory.tensors, rel=0.02), memory.text()
        assert traced.state_bytes == pytest.approx(states, rel=1e-3)
        first, end = plan.stages[place]
        sizes = f"{traced.peak_bytes / GIB:.1f} | {memory.tensors / GIB:.1f}"
        gathers, scatters = (
            traced.collectives["tp", kind].count for kind in ("all_gather", "reduce_scatter")
        )
        assert f"| {place} | {end - first} | {sizes} | {gathers} | {scatters} |" in PAGE.read_text()


TOKENS, HIDDEN, INTERMEDIATE, VOCAB, HEADS, KEYS, HEAD_DIM = 64, 32, 48, 96, 4, 2, 8
BLOCKS, MICROBATCHES, BF16, FP32 = (2, 1), 6, 2, 4


def small(**parallelism: Any) -> tuple[Config, RunPlan]:
    """Two stages of two blocks and one, two shards, two tensor-parallel ranks with sequence parallelism."""
    model = DecoderConfig(
        family=DecoderFamily.llama,
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=sum(BLOCKS),
        num_attention_heads=HEADS,
        num_key_value_heads=KEYS,
        head_dim=HEAD_DIM,
    )
    config = Config(
        model=model,
        data=TokenDataConfig(root="", sequence_length=TOKENS),
        optim=OptimConfig(precision=Precision.bf16, clip_norm=1.0, global_batch_size=2 * MICROBATCHES),
    )
    config.parallelism = ParallelismConfig(
        **{
            "pp": 2,
            "dp_replicate": 1,
            "dp_shard": 2,
            "tp": 2,
            "sequence_parallel": True,
            "microbatch_size": 1,
            "layers_per_stage": list(BLOCKS),
            **parallelism,
        }
    )
    config.cluster = ClusterConfig(
        kind=ClusterKind.slurm,
        device=Device.cuda,
        gpu_request=GpuRequest.gres,
        hardware="rtx4090",
        ranks_per_node=8,
    )
    return config, make_plan(config)


def test_storages_are_counted_once_while_they_hold_something() -> None:
    with FakeTensorMode(), Tracker() as tracker:
        x = torch.empty(1000)
        view = x.view(10, 100)[2:]
        assert tracker.alive() == 4000
        del x
        y = view + 1
        assert (tracker.alive(), tracker.peak) == (7200, 7200)
        y.untyped_storage().resize_(0)
        assert tracker.alive() == 4000
        del view
        assert (tracker.alive(), tracker.peak) == (0, 7200)


def test_two_short_steps_tell_of_a_long_one(monkeypatch: pytest.MonkeyPatch) -> None:
    config, plan = small(checkpointing=Checkpointing.full)
    told = trace_places(config, plan, [0, 1])
    monkeypatch.setattr(trace, "_short_lengths", lambda *_: (MICROBATCHES,))
    for short, whole in zip(told, trace_places(config, plan, [0, 1]), strict=True):
        assert short.collectives == whole.collectives
        assert short.state_bytes == whole.state_bytes
        losses = 4 * MICROBATCHES  # which the last stage keeps until the step ends, bytes
        assert 0 <= whole.peak_bytes - short.peak_bytes <= losses


def test_an_offloaded_optimizer_is_not_traced() -> None:
    config, plan = small()
    config.parallelism.offload_optimizer = True
    with pytest.raises(ConfigError, match="offload_optimizer"):
        trace_step(config, plan, 0)


# Collectives


def expected(checkpointing: Checkpointing, place: int) -> dict[tuple[str, str], Traffic]:
    """By hand. Korthikanti et al. 2022, §4.2.2: an all-gather before and a reduce-scatter after attention and
    MLP, the same in backward. Rajbhandari et al. 2020, §7.2: a parameter is gathered for forward and for
    backward and its gradient reduced. Whole tensors, each kind's (number, bytes) of one microbatch."""
    blocks, hidden = BLOCKS[place], TOKENS * HIDDEN * BF16
    again = checkpointing is Checkpointing.full
    # A block computed again gathers twice more and scatters once: what follows the last matrix is not needed.
    gathers, scatters = blocks * (4 + 2 * again), blocks * (4 + again)
    # The embedding's sum over ranks scatters, its gradient is gathered; the head's input the other way round.
    gathers, scatters = gathers + 1, scatters + 1
    # Norms are whole on each tensor-parallel rank: their gradients are added up.
    norms = 2 * blocks + place
    # The loss: the maximum, then two sums, of each token in fp32 (Shoeybi et al. 2019, §3).
    losses = (2, 3 * TOKENS * FP32) if place else (0, 0)
    block = HIDDEN * HEAD_DIM * (2 * HEADS + 2 * KEYS) // 2 + 3 * HIDDEN * INTERMEDIATE // 2 + 2 * HIDDEN
    units = [*[block] * blocks, VOCAB * HIDDEN // 2]
    last_norm = HIDDEN * place  # belongs to the stage, which stays gathered until its backward
    calls = {
        ("tp", "all_gather"): (gathers, gathers * hidden),
        ("tp", "reduce_scatter"): (scatters, scatters * hidden),
        ("tp", "all_reduce"): (norms + losses[0], norms * HIDDEN * BF16 + losses[1]),
        ("dp_shard", "all_gather"): (2 * len(units) + place, BF16 * (2 * sum(units) + last_norm)),
        ("dp_shard", "reduce_scatter"): (len(units) + place, FP32 * (sum(units) + last_norm)),
        ("pp", "send"): (1, hidden // 2),
        ("pp", "recv"): (1, hidden // 2),
    }
    step = {key: Traffic(MICROBATCHES * n, MICROBATCHES * size) for key, (n, size) in calls.items()}
    step["world", "all_reduce"] = Traffic(1, FP32)  # the squares of the gradient norm
    if place == 0:
        # One in vain: with two microbatches in flight, FSDP2 takes the unit that ran before the embedding,
        # the other microbatch's last block, for the next in backward.
        fetched = step["dp_shard", "all_gather"]
        step["dp_shard", "all_gather"] = Traffic(fetched.count + 1, fetched.size_bytes + BF16 * block)
    return step


@pytest.mark.parametrize("checkpointing", [Checkpointing.none, Checkpointing.full])
def test_collectives_of_a_step_equal_the_arithmetic(checkpointing: Checkpointing) -> None:
    config, plan = small(checkpointing=checkpointing)
    for place, traced in enumerate(trace_places(config, plan, [0, 1])):
        assert traced.collectives == expected(checkpointing, place)


def test_replicas_add_up_once_a_step() -> None:
    config, plan = small(dp_replicate=2, dp_shard=1)
    (traced,) = trace_places(config, plan, [0])
    sharded = expected(Checkpointing.none, 0)["dp_shard", "reduce_scatter"]
    once = Traffic(sharded.count // MICROBATCHES, sharded.size_bytes // MICROBATCHES)
    assert traced.collectives["dp_replicate", "all_reduce"] == once


def lose_the_norm() -> None:
    clip.dist = type("Silent", (), {"all_reduce": staticmethod(lambda tensor: None)})


def send_twice() -> None:
    send = pipeline._Channel.send

    def twice(self: Any, *message: Any) -> None:
        send(self, *message)
        send(self, *message)

    pipeline._Channel.send = twice


def reduce_for_each_matrix() -> None:
    """As it was: q, k and v, gate and up each took its gradient to all ranks by itself."""

    def convert_input(module: Any, mesh: Any, given: Any, wanted: Any) -> None:
        def convert(module: Any, args: Any) -> Any:
            x = args[0]
            if not isinstance(x, tensor.DTensor):
                x = tensor.DTensor.from_local(x, mesh, [given], run_check=False)
            return (x.redistribute(placements=[wanted]), *args[1:])

        module.register_forward_pre_hook(convert)

    tensor._convert_input = convert_input


@pytest.mark.parametrize(
    ("change", "key"),
    [
        (lose_the_norm, ("world", "all_reduce")),
        (send_twice, ("pp", "send")),
        (reduce_for_each_matrix, ("tp", "reduce_scatter")),
    ],
)
def test_a_lost_or_doubled_collective_is_seen(change: Callable[[], None], key: tuple[str, str]) -> None:
    config, plan = small(checkpointing=Checkpointing.none)
    (traced,) = trace_places(config, plan, [0], change)
    wanted = expected(Checkpointing.none, 0)
    assert traced.collectives.get(key) != wanted[key]
