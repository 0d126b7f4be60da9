"""Loading passes over what is damaged and says so; it refuses what does not fit, and runs nothing."""

from __future__ import annotations

import hashlib
import io
import os
import pickle
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from hpctrain.checkpoint import manifest, reader, store
from hpctrain.checkpoint.manifest import FileRecord
from hpctrain.checkpoint.reader import load, load_full
from hpctrain.checkpoint.writer import save
from hpctrain.errors import CheckpointError
from tests.helpers.ranks import run_ranks


def state_of(step):
    """Every value carries the step, so that a mix of two steps shows."""
    return {"model": {"w": torch.full((6, 4), float(step)), "b": torch.full((5,), float(step))}, "step": step}


def save_steps(rank, world, root, steps, attempt="a"):
    group = dist.group.WORLD
    for step in steps:
        state = {**state_of(step), "per_rank": {"rank": rank}}
        save(root, step=step, attempt=attempt, state=state, facts={}, group=group, timeout_s=20, layout={})


def load_state(rank, world, root, state=None):
    state = state or state_of(0)
    loaded = load(root, state=state, group=dist.group.WORLD, timeout_s=20)
    return loaded, state


def load_error(rank, world, root, state=None):
    with pytest.raises(CheckpointError) as caught:
        load_state(rank, world, root, state)
    return str(caught.value)


def stamps(state):
    return {state["step"], *state["model"]["w"].unique().tolist(), *state["model"]["b"].unique().tolist()}


def damage(path, kind):
    file = path / "__1_0.distcp"
    if kind == "flipped bit":
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    elif kind == "truncated":
        os.truncate(file, file.stat().st_size - 1)
    elif kind == "missing":
        file.unlink()
    else:
        (path / "manifest.json").unlink()


REASONS = {
    "flipped bit": "__1_0.distcp: sha256 is",
    "truncated": "__1_0.distcp: ",
    "missing": "__1_0.distcp: No such file",
    "no manifest": "manifest.json is missing",
}


@pytest.mark.parametrize("kind", REASONS)
@pytest.mark.parametrize("world", [1, 3])
def test_a_damaged_checkpoint_is_passed_over_with_the_reason(tmp_path, world, kind):
    run_ranks(2, save_steps, tmp_path, (1, 2))
    damage(tmp_path / "step_00000002.a", kind)
    for loaded, state in run_ranks(world, load_state, tmp_path):
        assert loaded.step == 1
        assert stamps(state) == {1}
        ((name, reason),) = loaded.skipped
        assert name == "step_00000002.a"
        assert reason.startswith(REASONS[kind])


def test_a_checkpoint_found_damaged_is_hidden_and_kept_and_frees_its_place(tmp_path):
    run_ranks(2, save_steps, tmp_path, (1, 2))
    damage(tmp_path / "step_00000002.a", "flipped bit")
    run_ranks(2, load_state, tmp_path)
    assert [path.name for path in tmp_path.glob(".damaged.step_00000002.a.*")]
    run_ranks(2, save_steps, tmp_path, (2,), "b")
    store.retain(tmp_path, keep_last=2, keep_every_steps=0, attempt="b")
    assert [each.path.name for each in store.find(tmp_path)] == ["step_00000002.b", "step_00000001.a"]


def test_when_all_are_damaged_the_run_stops_instead_of_starting_over(tmp_path):
    run_ranks(2, save_steps, tmp_path, (1, 2))
    damage(tmp_path / "step_00000001.a", "truncated")
    damage(tmp_path / "step_00000002.a", "flipped bit")
    for _ in range(2):  # and again the next time
        for said in run_ranks(2, load_error, tmp_path):
            assert "step_00000002.a: __1_0.distcp: sha256" in said
            assert "step_00000001.a: __1_0.distcp: " in said


