"""The list of points at which memory ran out."""

from __future__ import annotations

from pathlib import Path

from hpctrain.run.exhausted import find_out_of_memory, note_out_of_memory


def test_a_point_is_found_again_with_its_run(tmp_path: Path) -> None:
    assert find_out_of_memory(tmp_path) == {}
    note_out_of_memory(tmp_path, "abc", run="city", attempt="7_0_1", message="CUDA out of memory")
    assert find_out_of_memory(tmp_path) == {"abc": "city (7_0_1)"}


def test_half_a_line_does_not_hide_the_others(tmp_path: Path) -> None:
    note_out_of_memory(tmp_path, "abc", run="city", attempt="7_0_1", message="")
    with (tmp_path / "out_of_memory.jsonl").open("a") as handle:
        handle.write('[1]\n"de"\n{"point": "de')
    assert list(find_out_of_memory(tmp_path)) == ["abc"]
