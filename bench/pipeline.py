"""The bubble of our pipeline against (p-1)/(v·m+p-1): real ranks, real messages, stages that sleep.

A stage sleeps a known time in forward and twice that in backward instead of computing, so the schedule and
what `core.pipeline` adds to it are measured, and not this machine's cores. Of a rank's time in a step the
share in which none of its stages works is the bubble. With v stages a rank each sleeps 1/v of the time.

    python bench/pipeline.py [--rounds 5] [--forward-ms 100]
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpctrain.config.schema import Schedule
from hpctrain.core.pipeline import Pipeline, build_neighbours
from hpctrain.plan.schedule import make_schedule, simulate

SHAPE = (1, 256, 512)  # of what travels: 0.5 MB


@dataclass(frozen=True)
class Case:
    """A pipeline and its microbatches."""

    schedule: str
    pp: int
    num_microbatches: int
    stages_per_rank: int = 1

    @property
    def ideal(self) -> float:
        """Narayanan et al. 2021, section 2.2."""
        useful = self.stages_per_rank * self.num_microbatches
        return (self.pp - 1) / (useful + self.pp - 1)


CASES = [
    *(Case(name, pp, 2 * pp) for pp in (2, 4) for name in ("gpipe", "1f1b")),
    *(Case(name, pp, 4 * pp) for pp in (2, 4) for name in ("gpipe", "1f1b")),
    *(Case("interleaved_1f1b", pp, times * pp, 2) for pp in (2, 4) for times in (2, 4)),
]


class Sleep(torch.autograd.Function):
    """Hands on what it gets, after a while."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float) -> Tensor:
        ctx.backward_s = 2 * forward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.backward_s)
        return grads[0], None


class SleepingStage(nn.Module):
    """A stage of a decoder, as the pipeline sees it."""

    def __init__(self, forward_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(SHAPE))  # the first stage's input has no gradient
        self.forward_s = forward_s

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Sleep.apply(x + self.weight, self.forward_s)
        return y


@dataclass(frozen=True)
class Microbatch:
    token_BL: Tensor


def run_rank(rank: int, case: Case, folder: Path, rounds: int, forward_s: float) -> None:
    """What one of the processes does; rank 0 leaves the times of a step, one a line."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=case.pp)
    num_stages = case.pp * case.stages_per_rank
    own = range(rank, num_stages, case.pp)
    stages: dict[int, nn.Module] = {s: SleepingStage(forward_s / case.stages_per_rank) for s in own}
    neighbours = build_neighbours(
        [list(range(case.pp))], rank, goes_round=case.stages_per_rank > 1, timeout=timedelta(minutes=5)
    )
    pipeline = Pipeline(stages, num_stages, neighbours, lambda: torch.empty(SHAPE), torch.device("cpu"))
    schedule = make_schedule(Schedule[case.schedule], case.pp, case.stages_per_rank, case.num_microbatches)
    microbatches = [Microbatch(torch.zeros(SHAPE)) for _ in range(case.num_microbatches)]
    times_s = []
    for _ in range(rounds + 1):
        dist.barrier()
        start = time.perf_counter()
        pipeline.run(schedule, microbatches, lambda batch: {}, lambda y: y.sum())
        slowest = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        times_s.append(float(slowest))
    if rank == 0:
        (folder / "times").write_text("\n".join(map(str, times_s[1:])))
    dist.destroy_process_group()


def measure(case: Case, rounds: int, forward_s: float) -> list[float]:
    """The bubble of each round."""
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="hpctrain-bench-") as name:
        arguments = (case, Path(name), rounds, forward_s)
        ranks = [fork.Process(target=run_rank, args=(rank, *arguments)) for rank in range(case.pp)]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join()
            if each.exitcode:
                raise SystemExit("a rank failed")
        times_s = [float(line) for line in (Path(name) / "times").read_text().split()]
    busy_s = case.num_microbatches * 3 * forward_s
    return [1 - busy_s / each for each in times_s]


def planned(case: Case) -> float:
    """What the plan says of it."""
    schedule = make_schedule(Schedule[case.schedule], case.pp, case.stages_per_rank, case.num_microbatches)
    num_stages = case.pp * case.stages_per_rank
    return simulate(schedule, [1.0] * num_stages, [2.0] * num_stages).bubble


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--forward-ms", type=float, default=100.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"torch {torch.__version__}, medians of {options.rounds} steps, forward {options.forward_ms:g} ms\n"
    )
    print("| schedule | p | m | v | bubble | lowest … highest | planned | (p-1)/(v·m+p-1) |")
    print("|---|---|---|---|---|---|---|---|")
    over = {}
    for case in CASES:
        bubbles = measure(case, options.rounds, options.forward_ms / 1000)
        middle = statistics.median(bubbles)
        over[case] = middle - case.ideal
        spread = f"{min(bubbles):.1%} … {max(bubbles):.1%}"
        start = [case.schedule, case.pp, case.num_microbatches, case.stages_per_rank]
        row = [*start, f"{middle:.1%}", spread, f"{planned(case):.1%}", f"{case.ideal:.1%}"]
        print(f"| {' | '.join(map(str, row))} |", flush=True)
    worst = max(over, key=lambda case: over[case])
    print(f"\nmost above the formula: {over[worst]:.2%} of a step ({worst.schedule}, p {worst.pp})")


if __name__ == "__main__":
    main()
