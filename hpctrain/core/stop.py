"""Signals become a flag, and the flag becomes an agreed stop: all ranks end after the same step.

`SignalFlag` is usable before torch is imported: a rank that is preempted while it starts must not die of it.
"""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from hpctrain.run.causes import CauseKind

if TYPE_CHECKING:
    import torch.distributed as dist

# The larger number wins when ranks saw different reasons.
_CODES = {CauseKind.stop_file: 1, CauseKind.time_limit: 2, CauseKind.preemption: 3}
_SIGNALS = {signal.SIGTERM: CauseKind.preemption, signal.SIGUSR2: CauseKind.time_limit}
STOP_FILE_POLL_S = 5.0


class PeerLostError(RuntimeError):
    """Another rank is gone, or does not answer in time."""


class SignalFlag:
    """Remembers that SIGTERM or the warning signal came; handlers do nothing else."""

    def __init__(self) -> None:
        self.cause: CauseKind | None = None
        self._pid = os.getpid()

    def install(self) -> None:
        for number in _SIGNALS:
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # Forked loader workers inherit this handler; Slurm signals them too.
        if os.getpid() == self._pid:
            self.cause = _SIGNALS[signal.Signals(number)]


class AgreedStop:
    """The ranks' common answer to: does anybody have to stop?

    Posted after one step and read before the next, so that nobody waits for it; a rank that has gone away
    shows as an error or as silence beyond the deadline, never as an agreement.
    """

    def __init__(
        self,
        flag: SignalFlag,
        group: dist.ProcessGroup | None,
        *,
        stop_file: Path | None,
        timeout_s: float,
        stop_timeouts_s: dict[CauseKind, float],
    ) -> None:
        """`group` is a Gloo group of all ranks, None for a single one. `stop_file` is given to rank 0 alone.

        `timeout_s` bounds the wait for an answer, `stop_timeouts_s` that of a rank which was told to stop. A
        dead peer shows at once, by its closed connections; only a silent one is waited for.
        """
        self.flag, self.group, self.stop_file = flag, group, stop_file
        self.timeout_s, self.stop_timeouts_s = timeout_s, stop_timeouts_s
        self._pending: tuple[Any, Any] | None = None
        self._agreed: CauseKind | None = None
        self._looked_at = -STOP_FILE_POLL_S

    def post(self) -> None:
        """Tell the others, without waiting, whether this rank has a reason to stop."""
        import torch
        import torch.distributed as dist

        code = torch.tensor([_CODES.get(self._own(), 0)], dtype=torch.int32)  # type: ignore[arg-type]
        work = None
        if self.group is not None:
            work = dist.all_reduce(code, dist.ReduceOp.MAX, group=self.group, async_op=True)
        self._pending = (code, work)

    def agreed(self) -> CauseKind | None:
        """The answer to the last `post`, None for: go on. Raises PeerLostError."""
        if self._pending is None or self._agreed is not None:
            return self._agreed
        code, work = self._pending
        self._pending = None
        if work is not None:
            self._wait(work)
        self._agreed = next((kind for kind, number in _CODES.items() if number == int(code)), None)
        return self._agreed

    def _wait(self, work: Any) -> None:
        start = time.monotonic()
        while not work.is_completed():
            limit = self.timeout_s
            if self.flag.cause is not None:
                limit = self.stop_timeouts_s.get(self.flag.cause, self.timeout_s)
            if time.monotonic() - start > limit:
                raise PeerLostError(f"the ranks did not agree whether to stop within {limit:.0f} s")
            time.sleep(0.0002)
        try:
            work.wait(timedelta(seconds=1))
        except RuntimeError as error:
            raise PeerLostError(f"a rank went away: {error}") from error

    def _own(self) -> CauseKind | None:
        if self.flag.cause is None and self.stop_file is not None:
            now = time.monotonic()
            if now - self._looked_at >= STOP_FILE_POLL_S:
                self._looked_at = now
                if self.stop_file.exists():
                    self.flag.cause = CauseKind.stop_file
        return self.flag.cause
