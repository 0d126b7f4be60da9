"""When a run's turn comes: accounts, fair share, what the request costs, and the earliest start by shape."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpctrain.config.schema import ClusterConfig, GpuRequest
from hpctrain.doctor.findings import Finding, notice, ok, question
from hpctrain.slurm.records import PartitionInfo
from hpctrain.slurm.site import ExpectedStart, Site

Tres = dict[str, float]  # amounts by name, memory in GiB

_UNITS = {"K": 2.0**-20, "M": 2.0**-10, "G": 1.0, "T": 2.0**10, "P": 2.0**20}  # to GiB


def accounting_findings(site: Site) -> list[Finding]:
    """Whether the end of a job can still be learned when the controller has forgotten it."""
    age = site.seconds("MinJobAge")
    if not site.has_accounting:
        means = "sacct knows nothing: how a start ended is known from the run's own ledger alone"
        return [
            notice("accounting", f"none, and the controller forgets after {age} s", means, "ask for slurmdbd")
        ]
    findings = [ok("accounting", site.setting("AccountingStorageType").rpartition("/")[2])]
    if site.qos is None:
        means = "limits of accounts and QOS, and fair share, could not be looked at"
        findings.append(question("accounting", "sacctmgr does not answer here", means, "on a login node"))
    if age is not None and age < 60:
        means = "status learns of the end of jobs from sacct, which may lag"
        findings.append(notice("MinJobAge", f"{age} s", means, "ask for MinJobAge=300, Slurm's default"))
    elif age is not None:
        findings.append(ok("MinJobAge", f"{age} s"))
    if "gres/gpu" not in site.setting("AccountingStorageTRES"):
        means = "GPU hours are not booked: fair share cannot count them"
        change = "ask for AccountingStorageTRES=gres/gpu and the types, gres/gpu:TYPE"
        findings.append(notice("AccountingStorageTRES", site.setting("AccountingStorageTRES"), means, change))
    return findings


def share_findings(site: Site, cluster: ClusterConfig) -> list[Finding]:
    """How the user stands."""
    kind = site.setting("PriorityType").rpartition("/")[2]
    if kind != "multifactor":
        return [ok("fair share", f"none: PriorityType={kind or 'basic'}", "jobs start in order of arrival")]
    weight = site.number("PriorityWeightFairShare") or 0
    findings = []
    mine = [s for s in site.shares if cluster.account in (None, s.account)]
    for share in mine:
        shown = {"NormShares": share.norm_shares, "EffectvUsage": share.effective_usage}
        rest = ", ".join(f"{name} {value:.3f}" for name, value in shown.items() if value is not None)
        found = f"{share.fair_share:.3f} of 1 under account {share.account}" + f" ({rest})" * bool(rest)
        if not weight:
            findings.append(ok("fair share", found, "PriorityWeightFairShare=0: it does not count"))
        elif share.fair_share < 0.3:
            means = "others with better standing go first; it heals with PriorityDecayHalfLife="
            means += site.setting("PriorityDecayHalfLife")
            other = [s.account for s in site.shares if s.fair_share > 2 * share.fair_share]
            change = f"cluster.account={other[0]}" if other else "another account, or patience"
            findings.append(notice("fair share", found, means, change))
        else:
            findings.append(ok("fair share", found))
    for standing in site.standings[:5]:
        parts = ", ".join(f"{name} {value:g}" for name, value in standing.factors.items()) or "no factor"
        findings.append(ok("priority", f"pending job {standing.job_id}: {standing.priority:g} ({parts})"))
    return findings


def parse_tres(text: str) -> Tres:
    """`cpu=32,mem=20000M,gres/gpu=8,gres/gpu:rtx4090=8` to amounts; memory in GiB."""
    amounts: Tres = {}
    for part in text.split(","):
        name, _, value = part.strip().rpartition("=")
        found = re.fullmatch(r"([\d.]+)([KMGTP]?)", value)
        if name and found:
            unit = found[2] or ("M" if name == "mem" else "")
            amounts[name] = float(found[1]) * (_UNITS[unit] if name == "mem" else 1.0)
    return amounts


def parse_weights(text: str) -> Tres:
    """`CPU=1.0,Mem=0.25G,GRES/gpu=2.0` (slurm.conf(5), TRESBillingWeights), for a CPU, a GiB, a GPU."""
    weights: Tres = {}
    for part in text.split(","):
        name, _, value = part.strip().rpartition("=")
        found = re.fullmatch(r"([\d.]+)([KMGTP]?)", value)
        if not name or not found:
            continue
        name = name.lower()
        per = _UNITS[found[2] or "M"] if name == "mem" else 1.0
        weights[name] = float(found[1]) / per
    return weights


def request_tres(cluster: ClusterConfig, mem_gib: float) -> Tres:
    """What the run asks for."""
    ranks = cluster.num_nodes * cluster.ranks_per_node
    asked: Tres = {"cpu": ranks * cluster.cpus_per_rank, "mem": mem_gib * cluster.num_nodes}
    asked["node"] = cluster.num_nodes
    if cluster.gpu_request is not GpuRequest.none:
        asked["gres/gpu"] = ranks
        if cluster.gpu_type:
            asked[f"gres/gpu:{cluster.gpu_type}"] = ranks
    return asked


@dataclass(frozen=True, slots=True)
class Bill:
    """What an hour of a job is booked as."""

    total: float
    parts: Mapping[str, float]
    is_max: bool

    @property
    def dominant(self) -> str:
        return max(self.parts, key=lambda name: self.parts[name])


def bill(asked: Tres, weights: Tres, is_max: bool) -> Bill | None:
    """Slurm's billing: the sum of weighted resources, or with MAX_TRES their maximum (slurm.conf(5))."""
    parts = {name: asked[name] * weight for name, weight in weights.items() if asked.get(name) and weight > 0}
    if not parts:
        return None
    return Bill(max(parts.values()) if is_max else sum(parts.values()), parts, is_max)


