"""What nvidia-smi says of a node's GPUs, and how they hang together. Parsers are pure functions of text."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from typing import Any

Gpu = dict[str, Any]

# Our name to nvidia-smi's (`nvidia-smi --help-query-gpu`). Where two are given, drivers differ.
_QUERIES: dict[str, tuple[str, ...]] = {
    "index": ("index",),
    "name": ("name",),
    "bus_id": ("pci.bus_id",),
    "driver": ("driver_version",),
    "memory_mib": ("memory.total",),
    "used_mib": ("memory.used",),
    "temperature_c": ("temperature.gpu",),
    "sm_mhz": ("clocks.current.sm",),
    "max_sm_mhz": ("clocks.max.sm",),
    "power_w": ("power.draw",),
    "power_limit_w": ("power.limit",),
    "pcie_gen": ("pcie.link.gen.current",),
    "max_pcie_gen": ("pcie.link.gen.max",),
    "pcie_width": ("pcie.link.width.current",),
    "max_pcie_width": ("pcie.link.width.max",),
    "ecc_uncorrected": ("ecc.errors.uncorrected.volatile.total",),
    "throttle": ("clocks_event_reasons.active", "clocks_throttle_reasons.active"),
}
_TEXTS = ("name", "bus_id", "driver")

# Bits of the clocks' event reasons (NVML, nvmlClocksEventReasons). Idle, applications' clocks, sync boost and
# display clocks are settings; the software power cap is normal under load.
SLOWDOWNS = {
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}


def _ask(*arguments: str) -> subprocess.CompletedProcess[str]:
    if shutil.which("nvidia-smi") is None:
        return subprocess.CompletedProcess(["nvidia-smi"], 127, "", "nvidia-smi is not installed")
    try:
        return subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return subprocess.CompletedProcess(["nvidia-smi"], 1, "", "nvidia-smi does not answer")


def query_gpus() -> tuple[list[Gpu], str]:
    """The GPUs that this process may see, and why there are none.

    A field that the driver does not know is asked for by its other name, else left out.
    """
    fields = {name: names[0] for name, names in _QUERIES.items()}
    while True:
        done = _ask(f"--query-gpu={','.join(fields.values())}", "--format=csv,noheader,nounits")
        refused = re.search(r'Field "([^"]+)" is not a valid field', done.stdout + done.stderr)
        if not refused:
            break
        name = next((name for name, field in fields.items() if field == refused[1]), None)
        if name is None:
            break
        others = _QUERIES[name][_QUERIES[name].index(fields[name]) + 1 :]
        if others:
            fields[name] = others[0]
        else:
            del fields[name]
    if done.returncode:
        lines = (done.stdout + done.stderr).strip().splitlines()
        return [], lines[0] if lines else f"nvidia-smi exited with {done.returncode}"
    return parse_gpus(done.stdout, list(fields)), ""


def parse_gpus(text: str, names: Sequence[str]) -> list[Gpu]:
    """Rows of `nvidia-smi --query-gpu=… --format=csv,noheader,nounits`; what a card does not tell is None."""
    gpus = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == len(names):
            gpus.append({name: _value(name, cell) for name, cell in zip(names, cells, strict=True)})
    return gpus


def _value(name: str, cell: str) -> Any:
    if cell.startswith("[") or cell in ("N/A", ""):
        return None
    if name in _TEXTS:
        return cell
    if cell.lower().startswith("0x"):
        return int(cell, 16)
    try:
        number = float(cell)
    except ValueError:
        return None
    return int(number) if number.is_integer() else number


def slowdowns(mask: int | None) -> list[str]:
    """Why the clocks are held down, of those reasons that mean trouble."""
    return [reason for bit, reason in SLOWDOWNS.items() if mask and mask & bit]


def driver_cuda() -> str | None:
    """Newest CUDA that the driver carries."""
    return parse_driver_cuda(_ask().stdout)


def parse_driver_cuda(text: str) -> str | None:
    """From the head of plain `nvidia-smi`: `CUDA Version: 13.0`."""
    found = re.search(r"CUDA (?:UMD )?Version: *([\d.]+)", text)
    return found[1] if found else None


def pcie_roots() -> list[list[int]]:
    """GPUs of the node by PCIe root; empty where nvidia-smi does not tell."""
    done = _ask("topo", "-m")
    return parse_topology(done.stdout) if done.returncode == 0 else []


def parse_topology(text: str) -> list[list[int]]:
    """Groups of GPUs between which `nvidia-smi topo -m` shows anything but SYS (across sockets)."""
    rows: dict[int, list[str]] = {}
    columns: list[int] = []
    for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines():
        words = line.split()
        if not words or not re.fullmatch(r"GPU\d+", words[0]):
            continue
        if not columns:  # the header, which begins with a GPU as the rows do
            columns = [int(word[3:]) for word in words if re.fullmatch(r"GPU\d+", word)]
        else:
            rows[int(words[0][3:])] = words[1 : 1 + len(columns)]
    groups: list[list[int]] = []
    for gpu, links in rows.items():
        near = {other for other, link in zip(columns, links, strict=False) if link not in ("SYS", "X")}
        joined = [group for group in groups if near & set(group)]
        groups = [group for group in groups if group not in joined]
        groups.append(sorted({gpu}.union(*joined)))
    return sorted(groups)
