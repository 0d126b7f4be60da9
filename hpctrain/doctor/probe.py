"""What runs on each node for `doctor` and `preflight`: one process, standard library only.

    python -m hpctrain.doctor.probe facts FOLDER   what the node has
    python -m hpctrain.doctor.probe check FOLDER   that, and whether GPUs, disks and CPUs work
    python -m hpctrain.doctor.probe links FOLDER   bandwidth to neighbours, as FOLDER/nodes.json lists them

Answers are FOLDER/<node>.<verb>.json, written whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpctrain.doctor import counters, gpus, links, matmul
from hpctrain.doctor.node_facts import GB, Facts, node_facts
from hpctrain.launch import network
from hpctrain.launch.environment import node_name
from hpctrain.run.directory import write_json

DISK_BYTES = 32 * 2**20
LINK_S = 1.0
BUSY_AFTER_S = 1.0  # clocks and links need it to wake up
START_S = 180.0  # torch loads from NFS, on all nodes at once
MATMUL_S = 60.0  # of the products, from then on


def answer_path(folder: Path, node: str, verb: str) -> Path:
    return folder / f"{node}.{verb}.json"


def facts(folder: Path) -> Facts:
    """What the node has, and a port on which it can be reached."""
    return {**node_facts(folder), "port": network.free_port()}


def check(folder: Path) -> Facts:
    """Facts, and what came of trying them."""
    found = facts(folder)
    found["cpu"] = matmul.check_cpu()
    found["disks"] = [{"what": "run folder", **try_disk(folder, times=2)}]
    found["disks"] += [{"what": "scratch", **try_disk(Path(each["path"]))} for each in found["scratch"][:2]]
    request = folder / "request.json"
    if found["gpus"] and request.exists() and json.loads(request.read_text())["device"] == "cuda":
        found["matmul"], found["busy_gpus"] = try_gpus()
    return found


def try_disk(folder: Path, times: int = 1) -> Facts:
    """Write random bytes, sync them, read them back past the page cache; GB/s, the best of all times."""
    data = os.urandom(2**20) * (DISK_BYTES // 2**20)
    path = folder / f".hpctrain_probe_{node_name()}_{os.getpid()}"
    facts: Facts = {"path": str(folder), "error": None, "write_gbps": None, "read_gbps": None}
    try:
        for _ in range(times):
            facts["write_gbps"] = max(facts["write_gbps"] or 0.0, _write(path, data))
            begun = time.perf_counter()
            back = path.read_bytes()
            speed = round(len(back) / (time.perf_counter() - begun) / GB, 3)
            facts["read_gbps"] = max(facts["read_gbps"] or 0.0, speed)
            if hashlib.sha256(back).digest() != hashlib.sha256(data).digest():
                facts["error"] = "what was read is not what was written"
    except OSError as error:
        facts["error"] = str(error)
    finally:
        path.unlink(missing_ok=True)
    return facts


def _write(path: Path, data: bytes) -> float:
    """GB/s to storage; what is read next does not come from the page cache."""
    begun = time.perf_counter()
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with os.fdopen(os.dup(descriptor), "wb") as handle:
            handle.write(data)
        os.fsync(descriptor)
        seconds = time.perf_counter() - begun
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
    return round(len(data) / seconds / GB, 3)


def try_gpus() -> tuple[Facts, list[Any]]:
    """Products on all GPUs, and what nvidia-smi says while they are at it: an idle link slows down."""
    # Not through pipes: they fill up, and stay open while the driver holds a process that was killed.
    out, err = os.memfd_create("out"), os.memfd_create("err")
    try:
        child = subprocess.Popen([sys.executable, "-m", "hpctrain.doctor.matmul"], stdout=out, stderr=err)
        late = time.monotonic() + START_S
        while "busy" not in said(out) and child.poll() is None and time.monotonic() < late:
            time.sleep(0.05)
        is_busy = "busy" in said(out)
        if not is_busy and child.poll() is None:
            what = (said(out) or ["torch"])[-1]
            end(child)
            return {"error": f"{what} did not start within {START_S:g} s", "gpus": []}, []
        time.sleep(BUSY_AFTER_S if is_busy else 0.0)
        busy = gpus.query_gpus()[0] if is_busy else []
        try:
            child.wait(timeout=MATMUL_S)
        except subprocess.TimeoutExpired:
            end(child)
            return {"error": f"no answer within {MATMUL_S:g} s", "gpus": []}, busy
        if child.returncode or not is_busy:
            return {"error": (said(err) or ["torch finds no GPU"])[-1], "gpus": []}, busy
        return {"error": None, "gpus": json.loads(said(out)[-1])}, busy
    finally:
        os.close(out)
        os.close(err)


def said(file: int) -> list[str]:
    """Lines that another process has written so far."""
    return os.pread(file, os.fstat(file).st_size, 0).decode(errors="replace").strip().splitlines()


def end(child: subprocess.Popen[bytes]) -> None:
    """Kill it, and do not wait for one that cannot die."""
    child.kill()
    with suppress(subprocess.TimeoutExpired):
        child.wait(timeout=5)


def measure(folder: Path) -> Facts:
    """Links to the neighbours, and what the counters of this node said meanwhile."""
    request = json.loads((folder / "nodes.json").read_text())
    before = counters.read_counters(request["interface"])
    found = links.measure_links(request["nodes"], node_name(), request.get("seconds", LINK_S))
    after = counters.read_counters(request["interface"])
    return {"links": found, "counters": sorted(before), "moved": counters.moved(before, after)}


def main(argv: list[str]) -> int:
    verb, folder = argv[0], Path(argv[1])
    answer = {"facts": facts, "check": check, "links": measure}[verb](folder)
    write_json(answer_path(folder, node_name(), verb), answer)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
