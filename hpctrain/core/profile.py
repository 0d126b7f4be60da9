"""Looking inside a run: a recorded window of steps, and what held the memory of a GPU when it ran out.

Traces are Chrome's format: open them at ui.perfetto.dev. Snapshots: pytorch.org/memory_viz.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

# An entry with its Python stack takes about a kilobyte of host memory. A step of a large model allocates a
# few thousand times; what was allocated earlier and is still alive is in the snapshot in any case.
MAX_ENTRIES = 50_000


class StepTrace:
    """Records the steps between two counts of finished ones, on this rank. `at` costs nothing outside."""

    def __init__(self, steps: list[int], path: Path, device: torch.device) -> None:
        self._first, self._end = steps or (0, 0)
        self._path = path
        self._activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            self._activities.append(ProfilerActivity.CUDA)
        self._profile: profile | None = None
        self._span: Any = None
        self._begun = 0

    def at(self, step: int) -> None:
        """So many steps are done. A start that finds itself within the window records the rest of it."""
        if self._profile is not None:
            self._span.__exit__(None, None, None)
            if step >= self._end:
                self._write()
        elif self._first <= step < self._end:
            self._begun = step
            self._profile = profile(activities=self._activities)
            self._profile.start()
        if self._profile is not None:
            self._span = record_function(f"step {step + 1}")
            self._span.__enter__()

    def close(self) -> None:
        """Write what there is, when the run ends within the window."""
        if self._profile is not None:
            self._span.__exit__(None, None, None)
            self._write()

    def _write(self) -> None:
        assert self._profile is not None
        self._profile.stop()
        self._path.parent.mkdir(exist_ok=True)
        partial = self._path.with_name(f".{self._path.name}")
        self._profile.export_chrome_trace(str(partial))
        partial.rename(self._path)
        self._profile = None
        print(f"hpctrain: the steps from {self._begun + 1} on are recorded in {self._path}", flush=True)


class MemoryHistory:
    """Remembers the last allocations on a GPU, so that they can be written down when it is full."""

    def __init__(self, path: Path, device: torch.device, *, is_wanted: bool) -> None:
        self._path, self._is_on = path, is_wanted and device.type == "cuda"
        if self._is_on:
            # Python's stacks alone: those of C++ would take longer than the allocations.
            torch.cuda.memory._record_memory_history(stacks="python", max_entries=MAX_ENTRIES, device=device)

    def write_if_full(self, error: BaseException) -> str:
        """Write a snapshot if the error says that the GPU's memory was used up; returns a hint that names
        the file, or nothing."""
        if not (self._is_on and isinstance(error, torch.OutOfMemoryError)):
            return ""
        try:
            self._path.parent.mkdir(exist_ok=True)
            torch.cuda.memory._dump_snapshot(str(self._path))  # type: ignore[no-untyped-call]
        except (OSError, RuntimeError) as failure:  # the error itself is what must be told
            return f"; no memory snapshot: {failure}"
        return f"; what held the memory is in {self._path}"
