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

from hpctrain.core.hybrid import Hybrid
from hpctrain.core.optim import build_optimizer
from hpctrain.core.parallelize import own_piece
from hpctrain.core.rng import dropout_keys
from hpctrain.core.step import TrainStep
from hpctrain.models.decoder import Decoder
from hpctrain.models.decoder_spec import SPEC
from hpctrain.models.init import make_initial
from hpctrain.models.lora import apply_lora
from hpctrain.models.spec import make_parameter_groups
from hpctrain.plan.plan import make_plan
from hpctrain.selftest.cells import LENGTH, SEED, SEQUENCES, VOCAB, Cell

CPU = torch.device("cpu")
# Sums in another order differ by 1e-12 at most after three AdamW steps (measured); a lost term by 1e-7.
TOLERANCE = 1e-10
# Of loss and norm. Unit roundoff (Higham 2002, §2.1) times 50 for sums through three blocks and steps, and in
# fp32 30 more for kernels in which a GPU adds otherwise; a lost rank or term is off by tens of percent.
RELATIVE = {"fp32": 1e-4, "bf16": 0.15}
# Warm-up over half of 4 steps an epoch, then half a cosine over the other 2.
RATES = [0.005, 0.01, 0.01]

Told = list[dict[str, Any]]  # of each step: loss, norm, grads and values by name


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
        return self._with(lambda value: value[part])

    def to(self, device: torch.device) -> Tokens:
        return self._with(lambda value: value.to(device))

    def _with(self, change: Callable[[Tensor], Tensor]) -> Tokens:
        changed: dict[str, Any] = {n: change(v) for n, v in vars(self).items() if isinstance(v, Tensor)}
        return replace(self, **changed)


def make_batch(step: int, packed: bool, sequences: int = SEQUENCES) -> Tokens:
    """A global batch: documents of several lengths, weights of 0 and 1, two sequences of padding."""
    random = torch.Generator().manual_seed(100 + step)
    shape = (sequences, LENGTH)
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
        sample_id_B=torch.arange(step * sequences, (step + 1) * sequences),
        counts={"nll": float(weight_BL.sum())},
    )


@contextmanager
def in_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Everything built inside is of this type."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def train_plainly(cell: Cell, device: torch.device = CPU) -> Told:
    """One process in float64, whole batches, torch's own optimizer and clipping; the dropout keys are the
    run's."""
    with in_dtype(torch.float64):
        return _train_plainly(cell, device)


def _train_plainly(cell: Cell, device: torch.device) -> Told:
    model = Decoder(cell.model)
    apply_lora(model, cell.model.lora)
    model.to(device, torch.float64)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(make_initial(name, tuple(p.shape), torch.float64, SEED, cell.model))
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    groups: list[dict[str, Any]] = [
        {"params": [p for p in named.values() if p.ndim == 2], "weight_decay": 0.1},
        {"params": [p for p in named.values() if p.ndim == 1], "weight_decay": 0.0},
    ]
    kinds: dict[str, Any] = {
        "adamw": torch.optim.AdamW,
        "sgd": partial(torch.optim.SGD, momentum=0.9, nesterov=True),
    }
    optimizer = kinds[cell.optimizer](groups, lr=1.0)
    told: Told = []
    for step, rate in enumerate(RATES):
        batch = make_batch(step, cell.packed, cell.sequences).to(device)
        keys_B = dropout_keys(SEED, step, batch.sample_id_B)
        loss = model(batch.token_BL, **batch.inputs(), dropout_key_B=keys_B).sum() / batch.counts["nll"]
        optimizer.zero_grad()
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = rate
        norm = torch.nn.utils.clip_grad_norm_(named.values(), cell.clip or float("inf"))
        grads = {n: p.grad.clone() for n, p in named.items() if p.grad is not None}
        optimizer.step()
        values = {n: p.detach().clone() for n, p in model.named_parameters()}
        told.append({"loss": float(loss.detach()), "norm": float(norm), "grads": grads, "values": values})
    return told


def build(cell: Cell, device: torch.device = CPU) -> TrainStep:
    """The step as a run puts it together, in the default dtype. Collective."""
    config = cell.config()
    assert SPEC.staged is not None
    hybrid = Hybrid(config, make_plan(config), SPEC.staged, device)
    optimizer = build_optimizer(make_parameter_groups(hybrid.model, 0.1), config.optim)
    return TrainStep(hybrid, optimizer, ema=None, optim=config.optim, steps_per_epoch=4)


def microbatches_of(cell: Cell, step: int, dp_rank: int) -> list[Tokens]:
    batch = make_batch(step, cell.packed, cell.sequences)
    share = cell.sequences // (cell.dp_replicate * cell.dp_shard)
    size = share // cell.num_microbatches
    starts = range(dp_rank * share, (dp_rank + 1) * share, size)
    return [batch.cut(slice(start, start + size)) for start in starts]


def compare(cell: Cell, wanted: Told, device: torch.device = CPU) -> list[str]:
    """Train a cell on this rank and say where it differs from the reference, by how much. Collective."""
    with in_dtype(torch.float64 if cell.precision == "fp64" else torch.float32):
        train = build(cell, device)
        told = [compare_step(train, cell, step, expected, device) for step, expected in enumerate(wanted)]
    return [line for lines in told for line in lines]


def compare_step(
    train: TrainStep, cell: Cell, step: int, expected: dict[str, Any], device: torch.device = CPU
) -> list[str]:
    """Do a step, and say where this rank's pieces differ from the reference afterwards. Collective.

    In fp64 loss, norm, gradients and values are compared; else loss and norm, relative to their size.
    """
    wrong: list[str] = []

    def tell(what: str, error: float, allowed: float) -> None:
        if not error <= allowed:
            wrong.append(f"step {step} rank {dist.get_rank()}: {what} differs by {error:.2e}")

    def look(what: str, found: Tensor, reference: Tensor) -> None:
        difference = found.detach().to(reference.device) - reference
        tell(what, float(difference.abs().max()) if reference.numel() else 0.0, TOLERANCE)

    grads: dict[str, Tensor] = {}  # as the optimizer sees them: some change them

    def keep_grads(*args: Any) -> None:
        named: Any = train.parallel.model.named_parameters()
        grads.update({name: p.grad.to_local().clone() for name, p in named if p.grad is not None})

    hook = train.optimizer.register_step_pre_hook(keep_grads)
    batches = [batch.to(device) for batch in microbatches_of(cell, step, train.parallel.dp_rank)]
    for batch in batches:
        batch.weight_BL = batch.weight_BL.to(torch.get_default_dtype())
    scalars = train(batches, step)
    hook.remove()
    dist.all_reduce(scalars["loss"])
    for what, found in (("loss", scalars["loss"]), ("norm", scalars["grad_norm"])):
        size = abs(expected[what])
        allowed = TOLERANCE if cell.precision == "fp64" else RELATIVE[cell.precision] * size
        tell(what, abs(float(found) - expected[what]), allowed)
    if cell.precision != "fp64":
        return wrong
    parameter: Any
    for name, parameter in train.parallel.model.named_parameters():
        piece = own_piece(parameter)
        look(f"value {name}", parameter.to_local(), expected["values"][name][piece])
        if name in expected["grads"]:
            look(f"grad {name}", grads[name], expected["grads"][name][piece])
    return wrong
