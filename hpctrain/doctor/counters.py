"""Counters of lost and paused packets, of Ethernet, RoCE and TCP: what has moved while data crossed?"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from hpctrain.doctor.node_facts import read

_SYS, _PROC = Path("/sys"), Path("/proc")

# Of ethtool -S, which has hundreds: those on pauses, discards and errors.
_ETHTOOL = re.compile(r"pause|discard|drop|out_of_buffer|crc|symbol_err|cnp|ecn|(tx|rx)_err", re.IGNORECASE)
# Of the kernel's; its rx_dropped counts packets of protocols that nobody listens to as well.
_STATISTICS = {
    "rx_errors",
    "tx_errors",
    "rx_crc_errors",
    "rx_missed_errors",
    "rx_fifo_errors",
    "tx_fifo_errors",
}
# What stands for a packet that did not arrive. Pauses, marks (ECN) and CNPs are a lossless fabric at work.
_LOST = re.compile(
    r"discard|drop|out_of_buffer|out_of_sequence|packet_seq_err|ack_timeout|crc|symbol_err"
    r"|rnr_nak_retry|rcv_errors|(tx|rx)_err|missed|fifo",
    re.IGNORECASE,
)
_PAUSED = re.compile(r"pause|xmit_wait|cnp|ecn|roce_adp|slow_restart", re.IGNORECASE)


def read_counters(interface: str | None, sys_root: Path = _SYS, proc_root: Path = _PROC) -> dict[str, int]:
    """Counters by name: `<device>:<port>/<counter>` of RDMA ports, `<interface>/<counter>` of its driver and
    `<interface>/kernel.<counter>`, `tcp/retransmitted`."""
    counters = {}
    for path in sorted((sys_root / "class/infiniband").glob("*/ports/*")):
        device = f"{path.parent.parent.name}:{path.name}"
        for entry in [*(path / "hw_counters").glob("*"), *(path / "counters").glob("*")]:
            if _LOST.search(entry.name) or _PAUSED.search(entry.name):
                counters[f"{device}/{entry.name}"] = _number(entry)
    names = (
        [interface] if interface else [p.name for p in (sys_root / "class/net").glob("*") if p.name != "lo"]
    )
    for name in names:
        for entry in (sys_root / "class/net" / name / "statistics").glob("*"):
            if entry.name in _STATISTICS:
                counters[f"{name}/kernel.{entry.name}"] = _number(entry)
        for key, value in ethtool_counters(name).items():
            counters[f"{name}/{key}"] = value
    counters["tcp/retransmitted"] = retransmitted(read(proc_root / "net/snmp"))
    return counters


def ethtool_counters(interface: str) -> dict[str, int]:
    if shutil.which("ethtool") is None:
        return {}
    try:
        done = subprocess.run(["ethtool", "-S", interface], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    return parse_ethtool(done.stdout)


def parse_ethtool(text: str) -> dict[str, int]:
    """The lines of `ethtool -S` that tell of losses and pauses."""
    pairs = (line.rpartition(":")[::2] for line in text.splitlines())
    return {
        name.strip(): int(value)
        for name, value in pairs
        if _ETHTOOL.search(name) and re.fullmatch(r"\s*\d+\s*", value)
    }


def retransmitted(snmp: str) -> int:
    """TCP segments that were sent again, from /proc/net/snmp."""
    rows = [line.split() for line in snmp.splitlines() if line.startswith("Tcp:")]
    if len(rows) < 2 or "RetransSegs" not in rows[0]:
        return 0
    return int(rows[1][rows[0].index("RetransSegs")])


def moved(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """By how much each counter has grown, of those that have."""
    return {name: after[name] - value for name, value in before.items() if after.get(name, value) > value}


def is_of_card(counter: str) -> bool:
    """Whether the card itself counts: only it sees pauses, and what it threw away."""
    return not counter.rpartition("/")[2].startswith("kernel.") and not counter.startswith("tcp/")


def is_loss(counter: str) -> bool:
    """Whether a counter counts packets that did not arrive; TCP's own repeats are told apart."""
    return bool(_LOST.search(counter.rpartition("/")[2]))


def is_pause(counter: str) -> bool:
    return bool(_PAUSED.search(counter.rpartition("/")[2]))


def _number(path: Path) -> int:
    text = read(path)
    return int(text) if text.isdigit() else 0
