"""How long the command line takes, from typing to the answer, and what a login node imports for it.

Each command is a process of its own, started anew; repetitions are interleaved. The submission is measured
against a pretended Slurm of this machine (jobs are held, so that nothing else runs) and against an `sbatch`
that answers at once: the difference is Slurm's.

    python bench/submit.py [--repetitions 9] [--without-slurm]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HPCTRAIN = [sys.executable, "-m", "hpctrain"]
EXPERIMENT = ["+exp=vision_city_laptop", "cluster=sandbox"]
HELD = ["+cluster.extra_sbatch.hold=''"]
PLANNED = "submit vision_city with its forecast, to that sbatch"
SUBMIT, STUB = "submit, to Slurm", "submit, to an sbatch that answers at once"
AIM_S = 1.5
HEAVY = ("torch", "torchvision", "timm", "numpy", "pandas", "scipy", "tensorboard")


@dataclass(frozen=True)
class Command:
    """What is typed, and the exit code that belongs to it."""

    argv: list[str]
    code: int = 0
    env: dict[str, str] = field(default_factory=dict)
    names_run: bool = False  # a run of its own each time: a second submission would resume the first


def make_city(folder: Path) -> list[str]:
    """vision_city on a folder that says it holds 20 million images, which the plan reads."""
    root = folder / "city"
    (root / "train").mkdir(parents=True)
    meta = {"num_samples": 20_000_000, "identities": [], "shards": [{"size_bytes": 1_200_000_000_000}]}
    (root / "train" / "meta.json").write_text(json.dumps(meta))
    return ["+exp=vision_city", f"data.root={root}", "plan.force=true"]


def make_commands(stub: Path, slurm: dict[str, str] | None) -> dict[str, Command]:
    stubbed = {"PATH": f"{stub}{os.pathsep}{os.environ['PATH']}"}
    commands = {
        "python -c pass": Command([sys.executable, "-c", "pass"]),
        "--help": Command([*HPCTRAIN, "--help"]),
        "refused: an unknown key": Command([*HPCTRAIN, *EXPERIMENT, "optim.learning_rate=1"], code=2),
        "plan": Command([*HPCTRAIN, "plan", *EXPERIMENT]),
        STUB: Command([*HPCTRAIN, *EXPERIMENT, *HELD], env=stubbed, names_run=True),
        PLANNED: Command([*HPCTRAIN, *make_city(stub)], env=stubbed, names_run=True),
    }
    if slurm is not None:
        commands["sbatch alone"] = Command(
            ["sbatch", "--hold", "-o", "/dev/null", "--wrap", "true"], env=slurm
        )
        commands[SUBMIT] = Command([*HPCTRAIN, *EXPERIMENT, *HELD], env=slurm, names_run=True)
    return commands


def children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run(command: Command, folder: Path, number: int) -> tuple[float, float]:
    """Seconds until the command has ended, and seconds of CPU that it took."""
    argv = [*command.argv, f"name=run{number}"] if command.names_run else command.argv
    env = {**os.environ, **command.env}
    start, start_cpu = time.perf_counter(), children_cpu_s()
    done = subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True)
    seconds, cpu_s = time.perf_counter() - start, children_cpu_s() - start_cpu
    if done.returncode != command.code:
        raise SystemExit(f"{argv} exited with {done.returncode}\n{done.stdout}{done.stderr}")
    return seconds, cpu_s


Times = dict[str, list[tuple[float, float]]]


def measure(commands: dict[str, Command], folder: Path, repetitions: int) -> Times:
    """Both times of every repetition; each round runs all, in turn, after one to warm up."""
    times_s: Times = {name: [] for name in commands}
    numbers = count()
    for repetition in range(repetitions + 1):
        for name, command in commands.items():
            both = run(command, folder, next(numbers))
            if repetition:
                times_s[name].append(both)
    return times_s


def read_imports(command: Command, folder: Path) -> tuple[int, dict[str, float]]:
    """Number of modules that a submission imports, and ms by top-level package (each module's own time)."""
    argv = [sys.executable, "-X", "importtime", *command.argv[1:], "name=imports"]
    env = {**os.environ, **command.env}
    done = subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True)
    lines = re.findall(r"^import time:\s+(\d+) \|\s+\d+ \|\s+(\S+)$", done.stderr, re.MULTILINE)
    costs: defaultdict[str, float] = defaultdict(float)
    for microseconds, module in lines:
        costs[module.partition(".")[0]] += int(microseconds) / 1000
    return len(lines), costs


def start_slurm(folder: Path) -> dict[str, str]:
    """The pretended cluster of `make sandbox`; returns the variables that lead to it."""
    argv = [sys.executable, "-m", "tests.helpers.sandbox", "start", str(folder)]
    said = subprocess.run(argv, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    return dict(re.findall(r"^export (\w+)=(.*)$", said, re.MULTILINE))


def stop_slurm(folder: Path) -> None:
    subprocess.run([sys.executable, "-m", "tests.helpers.sandbox", "stop", str(folder)], cwd=ROOT, check=True)


def make_stub(folder: Path) -> Path:
    folder.mkdir()
    stub = folder / "sbatch"
    stub.write_text("#!/bin/sh\necho Submitted batch job 1\n")
    stub.chmod(0o755)
    return folder


def machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "?")
    return f"{model}, {len(os.sched_getaffinity(0))} cores, Python {platform.python_version()}"


def report(times_s: Times, num_modules: int, costs: dict[str, float]) -> None:
    print("| command | s | lowest … highest | CPU s |\n|---|---|---|---|")
    medians: dict[str, float] = {}
    for name, both in times_s.items():
        values, cpu_s = zip(*both, strict=True)
        medians[name] = statistics.median(values)
        spread = f"{min(values):.2f} … {max(values):.2f}"
        print(f"| {name} | {medians[name]:.2f} | {spread} | {statistics.median(cpu_s):.2f} |")
    print(f"\na submission imports {num_modules} modules; the most expensive packages (ms, each with its own")
    print("modules only, measured by -X importtime, which costs time itself):")
    dearest = sorted(costs.items(), key=lambda item: -item[1])[:8]
    print(", ".join(f"{name} {ms:.0f}" for name, ms in dearest))
    found = [name for name in HEAVY if name in costs]
    print(f"of {', '.join(HEAVY)} it imports: {', '.join(found) or 'none'}")
    for name in (STUB, PLANNED, SUBMIT):
        if name in medians:
            print(f"{name}: {medians[name] / AIM_S:.2f} of the aim of {AIM_S} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--without-slurm", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hpctrain-bench-") as name:
        folder, cluster = Path(name) / "work", Path(name) / "slurm"
        folder.mkdir()
        stub = make_stub(Path(name) / "bin")
        try:
            slurm = None if options.without_slurm else start_slurm(cluster)
            commands = make_commands(stub, slurm)
            times_s = measure(commands, folder, options.repetitions)
        finally:
            if not options.without_slurm:
                stop_slurm(cluster)
        num_modules, costs = read_imports(commands[STUB], folder)
    print(machine())
    print(f"medians of {options.repetitions} interleaved repetitions\n")
    report(times_s, num_modules, costs)


if __name__ == "__main__":
    main()
