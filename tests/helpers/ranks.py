"""A function on several Gloo ranks, each a fork of the test process (importing torch anew costs seconds).

    def mean_of_ranks(rank: int, world: int) -> float:
        x = torch.tensor(float(rank)); dist.all_reduce(x); return x.item() / world

    assert run_ranks(4, mean_of_ranks) == [1.5] * 4

Closures and lambdas work (nothing is pickled on the way in); results come back through files.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import pickle
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

_POLL_S = 0.005
_PR_SET_PDEATHSIG = 1  # prctl(2)
_GRACE_AFTER_FAILURE_S = 2.0


@dataclass(frozen=True)
class Exited:
    """Stands for the result of a rank that ended without one (killed, `os._exit`)."""

    returncode: int  #: exit code, or minus the signal's number


@dataclass
class _Rank:
    rank: int
    pid: int
    folder: Path
    returncode: int | None = None

    def poll(self) -> bool:
        """True once the rank has ended; what it started (loader workers) is ended with it."""
        if self.returncode is None:
            # WNOWAIT keeps the pid ours until its process group has been killed.
            if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return False
            self.end()
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return True

    def end(self) -> None:
        """Kills the rank and what it started."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:  # it has not made its group yet
            os.kill(self.pid, signal.SIGKILL)

    @property
    def outcome(self) -> tuple[str, float, Any] | None:
        path = self.folder / f"rank{self.rank}.pickle"
        return pickle.loads(path.read_bytes()) if path.exists() else None

    @property
    def stack(self) -> str:
        path = self.folder / f"rank{self.rank}.stack"
        return path.read_text() if path.exists() else ""


def run_ranks(
    world: int, function: Callable[..., Any], *args: Any, timeout_s: float = 60, allow_exit: bool = False
) -> list[Any]:
    """Calls `function(rank, world, *args)` on `world` ranks of a Gloo group; returns in rank order.

    Args:
        timeout_s: After this long whatever still runs is killed, and named in the error with its stack.
        allow_exit: A rank that dies without a result (`os._exit`, a signal) gives `Exited` and the others
            go on; otherwise it is an error.

    Raises:
        TimeoutError: ranks were still running at the deadline.
        ChildProcessError: a rank died without a result.
        Exception: what the first rank to fail raised, with that rank's traceback as a note.
    """
    with tempfile.TemporaryDirectory(prefix="hpctrain-ranks-") as name:
        folder, ranks = Path(name), []
        try:
            for rank in range(world):
                ranks.append(_Rank(rank, _fork(rank, world, function, args, folder, timeout_s), folder))
            late = _wait(ranks, timeout_s, stop_at_failure=not allow_exit)
            return _results(ranks, late, timeout_s, allow_exit)
        finally:
            for each in ranks:
                if not each.poll():
                    each.end()
            while not all(each.poll() for each in ranks):
                time.sleep(_POLL_S)


def _wait(ranks: list[_Rank], timeout_s: float, stop_at_failure: bool) -> list[_Rank]:
    """Waits for all; returns those that had to be ended because the time was up."""
    deadline_s = time.monotonic() + timeout_s
    failed_s = None
    while not all([each.poll() for each in ranks]):
        now_s = time.monotonic()
        if stop_at_failure and failed_s is None and any(each.returncode for each in ranks):
            failed_s = now_s
        if failed_s is not None and now_s > failed_s + _GRACE_AFTER_FAILURE_S:
            return []
        if now_s > deadline_s:
            late = [each for each in ranks if each.returncode is None]
            for each in late:
                os.kill(each.pid, signal.SIGABRT)  # faulthandler writes the stack
            while not all([each.poll() for each in late]) and time.monotonic() < now_s + 1:
                time.sleep(_POLL_S)
            return late
        time.sleep(_POLL_S)
    return []


def _results(ranks: list[_Rank], late: list[_Rank], timeout_s: float, allow_exit: bool) -> list[Any]:
    outcomes = [each.outcome for each in ranks]
    errors = [(outcome[1], outcome[2]) for outcome in outcomes if outcome and outcome[0] == "error"]
    ended = [each for each in ranks if each.returncode is not None and each not in late]
    dead = [each for each in ended if outcomes[each.rank] is None]
    said = "".join(f"\nrank {each.rank} ended with {each.returncode} {each.stack}" for each in dead)
    if errors:
        error = min(errors, key=lambda pair: pair[0])[1]
        if dead:
            error.add_note(said)
        raise error
    if dead and not allow_exit:
        raise ChildProcessError(f"ranks ended without a result:{said}")
    if late:
        stacks = "".join(f"\nrank {each.rank}:\n{each.stack}" for each in late)
        raise TimeoutError(f"ranks {[each.rank for each in late]} still ran after {timeout_s:g} s{stacks}")
    return [
        outcome[2] if outcome else Exited(each.returncode or 0)
        for each, outcome in zip(ranks, outcomes, strict=True)
    ]


def _fork(
    rank: int, world: int, function: Callable[..., Any], args: tuple[Any, ...], folder: Path, timeout_s: float
) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    with warnings.catch_warnings():  # Python 3.12 warns about fork in a process with threads
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid:
        return pid
    try:
        os.setpgid(0, 0)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        _child(rank, world, function, args, folder, timeout_s)
    finally:
        os._exit(1)  # never back into the test session


def _child(
    rank: int, world: int, function: Callable[..., Any], args: tuple[Any, ...], folder: Path, timeout_s: float
) -> None:
    import torch
    import torch.distributed as dist

    stack = open(folder / f"rank{rank}.stack", "w")  # noqa: SIM115  open as long as the process lives
    faulthandler.enable(stack)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        dist.init_process_group(
            "gloo", f"file://{folder}/store", timedelta(seconds=timeout_s), world_size=world, rank=rank
        )
        result = function(rank, world, *args)
        blob, code = pickle.dumps(("result", time.monotonic(), result)), 0
        if dist.is_initialized():
            dist.destroy_process_group()
    except BaseException as error:
        blob, code = _pickled_error(rank, error), 1
    partial = folder / f"rank{rank}.partial"
    partial.write_bytes(blob)
    partial.rename(folder / f"rank{rank}.pickle")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _pickled_error(rank: int, error: BaseException) -> bytes:
    now_s, text = time.monotonic(), f"on rank {rank}:\n{''.join(traceback.format_exception(error))}"
    try:
        error.add_note(text)
        blob = pickle.dumps(("error", now_s, error))
        pickle.loads(blob)
        return blob
    except Exception:
        return pickle.dumps(("error", now_s, RuntimeError(text)))
