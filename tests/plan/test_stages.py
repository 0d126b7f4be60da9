"""Cutting layers into stages: against all cuts there are, and the lists that users give."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest

from hpctrain.config.schema import Checkpointing, Config, DecoderConfig, ParallelismConfig, TokenDataConfig
from hpctrain.plan.stages import cut_stages, stage_choices
from tests.plan.large import QWEN_32B, SEQUENCE_LENGTH, SIXTEEN


def counts_of(cut: Sequence[range]) -> tuple[int, ...]:
    return tuple(map(len, cut))


def all_cuts(num_layers: int, num_stages: int) -> Iterator[tuple[int, ...]]:
    if num_stages == 1:
        yield (num_layers,)
        return
    for first in range(1, num_layers - num_stages + 2):
        for rest in all_cuts(num_layers - first, num_stages - 1):
            yield (first, *rest)


def cost_of(counts: Sequence[int], costs: Sequence[int], first_extra: int, last_extra: int) -> list[int]:
    stages, start = [], 0
    for count in counts:
        stages.append(sum(costs[start : start + count]))
        start += count
    stages[0] += first_extra
    stages[-1] += last_extra
    return stages


def test_no_other_cut_is_better() -> None:
    """300 random cases: smallest maximum, then smallest sum of squares, then fewest layers first."""
    draw = random.Random(0)
    for _ in range(300):
        num_layers = draw.randint(1, 9)
        num_stages = draw.randint(1, num_layers)
        costs = [draw.randint(1, 5) for _ in range(num_layers)]
        extras = draw.randint(0, 12), draw.randint(0, 12)

        def rank(counts: tuple[int, ...]) -> tuple[int, int, tuple[int, ...]]:
            stages = cost_of(counts, costs, *extras)  # noqa: B023
            return max(stages), sum(stage**2 for stage in stages), counts

        best = min(all_cuts(num_layers, num_stages), key=rank)
        assert counts_of(cut_stages(costs, *extras, num_stages)) == best


def test_stages_are_contiguous_and_complete() -> None:
    cut = cut_stages([1] * 10, 0, 2, 3)
    assert [layer for layers in cut for layer in layers] == list(range(10))


def test_a_head_as_dear_as_two_layers_takes_two_from_the_last_stage() -> None:
    assert counts_of(cut_stages([1] * 10, 0, 2, 3)) == (4, 4, 2)


def test_the_32b_model_is_cut_as_its_page_says() -> None:
    """First the fastest cut, then the one that spares the first stage too."""
    config = Config(data=TokenDataConfig(sequence_length=SEQUENCE_LENGTH))
    config.parallelism = ParallelismConfig(checkpointing=Checkpointing.full)
    (fastest, evened), found = stage_choices(config, QWEN_32B, 16)
    assert not found
    assert tuple(end - first for first, end in evened) == SIXTEEN
    assert [end - first for first, end in fastest] == [4] * 14 + [5, 3]


def choices(**values: object) -> tuple[list[tuple[int, ...]], list[str]]:
    parallelism = ParallelismConfig(**{"pp": 2, **values})  # type: ignore[arg-type]
    model = DecoderConfig(num_hidden_layers=5, vocab_size=8, hidden_size=8, intermediate_size=8)
    model.num_attention_heads = model.num_key_value_heads = 2
    config = Config(parallelism=parallelism, data=TokenDataConfig(sequence_length=16))
    cuts, found = stage_choices(config, model, 2)
    return [tuple(end - first for first, end in cut) for cut in cuts], found


def test_an_explicit_list_is_taken_as_it_is() -> None:
    assert choices(layers_per_stage=[1, 4]) == ([(1, 4)], [])
    assert choices(layers_per_stage=[1, 2, 1, 1], stages_per_rank=2) == ([(1, 2, 1, 1)], [])


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
)
def test_a_list_that_cannot_be_is_refused(values: dict[str, object], words: str) -> None:
    cuts, found = choices(**values)
    assert not cuts
    assert any(words in finding for finding in found)


def test_interleaved_stages_are_cut_too() -> None:
    cuts, found = choices(stages_per_rank=2)
    assert not found
    assert all(sum(cut) == 5 and len(cut) == 4 and min(cut) == 1 for cut in cuts)
