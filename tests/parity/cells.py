"""The cells of the parity matrix, which `hpctrain selftest` has too, and a way to break what they prove."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from hpctrain.selftest.cells import LENGTH, SEED, Cell
from hpctrain.selftest.compare import (
    Tokens,
    Told,
    build,
    compare,
    compare_step,
    in_dtype,
    make_batch,
    microbatches_of,
    train_plainly,
)

__all__ = [
    "LENGTH",
    "SEED",
    "Cell",
    "Tokens",
    "Told",
    "build",
    "compare_step",
    "in_float64",
    "make_batch",
    "microbatches_of",
    "train_and_compare",
    "train_plainly",
]


def in_float64() -> AbstractContextManager[None]:
    """Everything built inside is in float64."""
    return in_dtype(torch.float64)


def train_and_compare(
    rank: int, world: int, cell: Cell, wanted: Told, break_it: Callable[[], None] | None = None
) -> list[str]:
    """Train on this rank and say where its pieces differ from the reference, by how much."""
    if break_it is not None:
        break_it()
    return compare(cell, wanted)
