"""Which CPUs a rank runs on: those of its GPU's NUMA node, because what it sends to the GPU then crosses no
socket. The kernel's documentation of sysfs: ABI/testing/sysfs-bus-pci, ABI/stable/sysfs-devices-node."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

SYSFS = Path("/sys")


def pci_address(domain: int, bus: int, device: int) -> str:
    """A device's name under /sys/bus/pci/devices. A GPU is function 0."""
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"


def parse_cpulist(text: str) -> set[int]:
    """CPUs of a list such as `0-3,8`."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus


def cpus_near(address: str, sysfs: Path = SYSFS) -> set[int]:
    """CPUs of the NUMA node of a PCI device; none where the kernel does not say (node -1)."""
    try:
        node = int((sysfs / "bus/pci/devices" / address / "numa_node").read_text())
        return parse_cpulist((sysfs / f"devices/system/node/node{node}/cpulist").read_text())
    except (OSError, ValueError):
        return set()


def bound_cpus(allowed: set[int], address: str, sysfs: Path = SYSFS) -> set[int]:
    """The CPUs to run on: those near the device of the ones that Slurm allows, or all of these."""
    return allowed & cpus_near(address, sysfs) or allowed


def bind_to_gpu(index: int) -> None:
    """Keep this process, and the loader workers it will start, on the CPUs near a GPU."""
    import torch

    facts: Any = torch.cuda.get_device_properties(index)
    address = pci_address(facts.pci_domain_id, facts.pci_bus_id, facts.pci_device_id)
    os.sched_setaffinity(0, bound_cpus(os.sched_getaffinity(0), address))
