"""What the ranks of `hpctrain calibrate` do in place of training: one measurement after the other."""

from __future__ import annotations

import os
from datetime import date
from pathlib import Path
from typing import Any

import torch

from hpctrain.config.schema import Config, Precision
from hpctrain.core.measure import Bench, StoppedError, measure_links, measure_overlap, open_bench
from hpctrain.core.measure_device import measure_layers, measure_memory, measure_products
from hpctrain.core.measure_storage import measure_decoding, measure_storage
from hpctrain.core.mesh import Mesh
from hpctrain.core.stop import SignalFlag
from hpctrain.plan.calibration import Calibration
from hpctrain.run.causes import CauseKind
from hpctrain.run.directory import RunDirectory, write_json

GIB = 1024**3


def calibrate(config: Config, run: RunDirectory, attempt: str, mesh: Mesh, flag: SignalFlag) -> CauseKind:
    """Measure everything and leave `calibration.json` in the run directory. Collective over the world.

    Returns `done`, or the reason why all ranks agreed to stop; then nothing is kept, and the next start
    begins anew.
    """
    place = describe(config, attempt, mesh)  # before buffers take their share of the memory
    bench = open_bench(config, mesh, flag)
    try:
        for what, measure in (
            ("products", measure_products),
            ("layers", measure_layers),
            ("memory", measure_memory),
            ("links", measure_links),
            ("overlap", measure_overlap),
        ):
            _say(mesh, what)
            measure(bench)
        _say(mesh, "storage")
        measure_storage(bench, run.path, Path(config.data.root))
        _say(mesh, "decoding")
        _decode_on_one_core(bench)
    except StoppedError as stop:
        return stop.reason
    if mesh.rank == 0:
        write_json(run.calibration, Calibration(place, bench.rows).to_dict())
    return CauseKind.done


def _say(mesh: Mesh, what: str) -> None:
    if mesh.rank == 0:
        print(f"measuring {what}", flush=True)


def _decode_on_one_core(bench: Bench) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as a loader worker has
    try:
        measure_decoding(bench)
    finally:
        torch.set_num_threads(threads)


def describe(config: Config, attempt: str, mesh: Mesh) -> dict[str, Any]:
    """Where this is: what sources of figures say, and what needs no timing. Ranks on a CPU have no memory of
    their own: what others leave of their host's changes from minute to minute."""
    job, device, memory = attempt.partition("_")[0], "CPU", {}
    if mesh.device.type == "cuda":
        device = torch.cuda.get_device_name(mesh.device)
        free, total = torch.cuda.mem_get_info(mesh.device)
        usable = free + torch.cuda.memory_reserved(mesh.device)
        memory = {"memory_gib": total / GIB, "usable_gib": usable / GIB}
    return {
        "date": date.today().isoformat(),
        "job": None if job == "local" else job,
        "nodes": config.cluster.num_nodes,
        "ranks_per_node": config.cluster.ranks_per_node,
        "torch": torch.__version__,
        "device": device,
        "precision": config.optim.precision.name,
        "peak": "fp32_tflops" if config.optim.precision is Precision.fp32 else "bf16_tflops",
        "cores": len(os.sched_getaffinity(0)),
        **memory,
        "host_memory_gib": host_memory_bytes() / GIB,
    }


def host_memory_bytes() -> int:
    """Memory of this host."""
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    return next(int(words[1]) for words in lines if words[0] == "MemTotal:") * 1024
