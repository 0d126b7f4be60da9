"""Every legal layout gives what one process gives: loss, gradient norm, gradients, parameters, in float64."""

from __future__ import annotations

import dataclasses
import os
import random
import shutil
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Partial

from hpctrain.core import clip, tensor
from hpctrain.core.hybrid import Hybrid
from hpctrain.models import dropout
from tests.helpers.ranks import run_ranks
from tests.parity.cells import Cell, Told, in_float64, train_and_compare, train_plainly

CAN_COMPILE = shutil.which("g++") is not None
INTERLEAVED = {"schedule": "interleaved_1f1b", "stages_per_rank": 2}
FOUR = {"num_microbatches": 4}

CELLS = [
    # one axis
    Cell(),
    Cell(num_microbatches=8, chunk=5),
    Cell(family="llama", packed=False),
    Cell(family="mistral", tied=True, clip=None),
    Cell(family="qwen2", dropout=0.2, checkpointing="selective"),
    Cell(lora=2, dropout=0.2),
    Cell(offload=True),
    Cell(optimizer="sgd"),
    Cell(dp_shard=2),
    Cell(dp_shard=4, tied=True, dropout=0.2),
    Cell(dp_shard=8, num_microbatches=1),
    Cell(dp_shard=2, reshard=False, num_microbatches=4),
    Cell(dp_shard=2, checkpointing="full", family="llama"),
    Cell(dp_shard=2, offload=True, lora=2),
    Cell(dp_replicate=2),
    Cell(dp_replicate=4, dropout=0.2, num_microbatches=1),
    Cell(dp_replicate=2, dp_shard=2),
    Cell(dp_replicate=2, dp_shard=4, tied=True, num_microbatches=1),
    Cell(dp_replicate=2, dp_shard=2, reshard=False, lora=2, dropout=0.2),
    Cell(tp=2),
    Cell(tp=2, family="llama", packed=False),
    Cell(tp=2, family="qwen2", chunk=7),
    Cell(tp=2, tied=True, dropout=0.2),
    Cell(tp=2, lora=2, dropout=0.2),
    Cell(tp=2, checkpointing="full"),
    Cell(tp=2, checkpointing="selective", dropout=0.2),
    Cell(tp=2, sequence_parallel=True),
    Cell(tp=2, sequence_parallel=True, family="qwen2", tied=True),
    Cell(tp=2, sequence_parallel=True, dropout=0.2),
    Cell(tp=2, sequence_parallel=True, dropout=0.2, checkpointing="full"),
    Cell(tp=2, sequence_parallel=True, lora=2, dropout=0.2),
    Cell(tp=2, sequence_parallel=True, chunk=5, packed=False),
    Cell(pp=2),
    Cell(pp=2, schedule="gpipe", num_microbatches=4),
    Cell(pp=2, num_microbatches=1),
    Cell(pp=4, layers=5, num_microbatches=8),
    Cell(pp=4, layers=4, schedule="gpipe", num_microbatches=2, dropout=0.2),
    Cell(pp=2, layers=5, **INTERLEAVED, **FOUR),
    Cell(pp=2, layers=4, tied=True, dropout=0.2, **INTERLEAVED, **FOUR),
    Cell(pp=4, layers=8, **INTERLEAVED, num_microbatches=8),
    Cell(pp=2, layers=7, schedule="interleaved_1f1b", stages_per_rank=3, num_microbatches=2),
    Cell(pp=8, layers=8, num_microbatches=8),
    Cell(pp=2, tied=True),
    Cell(pp=4, layers=4, tied=True, family="llama", num_microbatches=4),
    Cell(pp=2, lora=2, dropout=0.2),
    Cell(pp=2, layers=4, split=(3, 1), checkpointing="full"),
    Cell(pp=2, checkpointing="selective", family="qwen2"),
    Cell(pp=2, offload=True),
    # two axes
    Cell(pp=2, dp_shard=2),
    Cell(pp=2, tp=2, optimizer="sgd", tied=True),
    Cell(pp=2, dp_shard=2, reshard=False, tied=True, dropout=0.2),
    Cell(pp=2, dp_shard=4, num_microbatches=4),
    Cell(pp=2, dp_replicate=2, checkpointing="full"),
    Cell(pp=2, dp_replicate=2, dp_shard=2, tied=True),
    Cell(pp=2, dp_shard=2, layers=4, **INTERLEAVED, **FOUR),
    Cell(pp=2, tp=2),
    Cell(pp=2, tp=2, tied=True, sequence_parallel=True, dropout=0.2),
    Cell(pp=2, tp=2, schedule="gpipe", family="llama", packed=False),
    Cell(pp=2, tp=2, layers=4, sequence_parallel=True, **INTERLEAVED, **FOUR),
    Cell(pp=4, tp=2, layers=5, sequence_parallel=True, checkpointing="full", num_microbatches=4),
    Cell(pp=2, tp=2, lora=2, dropout=0.2, sequence_parallel=True),
    Cell(dp_shard=2, tp=2),
    Cell(dp_shard=2, tp=2, sequence_parallel=True, tied=True, dropout=0.2),
    Cell(dp_shard=4, tp=2, checkpointing="full"),
    Cell(dp_shard=2, tp=2, reshard=False, lora=2, dropout=0.2),
    Cell(dp_replicate=2, tp=2, family="qwen2"),
    Cell(dp_replicate=2, dp_shard=2, tp=2, sequence_parallel=True, chunk=5),
    # three and four axes
    Cell(pp=2, dp_shard=2, tp=2),
    Cell(pp=2, dp_shard=2, tp=2, sequence_parallel=True, tied=True, dropout=0.2, checkpointing="full"),
    Cell(pp=2, dp_shard=2, tp=2, lora=2, dropout=0.2, sequence_parallel=True, schedule="gpipe"),
    Cell(pp=2, dp_replicate=2, tp=2, layers=4, chunk=5, **INTERLEAVED, **FOUR),
    # in fp32, loss and norm alone
    Cell(dp_replicate=2, sequences=24, num_microbatches=3, precision="fp32"),
    Cell(pp=2, dp_shard=2, tp=2, sequence_parallel=True, checkpointing="full", precision="fp32"),
]
# Compiling takes each rank a core for half a minute.
LONG_CELLS = [
    Cell(compiled=True, layers=2, tp=2, sequence_parallel=True),
    Cell(compiled=True, layers=2),
    Cell(compiled=True, layers=2, pp=2, dp_shard=2, checkpointing="full"),
    Cell(compiled=True, layers=2, tp=2, checkpointing="selective", lora=2, dropout=0.2),
    Cell(compiled=True, layers=4, pp=2, **INTERLEAVED, **FOUR),
]


