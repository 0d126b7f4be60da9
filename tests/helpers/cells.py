"""Cells of the legal table of decoders: one choice for every key, kept if the plan has no finding."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Iterator
from typing import Any

from hpctrain.config.schema import Checkpointing, Config, OptimizerKind, Schedule
from hpctrain.errors import PlanError
from hpctrain.plan.layout import AXES
from hpctrain.plan.plan import make_plan

Cell = dict[str, Any]  # dotted config key: value

CHOICES: dict[str, tuple[Any, ...]] = {
    "parallelism.schedule": tuple(Schedule),
    "parallelism.stages_per_rank": (1, 2),
    "parallelism.microbatch_size": (1, 2),
    "parallelism.sequence_parallel": (False, True),
    "parallelism.reshard_after_forward": (False, True),
    "parallelism.checkpointing": tuple(Checkpointing),
    "parallelism.offload_optimizer": (False, True),
    "parallelism.compile": (False, True),
    "optim.kind": tuple(OptimizerKind),
    "model.tie_word_embeddings": (False, True),
    "model.lora.rank": (0, 2),
    "model.loss_chunk_tokens": (0, 5),
}


def degrees(world_size: int) -> list[tuple[int, ...]]:
    """All ways to write the number of ranks as a product over the axes of the mesh."""
    divisors = [n for n in range(1, world_size + 1) if world_size % n == 0]
    products = itertools.product(divisors, repeat=len(AXES))
    return [ways for ways in products if _product(ways) == world_size]


def _product(numbers: tuple[int, ...]) -> int:
    result = 1
    for number in numbers:
        result *= number
    return result


def with_cell(base: Config, cell: Cell) -> Config:
    """A copy of the config with the cell's keys set, on as many local ranks as its degrees make."""
    config = copy.deepcopy(base)
    for key, value in cell.items():
        *groups, name = key.split(".")
        owner: Any = config
        for group in groups:
            owner = getattr(owner, group)
        assert hasattr(owner, name), key
        setattr(owner, name, value)
    config.cluster.num_nodes = 1
    config.cluster.ranks_per_node = _product(tuple(cell[f"parallelism.{axis}"] for axis in AXES))
    return config


def is_legal(base: Config, cell: Cell) -> bool:
    try:
        make_plan(with_cell(base, cell))
    except PlanError:
        return False
    return True


def all_cells(world_size: int, choices: dict[str, tuple[Any, ...]] = CHOICES) -> Iterator[Cell]:
    """Every combination, legal or not."""
    for ways in degrees(world_size):
        layout = {f"parallelism.{axis}": degree for axis, degree in zip(AXES, ways, strict=True)}
        for values in itertools.product(*choices.values()):
            yield {**layout, **dict(zip(choices, values, strict=True))}


def draw_legal_cell(
    base: Config, world_size: int, seed: int, choices: dict[str, tuple[Any, ...]] = CHOICES
) -> Cell:
    """One legal cell, each with the same chance; the same one for the same seed."""
    draw = random.Random(seed)
    ways = degrees(world_size)
    for _ in range(100_000):
        layout = zip(AXES, draw.choice(ways), strict=True)
        cell: Cell = {f"parallelism.{axis}": degree for axis, degree in layout}
        cell |= {key: draw.choice(values) for key, values in choices.items()}
        if is_legal(base, cell):
            return cell
    raise AssertionError("no legal cell")
