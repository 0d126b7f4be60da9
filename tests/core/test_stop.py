"""The agreed stop, and signals."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch.distributed as dist

from hpctrain.core.stop import AgreedStop, PeerLostError, SignalFlag
from hpctrain.run.causes import CauseKind
from tests.helpers.polling import wait_until
from tests.helpers.ranks import Exited, run_ranks


def make_stop(flag, stop_file=None, timeout_s=20.0, stop_timeout_s=20.0, group=None):
    return AgreedStop(
        flag,
        group,
        stop_file=stop_file,
        timeout_s=timeout_s,
        stop_timeouts_s={CauseKind.preemption: stop_timeout_s},
    )


def loop_until_agreed(stop, flag, told, cause, max_steps=20):
    """Steps done, and the answer. `told` is the step after which this rank has a reason to stop."""
    for step in range(max_steps):
        answer = stop.agreed()
        if answer is not None:
            return step, answer
        if step == told:
            flag.cause = cause
        stop.post()
    return max_steps, None


@pytest.mark.parametrize("world", [1, 2, 3])
def test_one_signalled_rank_stops_all_after_the_same_step(world):
    def step_on(rank, world):
        flag = SignalFlag()
        stop = make_stop(flag, group=dist.group.WORLD if world > 1 else None)
        told = 5 if rank == world - 1 else None
        return loop_until_agreed(stop, flag, told, CauseKind.preemption)

    assert run_ranks(world, step_on) == [(6, CauseKind.preemption)] * world


def test_nobody_stops_without_a_reason():
    def step_on(rank, world):
        flag = SignalFlag()
        return loop_until_agreed(make_stop(flag, group=dist.group.WORLD), flag, None, None)

    assert run_ranks(2, step_on) == [(20, None)] * 2


def test_preemption_wins_over_the_time_limit_and_that_over_the_stop_file(tmp_path):
    switch = tmp_path / "STOP"
    switch.touch()

    def step_on(rank, world, causes):
        flag = SignalFlag()
        flag.cause = causes[rank]
        stop = make_stop(flag, switch if rank == 0 else None, group=dist.group.WORLD)
        return loop_until_agreed(stop, flag, None, None)

    time_limit, preemption = CauseKind.time_limit, CauseKind.preemption
    assert run_ranks(3, step_on, [time_limit, preemption, None]) == [(1, preemption)] * 3
    assert run_ranks(3, step_on, [None, time_limit, None]) == [(1, time_limit)] * 3
    assert run_ranks(3, step_on, [None, None, None]) == [(1, CauseKind.stop_file)] * 3


def test_the_answer_stays():
    stop = make_stop(flag := SignalFlag())
    flag.cause = CauseKind.time_limit
    stop.post()
    assert stop.agreed() is stop.agreed() is CauseKind.time_limit
    flag.cause = None
    stop.post()
    assert stop.agreed() is CauseKind.time_limit


def test_a_dead_rank_is_a_lost_peer_and_never_an_agreement():
    def step_on(rank, world):
        flag = SignalFlag()
        stop = make_stop(flag, group=dist.group.WORLD)
        stop.post()
        assert stop.agreed() is None
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        start = time.monotonic()
        flag.cause = CauseKind.preemption
        try:
            stop.post()
            stop.agreed()
        except RuntimeError as error:  # Gloo may know already when the question is posted
            return isinstance(error, PeerLostError) or "Connection" in str(error), time.monotonic() - start
        return None

    outcomes = run_ranks(3, step_on, allow_exit=True)
    assert outcomes[1] == Exited(-signal.SIGKILL)
    for lost, seconds in (outcomes[0], outcomes[2]):
        assert lost and seconds < 20


@pytest.mark.parametrize("signalled", [False, True])
def test_a_silent_rank_is_a_lost_peer_after_the_deadline(signalled, tmp_path):
    over = tmp_path / "over"

    def step_on(rank, world):
        if rank == 1:  # alive, but it does not come
            wait_until(over.exists, 30, "the other rank has given up", 0.01)
            return None
        flag = SignalFlag()
        flag.cause = CauseKind.preemption if signalled else None
        short = {"stop_timeout_s" if signalled else "timeout_s": 0.2}
        stop = make_stop(flag, group=dist.group.WORLD, **short)
        stop.post()
        try:
            told = f"agreed on {stop.agreed()}"
        except PeerLostError as error:
            told = str(error)
        (tmp_path / "told").write_text(told)
        over.touch()
        os._exit(0)  # the question is still open: an orderly end would wait for the answer

    run_ranks(2, step_on, allow_exit=True)
    assert (tmp_path / "told").read_text() == "the ranks did not agree whether to stop within 0 s"


def test_signals_are_remembered_and_interrupt_no_wait():
    def wait_for_peer(rank, world):
        flag = SignalFlag()
        flag.install()
        stop = make_stop(flag, group=dist.group.WORLD)
        if rank == 0:
            stop.post()
            os.kill(os.getpid(), signal.SIGUSR2)
            dist.send(_one(), 1)  # only now does the other come
        else:
            dist.recv(_one(), 0)
            stop.post()
        first = stop.agreed()  # asked before the signal came
        stop.post()
        return first, stop.agreed()

    assert run_ranks(2, wait_for_peer) == [(None, CauseKind.time_limit)] * 2


def _one():
    import torch

    return torch.ones(1)


@pytest.mark.parametrize(
    ("number", "cause"), [(signal.SIGTERM, CauseKind.preemption), (signal.SIGUSR2, CauseKind.time_limit)]
)
def test_a_signal_during_a_blocking_wait_leaves_the_wait_and_sets_the_flag(number, cause):
    def wait(rank, world):
        flag = SignalFlag()
        flag.install()
        child = os.fork()
        if child == 0:
            os.kill(os.getppid(), number)
            os._exit(0)
        _, status = os.waitpid(child, 0)  # blocks while the signal comes
        wait_until(lambda: flag.cause, 10, "the flag", 0.01)
        return flag.cause, status

    assert run_ranks(1, wait) == [(cause, 0)]


def test_handlers_do_nothing_in_forked_children():
    def fork(rank, world):
        flag = SignalFlag()
        flag.install()
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(7 if flag.cause is None else 8)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flag.cause

    assert run_ranks(1, fork) == [(7, None)]
