"""Whatever ends a save early: nobody hangs, nothing half is ever a candidate, the one before is loaded."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import filesystem

from hpctrain.checkpoint import store, writer
from hpctrain.checkpoint.exchange import Exchange
from hpctrain.checkpoint.reader import load_full
from hpctrain.checkpoint.writer import HashingStream, ShardWriter, save
from hpctrain.errors import CheckpointError
from tests.checkpoint.training import ATTEMPT, Training, assert_equal
from tests.helpers.polling import wait_until
from tests.helpers.ranks import Exited, run_ranks

TIMEOUT_S = 15.0
FIRST = f"step_00000001.{ATTEMPT}"
SECOND = f"step_00000002.{ATTEMPT}"


def die(*_args, **_kwargs):
    os.kill(os.getpid(), signal.SIGKILL)


def before(owner, name, act, nth=None):
    """From now on, in this process, the `nth` (or every) call of `owner.name` does `act` first."""
    original, calls = getattr(owner, name), []

    def replaced(*args, **kwargs):
        calls.append(None)
        if nth in (None, len(calls)):
            act(*args, **kwargs)
        return original(*args, **kwargs)

    setattr(owner, name, replaced)


def after(owner, name, act):
    original = getattr(owner, name)

    def replaced(*args, **kwargs):
        result = original(*args, **kwargs)
        act()
        return result

    setattr(owner, name, replaced)


def die_at_publication(source, target):
    if Path(target).name == SECOND:
        die()


PHASES = {
    "before_its_write": lambda: before(ShardWriter, "write_data", die),
    "in_mid_write": lambda: before(HashingStream, "write", die, nth=2),
    "after_its_write": lambda: after(ShardWriter, "write_data", die),
    "before_it_says_so": lambda: after(writer, "_write_shards", die),
}
PHASES_OF_RANK_0 = {
    "before_the_manifest": lambda: before(store, "commit", die),
    "before_the_rename": lambda: before(os, "rename", die_at_publication),
}
CASES = [(phase, victim) for phase in PHASES for victim in (0, 1)] + [(p, 0) for p in PHASES_OF_RANK_0]


def save_twice(rank, world, root, victim, arm):
    """The second save under a fault on one rank; returns what was raised, how long it took, the weights."""
    training = Training()
    training.train(1)
    training.save(root, step=1)
    saved = training.values()
    training.train(1)
    if rank == victim:
        arm()
    began_s = time.monotonic()
    try:
        training.save(root, step=2, timeout_s=TIMEOUT_S)
    except CheckpointError as error:
        return str(error), time.monotonic() - began_s, saved
    return None, time.monotonic() - began_s, saved


def load(rank, world, root):
    training = Training(seed=1)
    loaded = training.load(root)
    return loaded, training.values()


def assert_first_is_loaded(root, saved):
    loaded, restored = run_ranks(1, load, root)[0]
    assert (loaded.path.name, loaded.skipped) == (FIRST, [])
    assert_equal(restored, saved)


@pytest.mark.parametrize(("phase", "victim"), CASES)
def test_a_rank_killed_in_a_save_leaves_the_checkpoint_before(tmp_path, phase, victim):
    arm = {**PHASES, **PHASES_OF_RANK_0}[phase]
    results = run_ranks(3, save_twice, tmp_path, victim, arm, allow_exit=True)
    assert results.pop(victim) == Exited(-signal.SIGKILL)
    for raised, seconds, _ in results:
        assert raised is not None and "lost another rank" in raised
        assert seconds < TIMEOUT_S
    assert [each.path.name for each in store.candidates(tmp_path)] == [FIRST]
    assert_first_is_loaded(tmp_path, results[0][2])
    store.retain(tmp_path, keep_last=1, keep_every_steps=0, attempt="17_0_1")
    assert os.listdir(tmp_path) == [FIRST]


def test_a_rank_0_killed_after_the_rename_leaves_a_whole_checkpoint(tmp_path):
    results = run_ranks(
        3, save_twice, tmp_path, 0, lambda: after_publication(tmp_path / SECOND), allow_exit=True
    )
    assert results[0] == Exited(-signal.SIGKILL)
    assert all("lost another rank" in raised for raised, _, _ in results[1:])
    assert store.verify(tmp_path / SECOND) == []
    loaded, _ = run_ranks(1, load, tmp_path)[0]
    assert loaded.path.name == SECOND


def after_publication(final):
    before(store, "_sync_folder", lambda _: die() if final.exists() else None, nth=2)


def test_a_stalled_rank_fails_the_save_on_all_and_what_it_writes_later_is_never_found(tmp_path):
    reports = tmp_path / "reports"
    reports.mkdir()
    root = tmp_path / "checkpoints"

    def stall(*_):
        wait_until(lambda: len(list(reports.iterdir())) == 2, 40, "the others to give up")

    def save_with_a_straggler(rank, world):
        training = Training()
        training.save(root, step=1)
        if rank == 1:
            before(ShardWriter, "write_data", stall)
        began_s = time.monotonic()
        with pytest.raises(CheckpointError, match="waited for it in vain"):
            training.save(root, step=2, timeout_s=1)
        (reports / str(rank)).touch()
        return time.monotonic() - began_s

    seconds = run_ranks(3, save_with_a_straggler)
    assert max(seconds[0], seconds[2]) < 5
    assert [each.path.name for each in store.candidates(root)] == [FIRST]


def disk_full(*_args, **_kwargs):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("victim", [0, 1])
def test_a_full_disk_fails_the_save_on_all_ranks_with_the_reason_and_training_goes_on(tmp_path, victim):
    def save_on_a_full_disk(rank, world):
        raised, _, saved = save_twice(
            rank, world, tmp_path, victim, lambda: before(HashingStream, "write", disk_full, nth=2)
        )
        dist.barrier()
        names = os.listdir(tmp_path)
        dist.barrier()
        training = Training()
        training.save(tmp_path, step=2)  # the fault is over: the same step can be saved
        return raised, names, saved

    for raised, names, _ in run_ranks(2, save_on_a_full_disk):
        reason = f"rank {victim}: OSError: [Errno 28] No space left on device"
        assert raised == f"save step 2 of attempt {ATTEMPT}\n  found: {reason}"
        assert names == [FIRST]
    assert [each.path.name for each in store.find(tmp_path)] == [SECOND, FIRST]


def save_with_a_dying_thread(rank, world, root, guarded):
    """Two writer threads, one of which fails after it has taken its file (lost by DCP: pytorch#191391)."""
    original, taken = filesystem._write_files_from_queue, threading.Event()

    def write_files(*args, **kwargs):
        if args:  # in the second thread; the first one passes keywords
            args[1].get_nowait()
            taken.set()
            disk_full()
        assert taken.wait(20)
        return original(**kwargs)

    filesystem._write_files_from_queue = write_files
    threading.excepthook = lambda _: None
    make = ShardWriter.__init__
    ShardWriter.__init__ = lambda self, *args: make(self, *args, thread_count=2)
    if not guarded:
        ShardWriter.write_data = filesystem.FileSystemWriter.write_data
    state = {name: torch.ones(1000) for name in "abcdefgh"}
    group = dist.group.WORLD
    return save(root, step=1, attempt="a", state=state, facts={}, group=group, timeout_s=20, layout={})


def test_a_writer_thread_that_dies_silently_fails_the_save(tmp_path):
    with pytest.raises(CheckpointError, match="OSError: 4 of 8 planned items were not written"):
        run_ranks(1, save_with_a_dying_thread, tmp_path, True)
    assert os.listdir(tmp_path) == []


def test_mutation_without_the_guard_a_save_that_lost_data_is_committed(tmp_path):
    run_ranks(1, save_with_a_dying_thread, tmp_path, False)
    assert store.verify(store.latest(tmp_path)) == []
    with pytest.raises(KeyError):
        load_full(store.latest(tmp_path))


def test_mutation_without_gathering_a_checkpoint_lacks_a_dead_ranks_file(tmp_path):
    def commit_blindly():
        Exchange.everyone = lambda self, action: [action()]
        writer._require_files = lambda lengths, files: None

    def save_blindly(rank, world):
        return save_twice(rank, world, tmp_path, rank, [commit_blindly, PHASES["before_it_says_so"]][rank])

    run_ranks(2, save_blindly, allow_exit=True)
    assert [each.path.name for each in store.find(tmp_path)] == [SECOND, FIRST]
    assert "__1_0.distcp" not in store.find(tmp_path)[0].manifest.files
