"""Memory of decoder ranks: by hand, against what is known of the 32B model, and the page that uses it."""

from __future__ import annotations

from pathlib import Path

from hpctrain.plan.hardware import find_hardware
from hpctrain.plan.memory import GIB, RankMemory
from tests.plan.large import LAYOUTS, SIXTEEN, memory_of, table_rows

USABLE = find_hardware("rtx4090").memory_gib or 0.0


def worst_gib(name: str, sequence_parallel: bool = True) -> float:
    return max(memory.total for memory in memory_of(name, sequence_parallel)) / GIB


def state_bytes(memory: RankMemory) -> int:
    return memory.weights + memory.gradients + memory.optimizer


def test_states_take_16_bytes_a_parameter_over_all_cards() -> None:
    """fp32 weights, gradients and two moments of the published 32,763,876,352 parameters."""
    places = memory_of("PP16×TP2")
    assert abs(2 * sum(map(state_bytes, places)) - 16 * 32_763_876_352) < 16 * 32


def test_middle_stage_of_the_chosen_layout_by_hand() -> None:
    """Place 1: four layers of 487,605,248 parameters over two ranks, 15 microbatches in flight."""
    memory = memory_of("PP16×TP2")[1]
    assert SIXTEEN[1] == 4
    assert state_bytes(memory) == 16 * 4 * 487_605_248 // 2
    # A block's input each and the stage's output, halved by sequence parallelism; a mask, a byte an entry.
    assert memory.activations == 15 * ((4 + 1) * 2 * 4096 * 5120 // 2 + 4096**2)
    assert memory.gathered == (2 + 2 + 4) * 487_605_248 // 2


def test_whole_gradients_under_torchs_stage_do_not_fit() -> None:
    """A trace of such a stage, eight layers without tables, peaked at 37.4 GiB on torch 2.14.1."""
    assert abs(memory_of("PP8×DP4, torch's stage")[4].total / GIB - 37.4) < 1.5


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