def cost_findings(site: Site, cluster: ClusterConfig, partition: PartitionInfo) -> list[Finding]:
    """The dominant resource of the request: of the partition (Ghodsi et al. 2011), and in the bill."""
    fields = site.fields[partition.name]
    nodes = site.nodes_of(partition.name)
    default_gib = min((node.memory_mib for node in nodes), default=0) / 1024
    counts_memory = "MEMORY" in site.setting("SelectTypeParameters").upper()
    asked = request_tres(cluster, cluster.mem_gib or (default_gib if counts_memory else 0.0))
    total = parse_tres(fields.get("TRES", ""))
    shares = {n: amount / total[n] for n, amount in asked.items() if total.get(n) and amount and n != "node"}
    findings = []
    if shares:
        name = max(shares, key=lambda each: shares[each])
        rest = ", ".join(f"{n} {s:.0%}" for n, s in shares.items() if n != name and ":" not in n)
        found = f"{name}, {shares[name]:.0%} of partition {partition.name}"
        findings.append(ok("dominant resource", found, rest))
    weights = parse_weights(fields.get("TRESBillingWeights", ""))
    flags = site.setting("PriorityFlags").split(",")
    cost = bill(asked, weights, any(flag.startswith("MAX_TRES") for flag in flags))
    if cost is None:
        return [
            *findings,
            ok("bill", "TRESBillingWeights are not set", "a CPU counts as 1, nothing else does"),
        ]
    how = "the largest counts" if cost.is_max else "added up"
    parts = ", ".join(f"{name} {value:g}" for name, value in cost.parts.items())
    found = f"{cost.total:g} an hour, {how}: {parts}"
    gpus = cost.parts.get("gres/gpu") or max((v for n, v in cost.parts.items() if "gpu" in n), default=0.0)
    if gpus and "gpu" not in cost.dominant:
        key = "cpus_per_rank" if cost.dominant == "cpu" else "mem_gib"
        means = f"{cost.dominant} costs more than the GPUs, and others go first the sooner"
        findings.append(notice("bill", found, means, f"a smaller cluster.{key}, if the loaders bear it"))
    else:
        findings.append(ok("bill", found, f"{cost.dominant} decides"))
    return findings


def start_findings(
    starts: Sequence[tuple[int, ExpectedStart]], num_nodes: int, now_s: float | None = None
) -> list[Finding]:
    """Earliest start of several shapes.

    Args:
        starts: nodes of each shape, and what Slurm answered.
        num_nodes: those of the run.
    """
    now_s = time.time() if now_s is None else now_s
    waits = {n: start.start_time_s - now_s for n, start in starts if start.start_time_s is not None}
    said = []
    for nodes, start in starts:
        name = f"{nodes} node{'s' * (nodes != 1)}"
        said.append(f"{name} {_when(waits[nodes])}" if nodes in waits else f"{name} not: {start.said}")
    if not said:
        return []
    found = "; ".join(said)
    if num_nodes not in waits:
        answer = next((start.said for nodes, start in starts if nodes == num_nodes), "not asked")
        means = f"Slurm would not take this shape ({answer})"
        change = f"cluster.num_nodes={max(waits)}" if waits else "see the problems above"
        return [notice("earliest start", found, means, change)]
    sooner = [nodes for nodes, wait in waits.items() if waits[num_nodes] - wait > 1800]
    if sooner:
        best = max(sooner)
        means = f"{best} nodes would start {_span(waits[num_nodes] - waits[best])} earlier"
        return [notice("earliest start", found, means, f"cluster.num_nodes={best}; resume takes more later")]
    return [ok("earliest start", found)]


def _when(wait_s: float) -> str:
    return "now" if wait_s < 60 else f"in {_span(wait_s)}"


def _span(seconds: float) -> str:
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172800 else f"{seconds / 86400:.1f} days"