def test_another_attempt_at_the_same_step_does_not_mix_with_the_first(tmp_path):
    run_ranks(2, save_steps, tmp_path, (7,), "17_0_0")

    def save_other_values(rank, world):
        state = {**state_of(8), "per_rank": {"rank": rank}}
        group = dist.group.WORLD
        save(tmp_path, step=7, attempt="17_1_0", state=state, facts={}, group=group, timeout_s=20, layout={})

    run_ranks(2, save_other_values)
    assert [stamps(state) for _, state in run_ranks(2, load_state, tmp_path)] == [{8}] * 2
    assert stamps(load_full(tmp_path / "step_00000007.17_0_0")) == {7}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"ema": {"w": torch.zeros(6, 4)}}, "ema.w is missing in the checkpoint"),
        ({"epoch": 0}, "epoch is missing in the checkpoint"),
        (
            {"model": {"w": torch.zeros(4, 6)}},
            "model.w is torch.float32[4, 6], in the checkpoint",
        ),
        ({"model": {"w": torch.zeros(6, 4).half()}}, "model.w is torch.float16[6, 4], in the checkpoint"),
        ({"model": {"w": 3}}, "model.w is a int, in the checkpoint it is a tensor"),
        ({"step": torch.zeros(1)}, "step is a tensor, in the checkpoint it is none"),
    ],
)
def test_a_state_that_does_not_fit_is_an_error_that_names_the_key(tmp_path, change, reason):
    run_ranks(1, save_steps, tmp_path, (1,))
    for said in run_ranks(2, load_error, tmp_path, {**state_of(0), **change}):
        assert reason in said


def test_a_key_that_is_not_asked_for_stays_in_the_checkpoint(tmp_path):
    run_ranks(1, save_steps, tmp_path, (1,))
    ((loaded, state),) = run_ranks(1, load_state, tmp_path, {"model": {"b": torch.zeros(5)}})
    assert loaded.step == 1
    assert state["model"].keys() == {"b"} and state["model"]["b"].tolist() == [1.0] * 5


class Evil:
    """A pickle that leaves a mark when it is executed."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


def plant(path, name, content):
    """Writes `content` into a file and makes the manifest agree with it, as an attacker would."""
    (path / name).write_bytes(content)
    old = manifest.read(path)
    record = FileRecord(len(content), hashlib.sha256(content).hexdigest())
    (path / "manifest.json").unlink()
    replace(old, files={**old.files, name: record}).write(path)
    assert store.verify(path) == []


def test_evil_metadata_is_not_executed(tmp_path):
    root, mark = tmp_path / "checkpoints", tmp_path / "executed"
    run_ranks(2, save_steps, root, (1, 2))
    plant(root / "step_00000002.a", ".metadata", pickle.dumps(Evil(mark)))
    for loaded, state in run_ranks(2, load_state, root):
        assert stamps(state) == {1}
        assert "posix.mkdir, which is not DCP metadata" in loaded.skipped[0][1]
    with pytest.raises(CheckpointError, match=r"posix\.mkdir"):
        load_full(root / "step_00000002.a")
    assert not mark.exists()


def test_an_evil_value_is_not_executed(tmp_path):
    root, mark = tmp_path / "checkpoints", tmp_path / "executed"
    run_ranks(1, save_steps, root, (1,))
    path = root / "step_00000001.a"
    evil, metadata = io.BytesIO(), reader.read_metadata(path, manifest.read(path))
    torch.save(Evil(mark), evil)
    info = next(info for index, info in metadata.storage_data.items() if index.fqn == "step")
    honest = (path / info.relative_path).read_bytes()
    info.offset, info.length = len(honest), len(evil.getvalue())
    plant(path, info.relative_path, honest + evil.getvalue())
    plant(path, ".metadata", pickle.dumps(metadata))
    for said in run_ranks(1, load_error, root):
        assert "UnpicklingError" in said
    assert not mark.exists()


def test_metadata_cannot_point_outside_the_folder(tmp_path):
    run_ranks(1, save_steps, tmp_path, (1,))
    path = tmp_path / "step_00000001.a"
    metadata = reader.read_metadata(path, manifest.read(path))
    for info in metadata.storage_data.values():
        info.relative_path = "../elsewhere"
    plant(path, ".metadata", pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="elsewhere, which the manifest does not list"):
        load_full(path)


def test_a_value_that_could_not_be_read_back_is_refused_when_saving(tmp_path):
    def save_class(rank, world):
        group = dist.group.WORLD
        with pytest.raises(CheckpointError) as caught:
            save(
                tmp_path,
                step=1,
                attempt="a",
                state={"a": {"b": Evil("x")}},
                facts={},
                group=group,
                timeout_s=20,
                layout={},
            )
        return str(caught.value)

    for said in run_ranks(2, save_class):
        assert "save a.b" in said and "a Evil cannot be read back" in said
    assert os.listdir(tmp_path) == []
