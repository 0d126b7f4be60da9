"""A progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

_LINE_EVERY_S = 10.0


@contextmanager
def show_progress(what: str, total: int, unit: str, show: bool = True) -> Iterator[Callable[[int], None]]:
    """Shows on stderr how far some work is; gives a function to call with each number of items done."""
    console = Console(stderr=True)
    if not show:
        yield lambda count: None
    elif console.is_terminal:
        columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TextColumn(unit))
        with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
            task = progress.add_task(what, total=total)
            yield lambda count: progress.advance(task, count)
    else:
        lines = _Lines(what, total, unit)
        yield lines.advance
        lines.write()


class _Lines:
    def __init__(self, what: str, total: int, unit: str) -> None:
        self._what, self._total, self._unit = what, total, unit
        self._done = 0
        self._started_s = self._written_s = time.monotonic()

    def advance(self, count: int) -> None:
        self._done += count
        if time.monotonic() - self._written_s >= _LINE_EVERY_S and self._done < self._total:
            self.write()

    def write(self) -> None:
        self._written_s = time.monotonic()
        rate = self._done / max(self._written_s - self._started_s, 1e-9)
        text = f"{self._what}: {self._done:,} of {self._total:,} {self._unit}, {rate:,.0f}/s"
        print(text, file=sys.stderr, flush=True)
