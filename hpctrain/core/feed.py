"""Batches on the device, one step ahead, and how long the training loop had to wait for them."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Iterator
from typing import Any

import torch

Microbatches = list[Any]


def _iterate(batches: Iterable[Microbatches]) -> Generator[Microbatches, None, None]:
    yield from batches


class Feed:
    """Yields (host microbatches, device microbatches) a step.

    On a GPU the copies run on a stream of their own: the host is ahead of the device, so they overlap with
    the computation of the step before.
    """

    def __init__(self, batches: Iterable[Microbatches], device: torch.device) -> None:
        self._batches, self._device = _iterate(batches), device
        self._stream = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._first: tuple[Microbatches, Microbatches] | None = None
        self.waited_s = 0.0  #: time spent waiting for the loader, in total

    def peek(self) -> Microbatches:
        """The first step's microbatches on the device, without using them up."""
        if self._first is None:
            self._first = self._fetch()
        return self._first[1]

    def __iter__(self) -> Iterator[tuple[Microbatches, Microbatches]]:
        return self

    def __next__(self) -> tuple[Microbatches, Microbatches]:
        if self._first is not None:
            first, self._first = self._first, None
            return first
        return self._fetch()

    def close(self) -> None:
        """End the loader's workers. They ignore SIGTERM, so Python's own end would wait for them forever."""
        self._first = None
        self._batches.close()

    def _fetch(self) -> tuple[Microbatches, Microbatches]:
        start = time.perf_counter()
        host = next(self._batches)
        self.waited_s += time.perf_counter() - start
        if self._stream is None:
            return host, host
        with torch.cuda.stream(self._stream):
            moved = [microbatch.to(self._device, non_blocking=True) for microbatch in host]
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        for microbatch in moved:
            for value in vars(microbatch).values():
                if isinstance(value, torch.Tensor):
                    value.record_stream(current)
        return host, moved
