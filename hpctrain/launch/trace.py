"""`plan --trace`: a step of the real code at a few places of the pipeline, beside the closed form.

Each place is traced in a process of its own, two at a time: torch stays out of this one.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpctrain import slurm
from hpctrain.config.load import save_config
from hpctrain.config.schema import Config, Device, GpuRequest, VisionConfig
from hpctrain.errors import ConfigError, RunError
from hpctrain.launch.script import check_options, check_sbatch, last_words, send_function
from hpctrain.launch.snapshot import package_root
from hpctrain.plan.backbones import BackboneCosts, cache_path, read_costs, write_costs
from hpctrain.plan.fit import fit
from hpctrain.plan.memory import GIB, RankMemory, fullest
from hpctrain.plan.plan import RunPlan

AT_ONCE = 2
PLACE_S = 1800.0  # a place of a large model takes a minute
JOB_MIN, JOB_GIB, JOB_CPUS = 60, 4, 2
LOOK_S = 3.0  # between two looks at the queue

Result = dict[str, Any]


def trace_report(config: Config, plan: RunPlan, *, as_json: bool, on_slurm: bool = False) -> int:
    """Trace the first, the fullest and the last place, and print what came out; returns 0.

    Args:
        on_slurm: in a small job without GPUs, for login nodes that end long processes.

    Raises:
        HpctrainError: the trace is not possible, or failed.
    """
    Path(config.run_root).mkdir(parents=True, exist_ok=True)
    where = Path(config.run_root).absolute() if on_slurm else None  # which the compute nodes see
    with tempfile.TemporaryDirectory(prefix="trace-", dir=where) as name:
        folder = Path(name)
        write_inputs(config, plan, folder)
        if on_slurm:
            run_as_job(config, folder)
        else:
            carry_out(name)
        results = read_results(plan, folder)
    memory = plan.memory or keep_costs(config, plan, results)
    rows = [make_row(plan, memory, result) for result in results]
    print(json.dumps({"trace": rows}) if as_json else "\n".join(lines(rows)))
    return 0


def places_of(plan: RunPlan) -> list[int]:
    """First, fullest and last place of the pipeline."""
    full = fullest(plan.memory) if plan.memory else 0
    return sorted({0, full, plan.layout.pp - 1})


def write_inputs(config: Config, plan: RunPlan, folder: Path) -> None:
    """What the processes that trace read."""
    save_config(config, folder / "config.yaml")
    (folder / "plan.json").write_text(plan.to_json())


def carry_out(folder: str) -> None:
    """Trace every place of the plan in `folder`. Raises RunError."""
    plan = RunPlan.from_json((Path(folder) / "plan.json").read_text())
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(lambda place: _trace(Path(folder), place), places_of(plan)))


def _trace(folder: Path, place: int) -> None:
    path = os.pathsep.join(filter(None, [str(package_root()), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        [sys.executable, "-m", "hpctrain.launch.trace_place", str(folder), str(place)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=PLACE_S,
    )
    if done.returncode:
        said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise RunError(f"trace place {place} of the pipeline", said, "report it; plan without --trace")


def read_results(plan: RunPlan, folder: Path) -> list[Result]:
    """What the places found. Raises ConfigError where one cannot be traced, RunError where one is missing."""
    results = []
    for place in places_of(plan):
        path = folder / f"place_{place}.json"
        if not path.exists():
            raise RunError(f"trace place {place} of the pipeline", f"it left no result: {last_words(folder)}")
        result: Result = json.loads(path.read_text())
        if "error" in result:
            raise ConfigError(*result["error"])
        results.append(result)
    return results


def run_as_job(config: Config, folder: Path) -> None:
    """Send a job of one node, two cores and no GPU, and wait; Ctrl-C cancels it."""
    check_options(config.cluster)
    check_sbatch()
    job_config = copy.deepcopy(config)
    job_config.name = "trace"
    job_config.cluster = replace(
        job_config.cluster,
        num_nodes=1,
        ranks_per_node=1,
        cpus_per_rank=JOB_CPUS,
        mem_gib=JOB_GIB,
        time_limit_min=min(config.cluster.time_limit_min or JOB_MIN, JOB_MIN),
        device=Device.cpu,
        gpu_request=GpuRequest.none,
        exclusive=False,
    )
    job = send_function(job_config, folder, carry_out)
    print(f"job {job} traces", file=sys.stderr, flush=True)
    try:
        while slurm.is_alive(job):
            time.sleep(LOOK_S)
    except KeyboardInterrupt:
        slurm.cancel(job)
        raise


def keep_costs(config: Config, plan: RunPlan, results: list[Result]) -> tuple[RankMemory, ...]:
    """Put a measured backbone into the user's cache, which later plans read; returns what it makes known."""
    measured, model = results[0]["costs"], config.model
    if measured is None or not isinstance(model, VisionConfig):
        return ()
    table, (height, width) = read_costs(cache_path()), model.image_size
    table.setdefault(model.backbone.partition(".")[0], {})[height, width] = BackboneCosts(**measured)
    write_costs(cache_path(), table)
    print(f"{model.backbone} at {height}×{width}: measured, kept in {cache_path()}", file=sys.stderr)
    return fit(config, plan.layout, plan.batch, plan.num_identities).memory


def make_row(plan: RunPlan, memory: tuple[RankMemory, ...], result: Result) -> dict[str, Any]:
    """A place's result beside the closed form."""
    place = result["place"]
    closed = memory[place].tensors if memory else None
    return {
        "place": place,
        "blocks": sum(end - first for first, end in plan.stages[place :: plan.layout.pp]),
        "traced_bytes": result["peak_bytes"],
        "closed_form_bytes": closed,
        "difference": None if closed is None else closed / result["peak_bytes"] - 1,
        "total_bytes": memory[place].total if memory else None,
        "collectives": result["collectives"],
        "seconds": result["seconds"],
    }


def lines(rows: list[dict[str, Any]]) -> list[str]:
    """The rows for a terminal."""
    out = [
        "",
        "traced step    peak of tensors, GiB      closed form      difference   with NCCL and allocator",
    ]
    for row in rows:
        blocks = f", {row['blocks']} blocks" if row["blocks"] else ""
        name = f"pp={row['place']}{blocks}"
        if row["closed_form_bytes"] is None:
            out.append(f"{name:<15}{row['traced_bytes'] / GIB:>20.2f}{'unknown':>17}")
            continue
        out.append(
            f"{name:<15}{row['traced_bytes'] / GIB:>20.2f}{row['closed_form_bytes'] / GIB:>17.2f}"
            f"{row['difference']:>16.1%}{row['total_bytes'] / GIB:>26.2f}"
        )
    out += ["", "collectives of a step      axis          kind              count          GB"]
    for row in rows:
        for index, each in enumerate(row["collectives"]):
            name = f"pp={row['place']}" if index == 0 else ""
            out.append(
                f"{name:<27}{each['axis']:<14}{each['kind']:<15}{each['count']:>8}"
                f"{each['size_bytes'] / 1e9:>12.3f}"
            )
    return out
