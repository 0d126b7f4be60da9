"""A real pipeline whose stages sleep: the schedule and its messages are measured, and not the cores.

seconds, send_s = measure_pipeline("1f1b", 2, 4, forward_s=[0.05, 0.1], backward_s=[0.1, 0.2])
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpctrain.config.schema import Schedule
from hpctrain.core.pipeline import Pipeline, build_neighbours
from hpctrain.plan.schedule import make_schedule
from tests.helpers.ranks import run_ranks

SHAPE = (1, 128, 256)  # of what travels between stages: 128 KiB


class _Sleep(torch.autograd.Function):
    """Hands on what it gets, after a while, both ways."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return gradients[0], None, None


class SleepingStage(nn.Module):
    """A stage of a decoder, as the pipeline sees it."""

    def __init__(self, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(SHAPE))  # the first stage's input has no gradient
        self.forward_s, self.backward_s = forward_s, backward_s

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Sleep.apply(x + self.weight, self.forward_s, self.backward_s)
        return y


@dataclass(frozen=True)
class _Microbatch:
    token_BL: Tensor


def measure_pipeline(
    schedule: str,
    pp: int,
    num_microbatches: int,
    *,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    tries: int = 3,
) -> tuple[float, float]:
    """Seconds of a step, and of a message between two ranks: the best of a few tries of each.

    Args:
        forward_s: how long each stage sleeps for a microbatch; stage `s` is on rank `s % pp`.
    """
    arguments = (schedule, num_microbatches, forward_s, backward_s, tries)
    steps_s, sends_s = zip(*run_ranks(pp, _run, *arguments, timeout_s=300), strict=True)
    return max(steps_s), max(sends_s)


def _run(
    rank: int,
    pp: int,
    schedule: str,
    count: int,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    tries: int,
) -> tuple[float, float]:
    num_stages = len(forward_s)
    stages: dict[int, nn.Module] = {
        stage: SleepingStage(forward_s[stage], backward_s[stage]) for stage in range(rank, num_stages, pp)
    }
    neighbours = build_neighbours(
        [list(range(pp))], rank, goes_round=num_stages > pp, timeout=timedelta(minutes=5)
    )
    pipeline = Pipeline(stages, num_stages, neighbours, lambda: torch.empty(SHAPE), torch.device("cpu"))
    actions = make_schedule(Schedule[schedule], pp, num_stages // pp, count)
    microbatches = [_Microbatch(torch.zeros(SHAPE)) for _ in range(count)]
    pipeline.connect()
    times = []
    for _ in range(tries):
        dist.barrier()
        start = time.perf_counter()
        pipeline.run(actions, microbatches, lambda batch: {}, lambda y: y.sum())
        slowest = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        times.append(float(slowest))
    return min(times), _message_s(rank)


def _message_s(rank: int) -> float:
    """Of a message between the first two ranks, on an average of a few there and back."""
    buffer, count = torch.zeros(SHAPE), 20
    start = time.perf_counter()
    for _ in range(count):
        if rank == 0:
            dist.send(buffer, 1)
            dist.recv(buffer, 1)
        elif rank == 1:
            dist.recv(buffer, 0)
            dist.send(buffer, 0)
    return (time.perf_counter() - start) / (2 * count)
