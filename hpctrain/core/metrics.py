"""What a run says about itself: metrics.jsonl, TensorBoard, and the terminal. Rank 0 only."""

from __future__ import annotations

import json
import math
import resource
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_BLOCKS = "▁▂▃▄▅▆▇█"


class Deferred:
    """Device scalars that come to the host without stopping the device: read when their copy is done."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._waiting: deque[tuple[dict[str, Any], dict[str, Tensor], Any]] = deque()

    def push(self, record: dict[str, Any], scalars: dict[str, Tensor]) -> None:
        copies, event = scalars, None
        if self._device.type == "cuda":
            copies = {name: value.detach().to("cpu", non_blocking=True) for name, value in scalars.items()}
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        self._waiting.append((record, copies, event))

    def ready(self, *, wait: bool = False) -> list[dict[str, Any]]:
        """Records whose numbers have arrived, oldest first."""
        records = []
        while self._waiting:
            record, copies, event = self._waiting[0]
            if event is not None and not event.query():
                if not wait:
                    break
                event.synchronize()
            self._waiting.popleft()
            records.append(record | {name: float(value) for name, value in copies.items()})
        return records


class Meter:
    """Time since the last report, spread over steps, samples and waiting for data."""

    def __init__(self, *, flops_per_sample: float | None, peak_flops: float | None, world_size: int) -> None:
        self._flops, self._peak, self._world_size = flops_per_sample, peak_flops, world_size
        self.restart()

    def restart(self, waited_s: float = 0.0) -> None:
        """Begin a new interval; evaluation and saving do not count as training time."""
        self._start, self._samples, self._waited_s = time.perf_counter(), 0, waited_s

    def add(self, samples: int) -> None:
        self._samples += samples

    def report(self, waited_s: float, device: torch.device) -> dict[str, Any]:
        """Rates since the last `restart`. MFU counts model FLOPs (forward and backward, no recomputation)
        against the peak of the device at the precision in use, as in PaLM (Chowdhery et al. 2022, app. B)."""
        seconds = max(1e-9, time.perf_counter() - self._start)
        rate = self._samples / seconds
        facts: dict[str, Any] = {
            "samples_per_s": rate,
            "data_wait": min(1.0, (waited_s - self._waited_s) / seconds),
            "memory_gib": memory_gib(device),
        }
        if self._flops and self._peak:
            facts["mfu"] = rate * self._flops / (self._peak * self._world_size)
        self.restart(waited_s)
        return facts


def memory_gib(device: torch.device) -> float:
    """Largest memory so far: allocated on a GPU, resident on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


class Reporter:
    """Writes records to metrics.jsonl, TensorBoard and the terminal."""

    def __init__(
        self, metrics: Path, tensorboard: Path, attempt: str, num_steps: int, first_step: int
    ) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._file = metrics.open("a", buffering=1)
        # Steps after the restored one will be done again: TensorBoard drops what it had of them.
        self._board = SummaryWriter(str(tensorboard), purge_step=first_step)
        self._attempt, self._num_steps = attempt, num_steps
        self._losses: list[tuple[int, float]] = []
        self._bar = _make_bar(num_steps, first_step) if sys.stdout.isatty() else None

    def train(self, record: dict[str, Any]) -> None:
        self._write({"kind": "train", "num_steps": self._num_steps, **record})
        if math.isfinite(record["loss"]):
            self._losses.append((record["step"], record["loss"]))
        if self._bar:
            self._bar.update(record)
        else:
            print(_line(record, self._num_steps), flush=True)

    def evaluation(self, record: dict[str, Any]) -> None:
        self._write({"kind": "eval", **record})
        facts = "  ".join(f"{k} {v:.4f}" for k, v in record.items() if k not in ("step", "epoch"))
        self.say(f"eval  step {record['step']}  {facts}")

    def say(self, text: str) -> None:
        if self._bar:
            self._bar.progress.console.print(text, highlight=False)
        else:
            print(text, flush=True)

    def close(self) -> None:
        if self._bar:
            self._bar.progress.stop()
        if len(self._losses) > 1:
            print(curve(self._losses), flush=True)
        self._board.close()
        self._file.close()

    def _write(self, record: dict[str, Any]) -> None:
        record = {"time": round(time.time(), 3), "attempt": self._attempt, **record}
        finite = {
            k: (v if not isinstance(v, float) or math.isfinite(v) else str(v)) for k, v in record.items()
        }
        self._file.write(json.dumps(finite) + "\n")
        for key, value in record.items():
            if isinstance(value, float) and key != "time":
                self._board.add_scalar(f"{record['kind']}/{key}", value, record["step"])


class _Bar:
    """A rich progress bar with the last numbers beside it."""

    def __init__(self, progress: Any, task: Any) -> None:
        self.progress, self._task = progress, task

    def update(self, record: dict[str, Any]) -> None:
        facts = f"loss {record['loss']:.3f}  {record['samples_per_s']:.0f}/s  wait {record['data_wait']:.0%}"
        self.progress.update(self._task, completed=record["step"], facts=facts)


def _make_bar(num_steps: int, first_step: int) -> _Bar:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("train"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[facts]}"),
    )
    progress = Progress(*columns)
    task = progress.add_task("train", total=num_steps, completed=first_step, facts="")
    progress.start()
    return _Bar(progress, task)


def _line(record: dict[str, Any], num_steps: int) -> str:
    mfu = f"  mfu {record['mfu']:.1%}" if "mfu" in record else ""
    return (
        f"step {record['step']}/{num_steps}  epoch {record['epoch']}  loss {record['loss']:.4f}  "
        f"lr {record['lr']:.2e}  norm {record['grad_norm']:.2f}  {record['samples_per_s']:.1f} samples/s  "
        f"wait {record['data_wait']:.0%}  {record['memory_gib']:.1f} GiB{mfu}"
    )


def curve(points: list[tuple[int, float]], width: int = 60) -> str:
    """The loss over the steps as one line of blocks."""
    size = max(1, math.ceil(len(points) / width))
    groups = [points[i : i + size] for i in range(0, len(points), size)]
    means = [sum(loss for _, loss in group) / len(group) for group in groups]
    low, high = min(means), max(means)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    bars = "".join(_BLOCKS[round((mean - low) * scale)] for mean in means)
    return f"loss {means[0]:.3f} {bars} {means[-1]:.3f}   steps {points[0][0]}–{points[-1][0]}"
