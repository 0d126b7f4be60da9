"""What a node has, read on the node itself: software, memory, network, storage. Standard library only."""

from __future__ import annotations

import fcntl
import os
import platform
import re
import resource
import shutil
import socket
import struct
import subprocess
from pathlib import Path
from typing import Any

from hpctrain.doctor import gpus
from hpctrain.doctor.drivers import installed_torch

Facts = dict[str, Any]
GB = 1e9

_SYS = Path("/sys")
# Where sites put a node's own disk, besides what the job's environment names.
_SCRATCH = (
    *("/local", "/scratch", "/localscratch", "/local_scratch", "/mnt/local", "/mnt/nvme", "/nvme", "/raid"),
    *("/data/local", "/tmp"),
)
_SCRATCH_VARIABLES = ("SCRATCH", "TMPDIR", "LOCAL_SCRATCH", "JOBSCRATCH")
_REMOTE = ("nfs", "nfs4", "lustre", "beegfs", "gpfs", "ceph", "fuse", "cifs", "9p", "glusterfs", "wekafs")


def node_facts(run_folder: Path) -> Facts:
    """All of it, for the node this runs on.

    Args:
        run_folder: a folder of the file system that runs are written to.
    """
    found, why = gpus.query_gpus()
    torch = installed_torch()
    lock, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return {
        "hostname": socket.gethostname(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpus": found,
        "no_gpus": why,
        "driver": next((gpu.get("driver") for gpu in found), None),
        "driver_cuda": gpus.driver_cuda() if found else None,
        "pcie_roots": gpus.pcie_roots() if found else [],
        "torch": {"version": torch.version, "cuda": torch.cuda} if torch else None,
        "nics": network_cards(),
        "rdma": rdma_ports(),
        "memlock_bytes": None if lock == resource.RLIM_INFINITY else lock,
        "shm_gib": gib_free(Path("/dev/shm"))[1],
        "scratch": scratch_folders(),
        "run_folder": {**file_system(run_folder), "quota": quota(run_folder)},
    }


def network_cards(root: Path = _SYS) -> list[Facts]:
    """Interfaces with their speed (Gb/s; None where the driver does not say) and IPv4 address."""
    cards = []
    for path in sorted((root / "class/net").glob("*")):
        speed = read(path / "speed")
        cards.append(
            {
                "name": path.name,
                "is_up": read(path / "operstate") == "up",
                "is_virtual": "/virtual/" in str(path.resolve()),
                "speed_gbit": int(speed) / 1000 if speed.isdigit() and int(speed) else None,
                "address": interface_address(path.name),
                "mtu": int(read(path / "mtu") or 0),
            }
        )
    return cards


def interface_address(name: str) -> str | None:
    """The IPv4 address of an interface of this host."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:  # SIOCGIFADDR
            reply = fcntl.ioctl(probe.fileno(), 0x8915, struct.pack("256s", name[:15].encode()))
        except OSError:
            return None
    return socket.inet_ntoa(reply[20:24])


def rdma_ports(root: Path = _SYS) -> list[Facts]:
    """Ports of RDMA devices with their GIDs: NCCL_IB_GID_INDEX is the index of a RoCE v2 entry with IPv4."""
    ports = []
    for path in sorted((root / "class/infiniband").glob("*/ports/*")):
        gids = []
        for entry in sorted((path / "gids").glob("*"), key=lambda p: int(p.name)):
            gid, kind = read(entry), read(path / "gid_attrs/types" / entry.name)
            if gid.strip("0:"):
                device = read(path / "gid_attrs/ndevs" / entry.name)
                gids.append({"index": int(entry.name), "gid": gid, "type": kind, "interface": device})
        ports.append(
            {
                "device": path.parent.parent.name,
                "port": int(path.name),
                "state": read(path / "state").partition(": ")[2],
                "rate": read(path / "rate"),
                "layer": read(path / "link_layer"),
                "gids": gids,
            }
        )
    return ports


def gid_index(ports: list[Facts]) -> int | None:
    """The GID index for RoCE v2 over IPv4, if all active ports have the same."""
    mapped = "0000:0000:0000:0000:0000:ffff:"
    found = {
        next((g["index"] for g in port["gids"] if "v2" in g["type"] and g["gid"].startswith(mapped)), None)
        for port in ports
        if port["layer"] == "Ethernet" and port["state"] == "ACTIVE"
    }
    return found.pop() if len(found) == 1 else None


def scratch_folders() -> list[Facts]:
    """Folders on the node's own disks that we may write to, roomiest first."""
    named = [os.environ.get(name, "") for name in _SCRATCH_VARIABLES]
    found: dict[int, Facts] = {}
    for text in [*named, *_SCRATCH]:
        path = Path(text)
        if not text or not path.is_dir() or not os.access(path, os.W_OK):
            continue
        facts = file_system(path)
        if not str(facts["type"]).startswith(_REMOTE):
            found.setdefault(path.stat().st_dev, facts)
    return sorted(found.values(), key=lambda facts: -facts["free_gib"])


def file_system(path: Path) -> Facts:
    """Kind, free space and size of the file system that a path is on."""
    while not path.exists():
        path = path.parent
    free, size = gib_free(path)
    return {"path": str(path), "type": mount_type(path), "free_gib": free, "size_gib": size}


def gib_free(path: Path) -> tuple[float, float]:
    """Free to us and in all, GiB."""
    stat = os.statvfs(path)
    return round(stat.f_bavail * stat.f_frsize / 2**30, 2), round(stat.f_blocks * stat.f_frsize / 2**30, 2)


def mount_type(path: Path, mounts: str | None = None) -> str:
    """Kind of file system, from /proc/self/mounts: the longest mount point above the path."""
    text = Path("/proc/self/mounts").read_text() if mounts is None else mounts
    best, kind = "", "unknown"
    real = str(path.resolve()) + "/"
    for line in text.splitlines():
        words = line.split()
        if len(words) < 3:
            continue
        point = re.sub(r"\\(\d{3})", lambda m: chr(int(m[1], 8)), words[1])
        if real.startswith(point.rstrip("/") + "/") and len(point) >= len(best):
            best, kind = point, words[2]
    return kind


def quota(path: Path) -> str | None:
    """What the file system's own program says of our quota there; None if there is none to ask."""
    kind = mount_type(path)
    user = str(os.getuid())
    asks = {"lustre": ["lfs", "quota", "-h", "-u", user, str(path)], "beegfs": ["beegfs-ctl", "--getquota"]}
    argv = asks.get(kind, ["quota", "--no-wrap", "--human-readable"])
    if shutil.which(argv[0]) is None:
        return None
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip()[:2000] or None


def read(path: Path) -> str:
    """Its text without blanks around it; empty where it cannot be read."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""
