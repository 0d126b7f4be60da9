"""A thread that ends a rank which stopped moving, and says so: a rank blocked in a collective cannot."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hpctrain.core.stop import SignalFlag
from hpctrain.run.causes import CauseKind


class Watchdog:
    """Ends the process when there was no `beat` for too long: `timeout_s` in general (starting up included),
    and what `stop_timeouts_s` says once the rank was told to stop for that reason and had begun to train
    (then a peer is most likely gone, and Slurm's SIGKILL is near)."""

    def __init__(
        self,
        flag: SignalFlag,
        leave: Callable[[CauseKind, str], None],
        *,
        timeout_s: float,
        stop_timeouts_s: dict[CauseKind, float],
    ) -> None:
        self._flag, self._leave = flag, leave
        self._timeout_s, self._stop_timeouts_s = timeout_s, stop_timeouts_s
        self._last = time.monotonic()
        self._longest: float | None = None  #: s between two beats
        self._paused = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        self._last = time.monotonic()
        self._thread.start()

    def beat(self) -> None:
        """A step is done."""
        now = time.monotonic()
        self._longest = max(self._longest or 0.0, now - self._last)
        self._last = now

    @contextmanager
    def paused(self) -> Iterator[None]:
        """For work that has deadlines of its own, such as a save."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1
            self._last = time.monotonic()

    def close(self) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        told: float | None = None
        while not self._over.wait(0.5):
            if self._flag.cause is not None and told is None:
                told = time.monotonic()
            if self._paused:
                continue
            silent = time.monotonic() - self._last
            if silent > self._timeout_s:
                self._end(CauseKind.hang, f"no step for {silent:.0f} s")
            stop_timeout_s = self._stop_timeouts_s.get(self._flag.cause) if self._flag.cause else None
            if told is None or stop_timeout_s is None or self._longest is None:
                continue
            # A step may have been under way for as long as the longest one took so far.
            limit = stop_timeout_s + 2 * self._longest
            if time.monotonic() - max(told, self._last) > limit:
                self._end(CauseKind.peer_lost, f"told to stop, and no step for {limit:.0f} s since")

    def _end(self, kind: CauseKind, message: str) -> None:
        if self._over.is_set():
            return
        print(f"hpctrain: {kind}: {message}; what every thread was doing:", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
        try:
            self._leave(kind, message)
        finally:
            os._exit(1)
