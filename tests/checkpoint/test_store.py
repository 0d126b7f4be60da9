"""Folders, commit, discovery, damage and retention, without torch."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hpctrain.checkpoint import store
from hpctrain.checkpoint.manifest import FileRecord, Manifest, check_jsonable, read
from hpctrain.errors import CheckpointError

CONTENTS = {".metadata": b"m" * 100, "__0_0.distcp": bytes(range(256)) * 40, "__1_0.distcp": b"xyz"}


def write(root: Path, step: int, attempt: str = "17_0_0") -> Path:
    """A committed checkpoint of three files."""
    writing = store.begin(root, step, attempt)
    for name, content in CONTENTS.items():
        (writing / name).write_bytes(content)
    return store.commit(writing, manifest_of(step, attempt))


def manifest_of(step: int, attempt: str = "17_0_0") -> Manifest:
    files = {n: FileRecord(len(c), hashlib.sha256(c).hexdigest()) for n, c in CONTENTS.items()}
    return Manifest(step, attempt, {"world_size": 2}, "2.0", files, {"samples_consumed": 10 * step})


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_a_committed_checkpoint_is_named_by_step_and_attempt_and_brings_its_facts_back(tmp_path):
    path = write(tmp_path / "new" / "checkpoints", 1200, "17_0_1")
    assert path.name == "step_00001200.17_0_1"
    found = store.find(path.parent)
    assert [each.path for each in found] == [path]
    assert found[0].manifest == manifest_of(1200, "17_0_1")
    assert store.verify(path) == []


def test_what_is_being_written_is_no_candidate(tmp_path):
    writing = store.begin(tmp_path, 3, "17_0_0")
    for name, content in CONTENTS.items():
        (writing / name).write_bytes(content)
    manifest_of(3).write(writing)
    assert store.candidates(tmp_path) == []
    assert store.latest(tmp_path) is None


def test_a_folder_is_never_written_twice(tmp_path):
    write(tmp_path, 3)
    with pytest.raises(CheckpointError, match="exists already"):
        store.begin(tmp_path, 3, "17_0_0")
    assert store.begin(tmp_path, 4, "17_0_0") != store.begin(tmp_path, 4, "17_0_0")


@pytest.mark.parametrize(("step", "attempt"), [(-1, "1"), (1, ""), (1, "a.b"), (1, "../x"), (1, "a b")])
def test_a_name_that_would_not_be_found_again_is_refused(tmp_path, step, attempt):
    with pytest.raises(CheckpointError, match="attempt"):
        store.begin(tmp_path, step, attempt)


def test_newest_is_the_highest_step_and_then_the_highest_attempt_as_numbers(tmp_path):
    for step, attempt in [(2, "9_0_0"), (100_000_000, "1_0_0"), (2, "10_0_0"), (2, "9_11_0"), (2, "9_2_0")]:
        write(tmp_path, step, attempt)
    assert [each.path.name for each in store.find(tmp_path)] == [
        "step_100000000.1_0_0",
        "step_00000002.10_0_0",
        "step_00000002.9_11_0",
        "step_00000002.9_2_0",
        "step_00000002.9_0_0",
    ]


def test_commit_refuses_a_file_that_is_not_there_in_full(tmp_path):
    writing = store.begin(tmp_path, 3, "17_0_0")
    for name, content in CONTENTS.items():
        (writing / name).write_bytes(content[:50])
    with pytest.raises(CheckpointError, match=r"\.metadata: 50 bytes, not 100"):
        store.commit(writing, manifest_of(3))
    assert store.candidates(tmp_path) == []


@pytest.mark.parametrize("name", [*CONTENTS, "manifest.json"])
def test_one_flipped_bit_anywhere_is_found_and_the_file_named(tmp_path, name):
    path = write(tmp_path, 3)
    content = bytearray((path / name).read_bytes())
    content[len(content) // 2] ^= 1
    (path / name).write_bytes(content)
    assert [name in problem for problem in store.verify(path)] == [True]


def test_a_changed_fact_in_the_manifest_is_found(tmp_path):
    path = write(tmp_path, 3)
    text = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(text.replace('"samples_consumed": 30', '"samples_consumed": 31'))
    assert store.verify(path) == ["manifest.json is damaged: it does not match its own sha256"]
    assert store.find(tmp_path) == []


@pytest.mark.parametrize("name", [*CONTENTS, "manifest.json"])
@pytest.mark.parametrize("damage", ["missing", "truncated", "empty"])
def test_a_missing_or_short_file_makes_a_checkpoint_incomplete(tmp_path, name, damage):
    older, path = write(tmp_path, 2), write(tmp_path, 3)
    if damage == "missing":
        (path / name).unlink()
    else:
        os.truncate(path / name, 2 if damage == "truncated" else 0)
    assert store.latest(tmp_path) == older
    (candidate, _) = store.candidates(tmp_path)
    assert candidate.path == path
    assert name in candidate.problems[0]


def test_a_renamed_folder_is_not_taken_for_another_step(tmp_path):
    write(tmp_path, 3).rename(tmp_path / "step_00000004.17_0_0")
    assert "it holds step 3" in store.candidates(tmp_path)[0].problems[0]


def test_a_manifest_of_a_newer_format_stops_instead_of_falling_back(tmp_path):
    write(tmp_path, 2)
    path = write(tmp_path, 3)
    (path / "manifest.json").unlink()
    newer = Manifest(3, "17_0_0", {}, "2.0", {}, {}, format_version=2)
    newer.write(path)
    with pytest.raises(CheckpointError, match="its format is 2"):
        store.find(tmp_path)


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "..", ""])
def test_a_manifest_cannot_name_files_outside_its_folder(tmp_path, name):
    Manifest(3, "a", {}, "2.0", {name: FileRecord(0, "")}, {}).write(tmp_path)
    with pytest.raises(ValueError, match="outside the folder"):
        read(tmp_path)


@pytest.mark.parametrize("facts", [{"x": float("nan")}, {"x": {1, 2}}, {"x": (1, 2)}, {1: "x"}])
def test_facts_that_json_would_change_are_refused(facts):
    with pytest.raises(CheckpointError, match="facts"):
        check_jsonable("facts", facts)


def retained(root: Path, **kwargs: object) -> list[int]:
    store.retain(root, **{"keep_last": 2, "keep_every_steps": 0, "attempt": "17_0_0", **kwargs})
    return [each.step for each in store.find(root)]


def test_retention_keeps_the_newest_and_the_milestones(tmp_path):
    for step in range(1, 11):
        write(tmp_path, step)
    assert retained(tmp_path, keep_last=2, keep_every_steps=4) == [10, 9, 8, 4]
    assert retained(tmp_path, keep_last=1) == [10]
    assert names(tmp_path) == ["step_00000010.17_0_0"]


def test_retention_counts_only_complete_checkpoints(tmp_path):
    paths = [write(tmp_path, step) for step in range(1, 6)]
    (paths[4] / "manifest.json").unlink()
    os.truncate(paths[3] / "__1_0.distcp", 1)
    assert retained(tmp_path, keep_last=2) == [3, 2]
    assert paths[4].exists() and paths[3].exists()


def test_retention_keeps_what_was_just_written_below_the_step_of_an_older_attempt(tmp_path):
    write(tmp_path, 2000, "16_0_0")
    write(tmp_path, 1500, "16_0_0")
    write(tmp_path, 1600, "17_0_0")
    assert retained(tmp_path, keep_last=1, attempt="17_0_0") == [2000, 1600]


def test_retention_clears_what_dead_attempts_left_and_spares_its_own(tmp_path):
    write(tmp_path, 1)
    mine = store.begin(tmp_path, 2, "17_0_0")
    dead = store.begin(tmp_path, 2, "17_0_0x")
    (dead / "__0_0.distcp").write_bytes(b"half")
    (tmp_path / ".trash.step_00000000.16_0_0.abcd").mkdir()
    (tmp_path / "notes").mkdir()
    assert retained(tmp_path) == [1]
    assert names(tmp_path) == [mine.name, "notes", "step_00000001.17_0_0"]


def test_a_deletion_that_is_interrupted_leaves_no_candidate(tmp_path, monkeypatch):
    for step in (1, 2, 3):
        write(tmp_path, step)

    def interrupted(path, **_):
        (path / "__0_0.distcp").unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", interrupted)
    with pytest.raises(KeyboardInterrupt):
        retained(tmp_path, keep_last=1)
    monkeypatch.undo()
    assert all(not candidate.problems for candidate in store.candidates(tmp_path))
    assert retained(tmp_path, keep_last=1) == [3]
    assert names(tmp_path) == ["step_00000003.17_0_0"]


def test_keeping_nothing_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="newest 0"):
        retained(tmp_path, keep_last=0)


def test_a_folder_that_does_not_appear_is_reported_in_time(tmp_path):
    with pytest.raises(CheckpointError, match="file system that all nodes share"):
        store.wait_visible(tmp_path / "elsewhere" / "x", 0.05)


def test_the_store_needs_no_torch():
    code = "import sys, hpctrain.checkpoint.store; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_manifest_is_sorted_json_for_people_to_read(tmp_path):
    path = write(tmp_path, 3)
    content = json.loads((path / "manifest.json").read_text())
    assert list(content) == sorted(content)
    assert content["files"]["__1_0.distcp"] == {
        "size_bytes": 3,
        "sha256": "3608bca1e44ea6c4d268eb6db02260269892c0b42b86bbf1e77a6fa16c3c9282",  # sha256sum of "xyz"
    }
