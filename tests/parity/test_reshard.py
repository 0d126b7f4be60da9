"""A run saved in one layout goes on in another, on another number of ranks too, as if undisturbed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hpctrain.checkpoint import reader, writer
from hpctrain.core.state import Kept, make_state, restore_state
from hpctrain.core.step import TrainStep
from tests.helpers.ranks import run_ranks
from tests.parity.cells import Cell, Told, build, compare_step, in_float64, microbatches_of, train_plainly

CPU = torch.device("cpu")
PAIRS = [
    (Cell(dp_shard=2), Cell(dp_shard=4)),
    (Cell(dp_shard=4), Cell(dp_replicate=2)),
    (Cell(tp=2), Cell()),
    (Cell(), Cell(tp=2, sequence_parallel=True)),
    (Cell(pp=2), Cell(tp=2)),
    (Cell(dp_shard=2, tp=2), Cell(pp=2)),
    (
        Cell(pp=2, layers=4, schedule="interleaved_1f1b", stages_per_rank=2, num_microbatches=4),
        Cell(pp=4, layers=4),
    ),
    (Cell(pp=2, tied=True), Cell(dp_shard=2, tp=2, tied=True)),
    (Cell(pp=2, dp_shard=2, tp=2), Cell(dp_replicate=2, dp_shard=2)),
    (Cell(pp=2, lora=2, dropout=0.2), Cell(tp=2, lora=2, dropout=0.2)),
    (Cell(dp_shard=2, offload=True), Cell(pp=2)),
]


def save_after_two_steps(rank: int, world: int, cell: Cell, root: Path) -> None:
    with in_float64():
        train = build(cell)
        for step in range(2):
            train(microbatches_of(cell, step, train.parallel.dp_rank), step)
        _save(train, root, 2)


def _save(train: TrainStep, root: Path, step: int) -> None:
    writer.save(
        root,
        step=step,
        attempt="1_0_1",
        state=make_state(Kept(train.parallel.model, train.optimizer), CPU),
        facts={},
        group=dist.group.WORLD,
        timeout_s=60,
        layout={},
    )


def go_on_and_compare(rank: int, world: int, cell: Cell, root: Path, wanted: Told) -> list[str]:
    with in_float64():
        train = build(cell)
        kept = Kept(train.parallel.model, train.optimizer)
        state = make_state(kept, CPU)
        loaded = reader.load(root, state=state, group=dist.group.WORLD, timeout_s=60)
        assert loaded is not None and loaded.step == 2
        restore_state(state, loaded.per_rank, kept, CPU)
        return compare_step(train, cell, 2, wanted[2])


@pytest.mark.parametrize(("before", "after"), PAIRS, ids=[f"{a} → {b}" for a, b in PAIRS])
def test_a_step_after_a_change_of_layout_equals_the_undisturbed_one(
    before: Cell, after: Cell, tmp_path: Path
) -> None:
    with in_float64():
        wanted = train_plainly(before)
    run_ranks(before.world, save_after_two_steps, before, tmp_path)
    found = run_ranks(after.world, go_on_and_compare, after, tmp_path, wanted)
    assert [line for lines in found for line in lines] == []


def save_optimizer_less(rank: int, world: int, cell: Cell, root: Path) -> None:
    with in_float64():
        train = build(cell)
        for step in range(2):
            train(microbatches_of(cell, step, train.parallel.dp_rank), step)
        for state in train.optimizer.state.values():
            state["exp_avg"].zero_()
        _save(train, root, 2)


def test_the_comparison_notices_a_lost_optimizer_state(tmp_path: Path) -> None:
    before, after = PAIRS[0]
    with in_float64():
        wanted = train_plainly(before)
    run_ranks(before.world, save_optimizer_less, before, tmp_path)
    found = run_ranks(after.world, go_on_and_compare, after, tmp_path, wanted)
    assert any("value" in line for lines in found for line in lines)
