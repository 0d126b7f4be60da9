"""What the plan says of links, schedules and steps, and what is measured here.

Links are rate-limited ones between network namespaces (root and iproute2 are needed), stages of schedules
sleep, and steps compute for real, at one and two ranks, after `hpctrain calibrate` with two ranks on the same
machine. Of steps the plan's range is shown too.

    python bench/planner_measured.py [links] [schedules] [steps] [--rounds 2]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from hpctrain.cli import compose  # noqa: E402
from hpctrain.config.schema import Schedule  # noqa: E402
from hpctrain.plan.bubble import pipeline_s  # noqa: E402
from hpctrain.plan.collectives import Group, send_s  # noqa: E402
from hpctrain.plan.plan import make_plan  # noqa: E402
from hpctrain.plan.schedule import make_schedule, simulate  # noqa: E402

SKIPPED = 5  # first steps, which open connections and choose kernels


@dataclass(frozen=True)
class Case:
    """A model and a layout on this machine."""

    name: str
    ranks: int
    overrides: list[str]

    def arguments(self, folder: Path) -> list[str]:
        data = folder / ("faces" if "vision" in self.overrides[0] else "calls")
        shape = [f"data.root={data}", f"cluster.ranks_per_node={self.ranks}", "plan.force=true"]
        rest = ["data.num_workers=0", "log_every_steps=1", "eval_every_epochs=0", "checkpoint.every_steps=0"]
        return [*self.overrides, *shape, *rest, f"name={self.name.replace(' ', '_')}"]


DECODER = ["+exp=finance_callbot_laptop", "data.synthetic_documents=160", "model.num_hidden_layers=4"]
SMALL = ["model.hidden_size=256", "model.intermediate_size=704", "model.num_attention_heads=4"]
LARGE = ["model.hidden_size=512", "model.intermediate_size=1408", "model.num_attention_heads=8"]
HEADS = ["model.head_dim=64", "model.num_key_value_heads=2", "data.sequence_length=256"]
VISION = ["+exp=vision_city_laptop", "data.synthetic_identities=16", "model.image_size=[112,112]"]


def decoder(name: str, ranks: int, size: list[str], *layout: str) -> Case:
    batch = ["optim.global_batch_size=4", "optim.num_epochs=1", "parallelism=data_parallel"]
    return Case(name, ranks, [*DECODER, *size, *HEADS, *batch, *layout])


def vision(name: str, ranks: int, backbone: str, *more: str) -> Case:
    batch = ["optim.global_batch_size=16", "optim.num_epochs=1"]
    return Case(name, ranks, [*VISION, f"model.backbone={backbone}", *batch, *more])


CASES = [
    decoder("decoder 256", 1, SMALL),
    decoder("decoder 512", 1, LARGE),
    decoder("decoder 512 dp_replicate 2", 2, LARGE, "parallelism.dp_replicate=2"),
    decoder(
        "decoder 512 pp 2",
        2,
        LARGE,
        "parallelism.pp=2",
        "parallelism.dp_replicate=1",
        "parallelism.microbatch_size=1",
    ),
    decoder("decoder 512 tp 2", 2, LARGE, "parallelism.tp=2", "parallelism.dp_replicate=1"),
    vision("resnet10t", 1, "resnet10t"),
    vision("resnet18", 1, "resnet18"),
    vision("resnet18 dp_replicate 2", 2, "resnet18"),
]


@dataclass
class Times:
    """Of a case, in each round: what the plan said, its range, and the median of the steps."""

    planned: list[tuple[float, float, float]] = field(default_factory=list)
    measured: list[float] = field(default_factory=list)


def links() -> None:
    from tests.plan.test_links_measured import PLANNED, SIZES, measured

    print(
        "\n| collective | nodes | ranks a node | MiB | planned, ms | measured, ms | error |\n|" + "---|" * 7
    )
    for nodes, per_node, across in ((2, 1, False), (3, 1, False), (4, 1, False), (2, 2, True), (2, 2, False)):
        times, figures = measured(nodes, per_node, across)
        group = Group(nodes, 1, per_node) if across else Group(nodes * per_node, per_node, 1)
        for size in SIZES:
            for what in (*PLANNED, "send"):
                if what == "send" and per_node > 1:
                    continue
                planned = (
                    send_s(size, figures, between_nodes=True)
                    if what == "send"
                    else PLANNED[what](size, group, figures)
                )
                row = [what + (" at once" if across else ""), nodes, per_node, f"{size / 2**20:g}"]
                print_row([*row, *compared(planned, times[what, size])])


def schedules() -> None:
    from tests.helpers.sleeping import measure_pipeline
    from tests.plan.test_schedule_measured import CASES as PIPELINES
    from tests.plan.test_schedule_measured import UNIT_S

    print(
        "\n| schedule | p | m | stages | simulated, ms | measured, ms | error | closed form, ms |\n|"
        + "---|" * 8
    )
    for case in PIPELINES:
        schedule, pp, count, work = case.values
        forward, backward = [UNIT_S * each for each in work], [2 * UNIT_S * each for each in work]
        step, send = measure_pipeline(schedule, pp, count, forward_s=forward, backward_s=backward)
        actions = make_schedule(Schedule[schedule], pp, len(work) // pp, count)
        simulated = simulate(actions, forward, backward, send).length_s
        closed = pipeline_s(Schedule[schedule], pp, count, forward, backward, send)
        stages = " ".join(f"{each:g}" for each in work)
        print_row([schedule, pp, count, stages, *compared(simulated, step), f"{closed * 1e3:.1f}"])


def steps(rounds: int) -> None:
    times = {case.name: Times() for case in CASES}
    with tempfile.TemporaryDirectory(prefix="hpctrain-bench-") as name:
        os.environ["HOME"] = name
        os.chdir(name)
        for index in range(rounds):
            run("calibrate", f"name=calibrate-{index + 1}", "cluster.ranks_per_node=2")
            for case in CASES:
                measure(case, Path(name), index, times[case.name])
    print("\n| model and layout | ranks | planned, ms | range | measured, ms | error |\n|" + "---|" * 6)
    for case in CASES:
        for (low, mid, high), measured in zip(
            times[case.name].planned, times[case.name].measured, strict=True
        ):
            planned, told, error = compared(mid, measured)
            span = f"{low * 1e3:.0f} … {high * 1e3:.0f}"
            print_row([case.name, case.ranks, planned, span, told, error])


def measure(case: Case, folder: Path, index: int, into: Times) -> None:
    """The plan of a case with the figures that are there now, and its steps without waiting for data."""
    from hpctrain.config import hardware

    hardware._read.cache_clear()  # another process has written the file
    arguments = [*case.arguments(folder), f"run_root={folder}/round{index}"]
    (point,) = compose(arguments)
    forecast = make_plan(point.resolve()).forecast
    assert forecast is not None
    step, waiting = forecast.step_s, forecast.parts["data"]
    into.planned.append((step.low - waiting, step.mid - waiting, step.high - waiting))
    run(*arguments)
    path = folder / f"round{index}" / case.name.replace(" ", "_") / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    batch = forecast.samples_per_step
    seconds = [
        batch / record["samples_per_s"] * (1 - record["data_wait"])
        for record in records
        if record["kind"] == "train" and SKIPPED < record["step"] < record["num_steps"]
    ]
    into.measured.append(statistics.median(seconds))


def run(*arguments: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "hpctrain", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)}\n{done.stdout}{done.stderr}")


def compared(planned_s: float, measured_s: float) -> list[str]:
    return [f"{planned_s * 1e3:.1f}", f"{measured_s * 1e3:.1f}", f"{planned_s / measured_s - 1:+.1%}"]


def print_row(cells: list[object]) -> None:
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", default=["links", "schedules", "steps"])
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    for part in options.parts:
        if part == "steps":
            steps(options.rounds)
        else:
            {"links": links, "schedules": schedules}[part]()


if __name__ == "__main__":
    main()
