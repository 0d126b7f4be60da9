"""Waiting for something to become true, with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_until(predicate: Callable[[], T], timeout_s: float, what: str, interval_s: float = 0.05) -> T:
    """Returns the first true value of `predicate()`.

    Raises:
        TimeoutError: it stayed false for `timeout_s`; the message names `what` and the last value seen.
    """
    deadline_s = time.monotonic() + timeout_s
    while True:
        value = predicate()
        if value:
            return value
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{what}: not within {timeout_s:g} s (last value: {value!r})")
        time.sleep(interval_s)
