"""Cutting layers into stages: against all cuts there are, and the lists that users give."""

from __future__ import annotations

import operator
import random
from collections.abc import Iterator

import pytest

from hpctrain.config.schema import DecoderConfig, ParallelismConfig
from hpctrain.plan.stages import cheapest_counts, split_layers, stage_findings


def all_cuts(num_layers: int, num_stages: int) -> Iterator[tuple[int, ...]]:
    if num_stages == 1:
        yield (num_layers,)
        return
    for first in range(1, num_layers - num_stages + 2):
        for rest in all_cuts(num_layers - first, num_stages - 1):
            yield (first, *rest)


def test_no_other_cut_is_cheaper() -> None:
    """300 random cases with a cost for every stage and span of layers, some of them not allowed."""
    draw = random.Random(0)
    for _ in range(300):
        num_layers = draw.randint(1, 8)
        num_stages = draw.randint(1, num_layers)
        costs = {
            (stage, first, end): draw.choice([None, *range(1, 30)])
            for stage in range(num_stages)
            for first in range(num_layers)
            for end in range(first + 1, num_layers + 1)
        }
        for fold, total in ((max, max), (operator.add, sum)):
            found = cheapest_counts(num_layers, num_stages, lambda *span: costs[span], fold)  # noqa: B023
            allowed = []
            for counts in all_cuts(num_layers, num_stages):
                spans = [(layers.start, layers.stop) for layers in split_layers(counts)]
                own = [costs[stage, first, end] for stage, (first, end) in enumerate(spans)]
                if None not in own:
                    allowed.append((total(own), counts))
            if not allowed:
                assert found is None
            elif total is sum:
                assert found == min(allowed)
            else:
                assert found is not None
                assert found[0] == min(allowed)[0]
                assert found in allowed


def test_counts_become_contiguous_ranges() -> None:
    assert split_layers([2, 1, 3]) == [range(2), range(2, 3), range(3, 6)]


def findings(**values: object) -> list[str]:
    parallelism = ParallelismConfig(**values)  # type: ignore[arg-type]
    return stage_findings(DecoderConfig(num_hidden_layers=5), parallelism, pp=2)


@pytest.mark.parametrize(
    "values",
    [{}, {"layers_per_stage": [1, 4]}, {"layers_per_stage": [1, 2, 1, 1], "stages_per_rank": 2}],
    ids=str,
)
def test_what_can_be_cut_has_no_findings(values: dict[str, object]) -> None:
    assert findings(**values) == []


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"layers_per_stage": [1, 3]}, "has 4 layers, model.num_hidden_layers=5"),
        ({"layers_per_stage": [0, 5]}, "each stage has at least one layer"),
        ({"layers_per_stage": [6, -1]}, "each stage has at least one layer"),
        ({"layers_per_stage": []}, "lists 0 stages"),
        ({"layers_per_stage": [2, 2, 1]}, "lists 3 stages, but pp 2 × stages_per_rank 1 = 2"),
        ({"layers_per_stage": [2, 3], "stages_per_rank": 2}, "stages_per_rank 2 = 4"),
        ({"stages_per_rank": 3}, "= 6 stages, but model.num_hidden_layers=5"),
    ],
    ids=str,
)
def test_what_cannot_be_cut_is_refused(values: dict[str, object], words: str) -> None:
    assert any(words in finding for finding in findings(**values))
