"""The watchdog ends a rank that stands still, and only that."""

from __future__ import annotations

import json
import threading
import time

import pytest

from hpctrain.core.stop import SignalFlag
from hpctrain.core.watchdog import Watchdog
from hpctrain.run.causes import CauseKind
from tests.helpers.ranks import Exited, run_ranks


def start_watchdog(folder, *, timeout_s=60.0, stop_timeout_s=60.0, cause=None):
    def leave(kind, message):
        (folder / "cause.json").write_text(json.dumps([kind, message]))

    flag = SignalFlag()
    flag.cause = cause
    told = {CauseKind.preemption: stop_timeout_s}
    watchdog = Watchdog(flag, leave, timeout_s=timeout_s, stop_timeouts_s=told)
    watchdog.start()
    return watchdog


def stand_still():
    threading.Event().wait(30)  # like a collective that never returns


def test_a_hung_rank_leaves_its_cause_and_exits(tmp_path):
    def hang(rank, world):
        start_watchdog(tmp_path, timeout_s=0.1)
        stand_still()

    assert run_ranks(1, hang, allow_exit=True) == [Exited(1)]
    kind, message = json.loads((tmp_path / "cause.json").read_text())
    assert kind == CauseKind.hang and message.startswith("no step for ")


def test_a_rank_that_was_told_to_stop_has_less_time(tmp_path):
    def hang(rank, world):
        start_watchdog(tmp_path, stop_timeout_s=0.1, cause=CauseKind.preemption).beat()
        stand_still()

    assert run_ranks(1, hang, allow_exit=True) == [Exited(1)]
    kind, message = json.loads((tmp_path / "cause.json").read_text())
    assert kind == CauseKind.peer_lost and message.startswith("told to stop")


@pytest.mark.parametrize("cause", [CauseKind.preemption, CauseKind.stop_file])
def test_a_rank_that_is_starting_or_has_no_deadline_may_take_its_time_to_stop(tmp_path, cause):
    def start(rank, world):
        watchdog = start_watchdog(tmp_path, stop_timeout_s=0.1, cause=cause)
        if cause is CauseKind.stop_file:
            watchdog.beat()
        threading.Event().wait(1.5)  # three looks of the watchdog
        watchdog.close()
        return "alive"

    assert run_ranks(1, start, allow_exit=True) == ["alive"]


def test_a_rank_whose_cause_cannot_be_written_ends_all_the_same(tmp_path):
    def hang(rank, world):
        def leave(kind, message):
            raise OSError("no space left")

        Watchdog(SignalFlag(), leave, timeout_s=0.1, stop_timeouts_s={}).start()
        stand_still()

    assert run_ranks(1, hang, allow_exit=True) == [Exited(1)]


class CountedFlag:
    """A flag that counts how often the watchdog has looked at it."""

    def __init__(self):
        self.looks = 0

    @property
    def cause(self):
        self.looks += 1
        return None


@pytest.mark.parametrize("kind", ["steps", "pause", "silence"])
def test_steps_and_pauses_keep_it_quiet_and_silence_does_not(tmp_path, kind):
    def work(rank, world):
        now = [0.0]
        time.monotonic = lambda: now[0]
        flag = CountedFlag()
        watchdog = Watchdog(flag, lambda kind, message: None, timeout_s=1.0, stop_timeouts_s={})
        watchdog.start()

        def pass_time(step_s, beats):
            looks = flag.looks
            while flag.looks < looks + 3:
                now[0] += step_s
                if beats:
                    watchdog.beat()
                threading.Event().wait(0.01)

        if kind == "pause":
            with watchdog.paused(), watchdog.paused():
                pass_time(10.0, beats=False)
        else:
            pass_time(0.9, beats=kind == "steps")
        watchdog.close()
        return "alive"

    wanted = Exited(1) if kind == "silence" else "alive"
    assert run_ranks(1, work, allow_exit=True) == [wanted]


def test_closing_leaves_no_thread(tmp_path):
    before = threading.active_count()
    watchdog = start_watchdog(tmp_path)
    assert threading.active_count() == before + 1
    watchdog.close()
    assert threading.active_count() == before


def test_an_exception_ends_a_pause(tmp_path):
    def work(rank, world):
        watchdog = start_watchdog(tmp_path, timeout_s=0.1)
        with pytest.raises(OSError), watchdog.paused():
            raise OSError
        stand_still()

    assert run_ranks(1, work, allow_exit=True) == [Exited(1)]
