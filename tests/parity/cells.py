"""A layout trained for three steps, beside one process that trains the same in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hpctrain.config.schema import (
    Checkpointing,
    ClusterConfig,
    Config,
    DecoderConfig,
    DecoderFamily,
    LoraConfig,
    OptimConfig,
    OptimizerKind,
    ParallelismConfig,
    Schedule,
    TokenDataConfig,
)
from hpctrain.core.hybrid import Hybrid
from hpctrain.core.optim import build_optimizer
from hpctrain.core.parallelize import own_piece
from hpctrain.core.rng import dropout_keys
from hpctrain.core.step import TrainStep
from hpctrain.errors import PlanError
from hpctrain.models.decoder import Decoder
from hpctrain.models.decoder_spec import SPEC
from hpctrain.models.init import make_initial
from hpctrain.models.lora import apply_lora
from hpctrain.models.spec import make_parameter_groups
from hpctrain.plan.plan import make_plan

NUM_STEPS, SEQUENCES, LENGTH, VOCAB = 3, 16, 12, 33
SEED = 5


@dataclass(frozen=True)
class Cell:
    """A layout and what is trained in it."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    sequence_parallel: bool = False
    schedule: str = "1f1b"
    stages_per_rank: int = 1
    num_microbatches: int = 2
    reshard: bool = True
    checkpointing: str = "none"
    compiled: bool = False
    offload: bool = False
    layers: int = 3
    family: str = "qwen3"
    tied: bool = False
    packed: bool = True
    dropout: float = 0.0
    lora: int = 0
    chunk: int = 0
    clip: float | None = 0.5
    optimizer: str = "adamw"
    split: tuple[int, ...] | None = None

    @property
    def world(self) -> int:
        return self.pp * self.dp_replicate * self.dp_shard * self.tp

    def __str__(self) -> str:
        default = Cell()
        shown = {k: v for k, v in vars(self).items() if v != getattr(default, k)}
        return " ".join(f"{k}={v}" for k, v in shown.items()) or "one rank"

    @property
    def model(self) -> DecoderConfig:
        return DecoderConfig(
            family=DecoderFamily[self.family],
            vocab_size=VOCAB,  # no multiple of any degree
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=self.layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=4,
            initializer_range=0.3,
            tie_word_embeddings=self.tied,
            residual_dropout=self.dropout,
            loss_chunk_tokens=self.chunk,
            lora=LoraConfig(rank=self.lora, dropout=self.dropout),
        )

    def config(self) -> Config:
        parallelism = ParallelismConfig(
            pp=self.pp,
            dp_replicate=self.dp_replicate,
            dp_shard=self.dp_shard,
            tp=self.tp,
            schedule=Schedule[self.schedule],
            stages_per_rank=self.stages_per_rank,
            sequence_parallel=self.sequence_parallel,
            reshard_after_forward=self.reshard,
            checkpointing=Checkpointing[self.checkpointing],
            offload_optimizer=self.offload,
            compile=self.compiled,
            layers_per_stage=None if self.split is None else list(self.split),
            microbatch_size=max(1, SEQUENCES // (self.dp_replicate * self.dp_shard * self.num_microbatches)),
        )
        optim = OptimConfig(
            kind=OptimizerKind[self.optimizer],
            lr=0.01,
            num_epochs=1,
            warmup_epochs=0.5,
            clip_norm=self.clip,
            weight_decay=0.1,
            global_batch_size=SEQUENCES,
        )
        return Config(
            seed=SEED,
            model=self.model,
            parallelism=parallelism,
            cluster=ClusterConfig(ranks_per_node=self.world),
            optim=optim,
            data=TokenDataConfig(root="", sequence_length=LENGTH),
        )

    def is_legal(self) -> bool:
        """Whether the plan allows it."""
        try:
            return make_plan(self.config()).batch.num_microbatches == self.num_microbatches
        except PlanError:
            return False


@dataclass
class Tokens:
    """Sequences of a step."""

    token_BL: Tensor
    label_BL: Tensor
    weight_BL: Tensor
    position_BL: Tensor
    document_BL: Tensor | None
    sample_id_B: Tensor
    counts: dict[str, float] = field(default_factory=dict)

    def inputs(self) -> dict[str, Tensor | None]:
        return {
            "position_BL": self.position_BL,
            "document_BL": self.document_BL,
            "label_BL": self.label_BL,
            "weight_BL": self.weight_BL,
        }

    def cut(self, part: slice) -> Tokens:
        tensors = {name: value[part] for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **tensors)


def make_batch(step: int, packed: bool) -> Tokens:
    """A global batch: documents of several lengths, weights of 0 and 1, two sequences of padding."""
    random = torch.Generator().manual_seed(100 + step)
    shape = (SEQUENCES, LENGTH)
    weight_BL = (torch.rand(shape, generator=random, dtype=torch.float32) < 0.7).double()
    weight_BL[-2:] = 0
    starts_BL = torch.rand(shape, generator=random, dtype=torch.float32) < 0.2
    starts_BL[:, 0] = True
    index_L = torch.arange(LENGTH)
    first_BL = torch.where(starts_BL, index_L, 0).cummax(1).values
    return Tokens(
        token_BL=torch.randint(0, VOCAB, shape, generator=random),
        label_BL=torch.randint(0, VOCAB, shape, generator=random),
        weight_BL=weight_BL,
        position_BL=index_L - first_BL if packed else index_L.expand(shape),
        document_BL=starts_BL.cumsum(1) if packed else None,
        sample_id_B=torch.arange(step * SEQUENCES, (step + 1) * SEQUENCES),
        counts={"nll": float(weight_BL.sum())},
    )


Told = list[dict[str, Any]]


def train_plainly(cell: Cell) -> Told:
    """One process, whole batches, torch's own AdamW and clipping; the dropout keys are the run's."""
    model = Decoder(cell.model).double()
    apply_lora(model, cell.model.lora)
    model.double()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(make_initial(name, tuple(p.shape), torch.float64, SEED, cell.model))
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    groups = [
        {"params": [p for p in named.values() if p.ndim == 2], "weight_decay": 0.1},
        {"params": [p for p in named.values() if p.ndim == 1], "weight_decay": 0.0},
    ]
    kinds = {"adamw": torch.optim.AdamW, "sgd": partial(torch.optim.SGD, momentum=0.9, nesterov=True)}
    optimizer = kinds[cell.optimizer](groups, lr=1.0)
    told: Told = []
    for step, rate in enumerate(RATES):
        batch = make_batch(step, cell.packed)
        nll_B = model(
            batch.token_BL, **batch.inputs(), dropout_key_B=dropout_keys(SEED, step, batch.sample_id_B)
        )
        loss = nll_B.sum() / batch.counts["nll"]
        optimizer.zero_grad()
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = rate
        norm = torch.nn.utils.clip_grad_norm_(named.values(), cell.clip or float("inf"))
        grads = {n: p.grad.clone() for n, p in named.items()}
        optimizer.step()
        values = {n: p.detach().clone() for n, p in model.named_parameters()}
        told.append({"loss": float(loss.detach()), "norm": float(norm), "grads": grads, "values": values})
    return told


# Warm-up over half of 4 steps an epoch, then half a cosine over the other 2.
RATES = [0.005, 0.01, 0.01]


def build(cell: Cell) -> TrainStep:
    """The step as a run puts it together, in the default dtype."""
    config = cell.config()
    assert SPEC.staged is not None
    hybrid = Hybrid(config, make_plan(config), SPEC.staged, torch.device("cpu"))
    optimizer = build_optimizer(make_parameter_groups(hybrid.model, 0.1), config.optim)
    return TrainStep(hybrid, optimizer, ema=None, optim=config.optim, steps_per_epoch=4)


def microbatches_of(cell: Cell, step: int, dp_rank: int) -> list[Tokens]:
    batch = make_batch(step, cell.packed)
    share = SEQUENCES // (cell.dp_replicate * cell.dp_shard)
    size = share // cell.num_microbatches
    starts = range(dp_rank * share, (dp_rank + 1) * share, size)
    return [batch.cut(slice(start, start + size)) for start in starts]


@contextmanager
def in_float64() -> Iterator[None]:
    """Everything built inside is in float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def train_and_compare(
    rank: int, world: int, cell: Cell, wanted: Told, break_it: Callable[[], None] | None = None
) -> list[str]:
    """Train on this rank and say where its pieces differ from the reference, by how much."""
    if break_it is not None:
        break_it()
    with in_float64():
        train = build(cell)
        told = [compare_step(train, cell, step, expected) for step, expected in enumerate(wanted)]
    return [line for lines in told for line in lines]


def compare_step(train: TrainStep, cell: Cell, step: int, expected: dict[str, Any]) -> list[str]:
    """Do a step, and say where this rank's pieces differ from the reference afterwards."""
    wrong: list[str] = []

    def compare(what: str, found: Tensor, reference: Tensor) -> None:
        error = float((found.detach() - reference).abs().max()) if reference.numel() else 0.0
        if not error <= TOLERANCE:
            wrong.append(f"step {step} rank {dist.get_rank()}: {what} differs by {error:.2e}")

    grads: dict[str, Tensor] = {}  # as the optimizer sees them: some change them

    def keep_grads(*args: Any) -> None:
        named = train.parallel.model.named_parameters()
        grads.update({name: p.grad.to_local().clone() for name, p in named if p.grad is not None})

    hook = train.optimizer.register_step_pre_hook(keep_grads)
    scalars = train(microbatches_of(cell, step, train.parallel.dp_rank), step)
    hook.remove()
    dist.all_reduce(scalars["loss"])
    compare("loss", scalars["loss"], torch.tensor(expected["loss"]))
    compare("norm", scalars["grad_norm"], torch.tensor(expected["norm"]))
    for name, parameter in train.parallel.model.named_parameters():
        piece = own_piece(parameter)
        compare(f"value {name}", parameter.to_local(), expected["values"][name][piece])
        if name in expected["grads"]:
            compare(f"grad {name}", grads[name], expected["grads"][name][piece])
    return wrong


# Sums in another order differ by 1e-12 at most after three AdamW steps (measured); a lost term by 1e-7.
TOLERANCE = 1e-10
