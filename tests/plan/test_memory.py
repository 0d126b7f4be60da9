"""Memory of decoder ranks: by hand, against what is known of the 32B model, and the page that uses it."""

from __future__ import annotations

from pathlib import Path

from hpctrain.plan.hardware import find_hardware
from hpctrain.plan.memory import GIB, RankMemory
from tests.plan.large import LAYOUTS, SIXTEEN, place_memory, table_rows

USABLE = find_hardware("rtx4090").memory_gib or 0.0


def worst_gib(name: str, sequence_parallel: bool = True) -> float:
    places = range(LAYOUTS[name][0])
    return max(place_memory(name, place, sequence_parallel).total for place in places) / GIB


def state_bytes(memory: RankMemory) -> int:
    return memory.weights + memory.gradients + memory.optimizer


def test_states_take_16_bytes_a_parameter_over_all_cards() -> None:
    """fp32 weights, gradients and two moments of the published 32,763,876,352 parameters."""
    places = [place_memory("PP16×TP2", place) for place in range(16)]
    assert abs(2 * sum(map(state_bytes, places)) - 16 * 32_763_876_352) < 16 * 32


def test_middle_stage_of_the_chosen_layout_by_hand() -> None:
    """Place 1: four layers of 487,605,248 parameters over two ranks, 15 microbatches in flight."""
    memory = place_memory("PP16×TP2", 1)
    assert SIXTEEN[1] == 4
    assert state_bytes(memory) == 16 * 4 * 487_605_248 // 2
    assert memory.activations == 15 * (4 + 1) * 2 * 4096 * 5120 // 2
    assert memory.gathered == (2 + 2 + 4) * 487_605_248 // 2


def test_whole_gradients_under_torchs_stage_do_not_fit() -> None:
    """A trace of such a stage, eight layers without tables, peaked at 37.4 GiB on torch 2.14.1."""
    assert abs(place_memory("PP8×DP4, torch's stage", 4).total / GIB - 37.4) < 1.5


def test_only_layouts_with_two_or_more_tensor_parallel_ranks_fit() -> None:
    assert USABLE == 22.2
    fits = {name for name in LAYOUTS if worst_gib(name) <= USABLE}
    assert fits == {"PP16×TP2", "PP8×TP2×DP2", "PP8×TP4", "PP4×TP8"}


def test_the_chosen_layout_needs_sequence_parallelism() -> None:
    assert worst_gib("PP16×TP2", sequence_parallel=False) > USABLE


def test_the_page_shows_these_numbers() -> None:
    page = (Path(__file__).parents[2] / "docs" / "layout_32b.md").read_text()
    missing = [row for row in table_rows() if row not in page]
    assert not missing, "\n".join(missing)
