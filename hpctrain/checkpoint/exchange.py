"""Agreement of all ranks on an outcome over a Gloo group, never waiting longer than a time-out.

Either every rank goes on, or every rank that is alive raises CheckpointError.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any, Generic, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from hpctrain.errors import CheckpointError

T = TypeVar("T")


@dataclass(frozen=True)
class _Outcome(Generic[T]):
    value: T | None = None
    error: CheckpointError | None = None


class Exchange:
    """The ranks of a group, with every wait on the group bounded by `timeout_s` inside a `with`.

    After a time-out or the death of a rank Gloo closes the group's connections: it cannot be used again.
    """

    def __init__(self, group: dist.ProcessGroup, timeout_s: float, purpose: str) -> None:
        self._group, self._purpose = group, purpose
        self._timeout = timedelta(seconds=timeout_s)
        self._backend: Any = group._get_backend(torch.device("cpu"))
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)

    def __enter__(self) -> Exchange:
        self._timeout_before = self._backend.options._timeout
        self._backend._set_default_timeout(self._timeout)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._backend._set_default_timeout(self._timeout_before)

    def everyone(self, action: Callable[[], T]) -> list[T]:
        """Runs `action` on every rank; returns the results in rank order.

        Collective over the group. Raises CheckpointError on all ranks if it failed on any.
        """
        mine = self._outcome(action)
        outcomes: list[Any] = [None] * self.world_size
        try:
            dist.all_gather_object(outcomes, mine, group=self._group)
        except RuntimeError as error:
            raise self._lost(error) from mine.error
        errors = [outcome.error for outcome in outcomes if outcome.error]
        if errors:
            raise self._combined(errors)
        return [outcome.value for outcome in outcomes]

    def lead(self, action: Callable[[], T]) -> T:
        """Runs `action` on rank 0 and tells the others its result.

        Collective over the group. Raises CheckpointError on all ranks if it failed.
        """
        told: list[Any] = [self._outcome(action) if self.rank == 0 else None]
        try:
            dist.broadcast_object_list(told, group=self._group, group_src=0)
        except RuntimeError as error:
            raise self._lost(error) from error
        if told[0].error:
            raise self._combined([told[0].error])
        return cast(T, told[0].value)

    def _outcome(self, action: Callable[[], T]) -> _Outcome[T]:
        try:
            return _Outcome(value=action())
        except CheckpointError as error:
            return _Outcome(error=error)
        except CheckpointException as error:  # DCP has gathered these: every rank holds the same
            reasons = [f"rank {rank}: {_described(cause)}" for rank, (cause, _) in error.failures.items()]
            return _Outcome(error=CheckpointError(self._purpose, "; ".join(reasons)))
        except Exception as error:
            return _Outcome(error=CheckpointError(self._purpose, f"rank {self.rank}: {_described(error)}"))

    def _combined(self, errors: list[CheckpointError]) -> CheckpointError:
        """One error for all ranks; what several ranks say alike is said once."""
        if len(errors) == 1 or len({str(error) for error in errors}) == 1:
            return errors[0]
        found = dict.fromkeys(error.found or error.asked for error in errors)
        changes = dict.fromkeys(error.change for error in errors if error.change)
        return CheckpointError(self._purpose, "; ".join(found), "; ".join(changes))

    def _lost(self, error: RuntimeError) -> CheckpointError:
        return CheckpointError(
            self._purpose,
            f"rank {self.rank} lost another rank or waited for it in vain: {_described(error)}",
            "if no rank died, raise checkpoint.timeout_s "
            f"(now {self._timeout.total_seconds():g} s) or look at the file system",
        )


def _described(error: BaseException) -> str:
    text = str(error).strip() or repr(error)
    return f"{type(error).__name__}: {text}"
