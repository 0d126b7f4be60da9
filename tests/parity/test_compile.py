"""Blocks differ in their numbers only: one compiled graph serves them all."""

from __future__ import annotations

from functools import partialmethod

from torch import nn
from torch._dynamo.utils import counters

from tests.helpers.ranks import run_ranks
from tests.parity.cells import Cell, build, in_float64, microbatches_of


def count_graphs(rank: int, world: int, cell: Cell) -> int:
    nn.Module.compile = partialmethod(nn.Module.compile, backend="eager")  # graphs are what is counted
    with in_float64():
        train = build(cell)
        for step in range(2):
            train(microbatches_of(cell, step, train.parallel.dp_rank), step)
    return int(counters["stats"]["unique_graphs"])


def test_ten_blocks_with_dropout_and_adapters_take_no_more_graphs_than_two() -> None:
    few, many = (
        run_ranks(1, count_graphs, Cell(compiled=True, layers=layers, dropout=0.2, lora=2))[0]
        for layers in (2, 10)
    )
    assert 1 <= many <= few