@cache
def reference(cell: Cell) -> Told:
    with torch.random.fork_rng():
        return train_plainly(cell)


def expected(cell: Cell) -> Told:
    """The reference depends on the model alone: layouts of one model share it."""
    model = ("layers", "family", "tied", "packed", "dropout", "lora", "clip", "optimizer", "sequences")
    return reference(Cell(**{name: getattr(cell, name) for name in model}))


def compare(cell: Cell, break_it: Callable[[], None] | None = None) -> list[str]:
    with in_float64():
        wanted = expected(cell)
    found = run_ranks(cell.world, train_and_compare, cell, wanted, break_it, timeout_s=300)
    return [line for lines in found for line in lines]


@pytest.mark.parametrize(
    "cell", [*CELLS, *(pytest.param(cell, marks=pytest.mark.long) for cell in LONG_CELLS)], ids=str
)
def test_a_layout_equals_one_process(cell: Cell) -> None:
    if cell.compiled and not CAN_COMPILE:
        pytest.skip("torch.compile on the CPU needs g++")
    assert compare(cell) == []


def draw_cell(source: random.Random) -> Cell:
    """Any layout of 2, 4 or 8 ranks that the plan allows, and any model."""
    while True:
        cell = Cell(
            pp=source.choice([1, 2, 4]),
            dp_replicate=source.choice([1, 2]),
            dp_shard=source.choice([1, 2, 4]),
            tp=source.choice([1, 2]),
            sequence_parallel=source.random() < 0.5,
            schedule=source.choice(["gpipe", "1f1b", "interleaved_1f1b"]),
            stages_per_rank=source.choice([1, 2]),
            num_microbatches=source.choice([1, 2, 4]),
            reshard=source.random() < 0.5,
            checkpointing=source.choice(["none", "selective", "full"]),
            layers=source.choice([2, 3, 4, 5, 8]),
            family=source.choice(["llama", "mistral", "qwen2", "qwen3"]),
            tied=source.random() < 0.5,
            packed=source.random() < 0.5,
            dropout=source.choice([0.0, 0.2]),
            lora=source.choice([0, 2]),
            chunk=source.choice([0, 5]),
            offload=source.random() < 0.2,
            compiled=source.random() < 0.1 and CAN_COMPILE,
            optimizer=source.choice(["adamw", "sgd"]),
        )
        # Compiling takes each rank a core for a while.
        if 2 <= cell.world <= (2 if cell.compiled else 8) and cell.is_legal():
            return cell


