"""fp32, bf16 and fp16 follow float64 as closely as their formats allow, in every layout alike."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from hpctrain.config.schema import Precision
from hpctrain.core.hybrid import Hybrid
from hpctrain.core.loss_scale import LossScale
from hpctrain.core.optim import build_optimizer
from hpctrain.core.step import TrainStep
from hpctrain.models.decoder_spec import SPEC
from hpctrain.models.spec import make_parameter_groups
from hpctrain.plan.plan import make_plan
from tests.helpers.ranks import run_ranks
from tests.parity.cells import Cell, in_float64, microbatches_of, train_plainly

CPU = torch.device("cpu")
LAYOUTS = [
    Cell(),
    Cell(dp_replicate=2, dp_shard=2),
    Cell(tp=2, sequence_parallel=True, dropout=0.2, lora=2),
    Cell(pp=2, dp_shard=2, checkpointing="full", chunk=5),
]
# Unit roundoff of each format (Higham 2002, §2.1) times 50 for sums through three blocks; in fp32 times 150,
# because AdamW turns rounding of small gradients into larger parts of a step. A gradient that was not
# unscaled, or a lost rank, is off by a factor of 2 or more.
RELATIVE = {"fp32": 9e-6, "bf16": 0.15, "fp16": 0.02}


def build_in(cell: Cell, precision: str) -> TrainStep:
    config = cell.config()
    config.optim.precision = Precision[precision]
    assert SPEC.staged is not None
    hybrid = Hybrid(config, make_plan(cell.config()), SPEC.staged, CPU)
    optimizer = build_optimizer(make_parameter_groups(hybrid.model, 0.1), config.optim)
    scale = LossScale(CPU) if precision == "fp16" else None
    return TrainStep(hybrid, optimizer, ema=None, optim=config.optim, steps_per_epoch=4, loss_scale=scale)


def train_in(rank: int, world: int, cell: Cell, precision: str) -> list[tuple[float, float]]:
    train = build_in(cell, precision)
    if train.loss_scale is not None:
        train.loss_scale.scale.fill_(2.0**10)  # where a run would arrive after its first overflows
    told = []
    for step in range(3):
        microbatches = microbatches_of(cell, step, train.parallel.dp_rank)
        for microbatch in microbatches:
            microbatch.weight_BL = microbatch.weight_BL.float()
        scalars = train(microbatches, step)
        dist.all_reduce(scalars["loss"])
        told.append((float(scalars["loss"]), float(scalars["grad_norm"])))
    return told


@pytest.mark.parametrize("precision", list(RELATIVE))
@pytest.mark.parametrize("cell", LAYOUTS, ids=str)
def test_losses_and_norms_follow_float64(cell: Cell, precision: str) -> None:
    with in_float64():
        wanted = [(each["loss"], each["norm"]) for each in train_plainly(cell)]
    ranks = run_ranks(cell.world, train_in, cell, precision)
    assert all(told == ranks[0] for told in ranks)
    for found, expected in zip(ranks[0], wanted, strict=True):
        assert found == pytest.approx(expected, rel=RELATIVE[precision])


def overflow_once(rank: int, world: int, cell: Cell) -> list[tuple[bool, float]]:
    """A step whose scaled loss is beyond fp16, then sound ones: whether weights moved, and the scale."""
    train = build_in(cell, "fp16")
    assert train.loss_scale is not None
    train.loss_scale.scale.fill_(2.0**40)
    told = []
    for step in range(28):
        before = [p.to_local().clone() for p in train.parameters]
        microbatches = microbatches_of(cell, 0, train.parallel.dp_rank)
        for microbatch in microbatches:
            microbatch.weight_BL = microbatch.weight_BL.float()
        train(microbatches, min(step, 3))
        moved = any(not torch.equal(p.to_local(), b) for p, b in zip(train.parameters, before, strict=True))
        told.append((moved, float(train.loss_scale.scale)))
    return told


def test_an_overflow_on_any_rank_skips_the_step_on_all_and_halves_the_scale() -> None:
    ranks = run_ranks(2, overflow_once, Cell(pp=2))
    assert ranks[0] == ranks[1]
    assert [moved for moved, _ in ranks[0]][:3] == [False] * 3 and any(moved for moved, _ in ranks[0])
    scale = 2.0**40
    for moved, after in ranks[0]:
        scale = scale if moved else scale / 2
        assert after == scale
