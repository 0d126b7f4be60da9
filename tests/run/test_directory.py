"""Finding runs, holding them, writing into them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hpctrain.errors import ConfigError, RunError
from hpctrain.run.directory import RunDirectory, find_run, make_attempt, write_json


def make_run(path: Path) -> RunDirectory:
    run = RunDirectory(path)
    run.create()
    run.config.write_text("")
    return run


@contextmanager
def held_by_another_process(run: RunDirectory) -> Iterator[int]:
    """A fork that holds the run's lock until the end of the block, or its death."""
    ready, tell = os.pipe()
    wait, release = os.pipe()
    holder = os.fork()
    if holder == 0:
        os.close(release)
        with run.lock():
            os.write(tell, b"x")
            os.read(wait, 1)
        os._exit(0)
    try:
        os.read(ready, 1)
        yield holder
    finally:
        os.close(release)
        os.waitpid(holder, 0)
        for descriptor in (ready, tell, wait):
            os.close(descriptor)


def test_a_second_holder_is_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r")
    with held_by_another_process(run):
        assert run.is_locked()
        with pytest.raises(RunError, match="run r is already being worked on"), run.lock():
            pass
    assert not run.is_locked()


def test_the_lock_dies_with_its_holder(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r")
    with held_by_another_process(run) as holder:
        os.kill(holder, 9)
        with run.lock(wait_s=20):
            assert True
    assert not run.is_locked()


def test_a_run_that_was_never_held_is_not_locked(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r")
    assert not run.is_locked()
    assert not (run.path / ".lock").exists(), "asking leaves no trace"


def test_a_run_is_found_by_folder_and_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = make_run(tmp_path / "runs" / "a")
    other = make_run(tmp_path / "elsewhere" / "b")
    assert find_run("a") == find_run("runs/a") == find_run(str(run.path)) == run
    assert find_run("elsewhere/b") == other
    assert find_run("b", run_root="elsewhere") == other


def test_an_unknown_run_is_refused_with_the_known_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "runs" / "beta")
    make_run(tmp_path / "runs" / "alpha")
    with pytest.raises(ConfigError, match="no run 'gamma'") as refusal:
        find_run("gamma")
    assert "alpha, beta" in refusal.value.found


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "facts.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}


@pytest.mark.parametrize(
    ("job", "restart", "number", "name"),
    [("12", 0, 1, "12_0_1"), ("12_3", 2, 1, "12-3_2_1"), ("local", 0, 4, "local_0_4")],
)
def test_attempt_names_say_job_restart_and_try(job: str, restart: int, number: int, name: str) -> None:
    assert make_attempt(job, restart, number) == name