def test_a_layout_drawn_at_random_equals_one_process(capsys: pytest.CaptureFixture[str]) -> None:
    seed = int(os.environ.get("PARITY_SEED", random.randrange(2**31)))
    cell = draw_cell(random.Random(seed))
    with capsys.disabled():
        print(f"\n  PARITY_SEED={seed}: {cell}")
    assert compare(cell) == [], f"PARITY_SEED={seed}"


# Each of these takes away one thing that a layout needs, on every rank. The comparison must see it.


def without_the_tensor_parallel_sum() -> None:
    """The partial results of row-split matrices are taken for the whole."""

    def split_rows(module, mesh, tokens):
        rows(module, mesh, Partial())  # which the hook then hands on unchanged

    rows = tensor._STYLES["rowwise"]
    tensor._STYLES["rowwise"] = split_rows


def without_the_norm_gradient_sum() -> None:
    """Sequence parallel: each rank's norms see a share of the tokens, and keep the gradient of that share."""

    def share_norm(module, mesh, tokens):
        tensor._distribute(module, mesh, {})
        module.forward = lambda x: F.rms_norm(x, (x.shape[-1],), module.weight.to_local(), module.eps)

    tensor._STYLES["norm"] = share_norm


def without_the_tied_sum() -> None:
    Hybrid._reduce_tied = lambda self: None


def without_the_other_stages_in_the_norm() -> None:
    clip.dist = SimpleNamespace(all_reduce=lambda squares: None)


def with_the_count_of_this_rank_alone() -> None:
    backward = Hybrid.backward

    def local(self, microbatches, *args):
        for microbatch in microbatches:
            microbatch.counts["nll"] = float(sum(m.weight_BL.sum() for m in microbatches))
        return backward(self, microbatches, *args)

    Hybrid.backward = local


def with_one_dropout_mask_for_all_ranks() -> None:
    """What torch's own generator gives under tensor parallel: each part is dropped like the first."""
    dropout.KeyedDropout.feature_start = property(lambda self: 0, lambda self, value: None)
    dropout.KeyedDropout.token_start = property(lambda self: 0, lambda self, value: None)


MUTATIONS = [
    (without_the_tensor_parallel_sum, Cell(tp=2)),
    (without_the_norm_gradient_sum, Cell(tp=2, sequence_parallel=True)),
    (without_the_tied_sum, Cell(pp=2, tied=True)),
    (without_the_other_stages_in_the_norm, Cell(pp=2)),
    (with_the_count_of_this_rank_alone, Cell(dp_shard=2)),
    (with_one_dropout_mask_for_all_ranks, Cell(tp=2, sequence_parallel=True, dropout=0.2)),
]


@pytest.mark.parametrize(
    ("mutation", "cell"), [pytest.param(*pair, id=pair[0].__name__) for pair in MUTATIONS]
)
def test_the_matrix_turns_red(mutation: Callable[[], None], cell: Cell) -> None:
    assert cell in CELLS  # which is green
    assert compare(cell, mutation) != []


def test_the_cells_are_legal_and_all_different() -> None:
    cells = [*CELLS, *LONG_CELLS]
    assert len(set(cells)) == len(cells) >= 60
    assert [cell for cell in cells if not cell.is_legal()] == []
    assert {cell.world for cell in CELLS} == {1, 2, 4, 8}
    assert [f.name for f in dataclasses.fields(Cell) if len({getattr(c, f.name) for c in cells}) < 2] == []
