"""The profiler's window, and what is left behind when a GPU's memory runs out."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pytest
import torch

from hpctrain.config.schema import Config, ProfileConfig
from hpctrain.core import profile
from hpctrain.core.profile import MemoryHistory, StepTrace
from hpctrain.errors import PlanError
from hpctrain.launch.rank import Rank
from hpctrain.plan.plan import make_plan
from hpctrain.run.causes import CauseKind, read_causes
from hpctrain.run.directory import RunDirectory
from tests.core.runs import make_config, read_final, run_training
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import differing_tensors

CPU = torch.device("cpu")


def steps_of(trace: Path) -> list[int]:
    """Numbers of the steps that a trace shows, in order of time."""
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    spans = [e for e in events if re.fullmatch(r"step \d+", str(e.get("name"))) and e.get("ph") == "X"]
    return [int(span["name"].split()[1]) for span in sorted(spans, key=lambda span: span["ts"])]


def train(root: Path, folder: Path, steps: list[int], attempt: str, stop_at: int | None = None) -> None:
    """24 samples, 12 a step, three epochs: 6 steps on 2 ranks."""
    config = make_config(root, 2)
    config.profile = ProfileConfig(steps=steps)
    run_ranks(2, run_training, config, folder, attempt, stop_at)


def test_every_rank_records_the_steps_of_the_window(faces: Path, tmp_path: Path) -> None:
    train(faces, tmp_path / "run", [3, 5], "1_0_1")
    traces = sorted((tmp_path / "run" / "profile").iterdir())
    assert [trace.name for trace in traces] == ["1_0_1_0.json.gz", "1_0_1_1.json.gz"]
    assert [steps_of(trace) for trace in traces] == [[4, 5], [4, 5]]
    names = {e.get("name") for e in json.loads(gzip.decompress(traces[0].read_bytes()))["traceEvents"]}
    assert "aten::convolution" in names


def test_a_window_goes_on_after_a_resume_and_changes_nothing_of_the_run(faces: Path, tmp_path: Path) -> None:
    train(faces, tmp_path / "plain", [], "1_0_1")
    train(faces, tmp_path / "run", [2, 6], "1_0_1", stop_at=3)
    train(faces, tmp_path / "run", [2, 6], "1_1_1")
    folder = tmp_path / "run" / "profile"
    assert steps_of(folder / "1_0_1_0.json.gz")[:2] == [3, 4]
    assert steps_of(folder / "1_1_1_0.json.gz") == [5, 6]
    assert not (tmp_path / "plain" / "profile").exists()
    assert differing_tensors(read_final(tmp_path / "run")[0], read_final(tmp_path / "plain")[0]) == []


def test_a_window_that_reaches_beyond_the_run_is_written_at_its_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = StepTrace([1, 100], tmp_path / "profile" / "a_0.json.gz", CPU)
    for step in range(3):
        trace.at(step)
        torch.ones(2).sum()
    trace.close()
    trace.close()
    assert steps_of(tmp_path / "profile" / "a_0.json.gz") == [2, 3]
    assert [p.name for p in (tmp_path / "profile").iterdir()] == ["a_0.json.gz"]
    assert str(tmp_path / "profile" / "a_0.json.gz") in capsys.readouterr().out


def test_nothing_is_recorded_unless_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "profile", None)
    trace = StepTrace([], tmp_path / "a_0.json.gz", CPU)
    for step in range(3):
        trace.at(step)
    trace.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("steps", [[3], [5, 5], [6, 2], [-1, 2], [1, 2, 3]])
def test_a_window_that_is_none_is_refused(steps: list[int]) -> None:
    with pytest.raises(PlanError, match=r"profile\.steps"):
        make_plan(Config(profile=ProfileConfig(steps=steps)))


class FakeCuda:
    """torch.cuda.memory as far as it is called: there is no GPU where tests run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.recording: list[dict[str, object]] = []
        memory = torch.cuda.memory
        monkeypatch.setattr(memory, "_record_memory_history", lambda **kw: self.recording.append(kw))
        monkeypatch.setattr(memory, "_dump_snapshot", lambda name: Path(name).write_bytes(b"snapshot"))


OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def test_a_full_gpu_leaves_a_snapshot_that_its_cause_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = FakeCuda(monkeypatch)
    path = tmp_path / "profile" / "1_0_1_3.pickle"
    history = MemoryHistory(path, torch.device("cuda", 3), is_wanted=True)
    assert cuda.recording[0]["max_entries"] == 50_000
    assert history.write_if_full(ValueError("else")) == "" and not path.exists()
    assert str(path) in history.write_if_full(OUT_OF_MEMORY)
    assert path.read_bytes() == b"snapshot"


@pytest.mark.parametrize(("device", "is_wanted"), [("cpu", True), ("cuda", False)])
def test_nothing_is_kept_on_a_cpu_or_when_not_wanted(
    device: str, is_wanted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = FakeCuda(monkeypatch)
    history = MemoryHistory(tmp_path / "a.pickle", torch.device(device), is_wanted=is_wanted)
    assert history.write_if_full(OUT_OF_MEMORY) == ""
    assert cuda.recording == [] and list(tmp_path.iterdir()) == []


def test_a_snapshot_that_cannot_be_written_does_not_hide_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeCuda(monkeypatch)
    (tmp_path / "file").touch()
    history = MemoryHistory(tmp_path / "file" / "a.pickle", torch.device("cuda"), is_wanted=True)
    assert "no memory snapshot" in history.write_if_full(OUT_OF_MEMORY)


def test_the_cause_of_a_rank_that_ran_out_of_memory_names_the_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeCuda(monkeypatch)
    run = RunDirectory(tmp_path)
    run.create()
    rank = Rank(run, "7_0_1", 1)
    snapshot = run.profile / "7_0_1_1.pickle"
    rank.hint = MemoryHistory(snapshot, torch.device("cuda", 1), is_wanted=True).write_if_full
    rank.leave_error(OUT_OF_MEMORY)
    cause = read_causes(run.causes, "7_0_1", 2)[1]
    assert cause.kind is CauseKind.out_of_memory
    assert cause.message.startswith("OutOfMemoryError: CUDA out of memory") and str(snapshot) in cause.message
    assert snapshot.exists()
