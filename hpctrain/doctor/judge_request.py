"""Can the cluster give what the run asks for? Findings on partition, account, QOS, nodes, GPUs, CPUs, memory,
time and numbers of jobs."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterable
from math import ceil

from hpctrain.config.schema import ClusterConfig, Device, GpuRequest
from hpctrain.doctor.findings import Finding, notice, ok, problem
from hpctrain.slurm.records import NodeInfo, PartitionInfo
from hpctrain.slurm.site import Association, Qos, Site, gpus_of, is_out


def nearest(asked: str, known: Iterable[str]) -> str:
    """The known name that was most likely meant, else all of them."""
    names = sorted(known)
    plain = {re.sub(r"[^a-z0-9]", "", name.lower()): name for name in names}
    bare = re.sub(r"[^a-z0-9]", "", asked.lower())
    inside = [name for key, name in plain.items() if key and bare and (key in bare or bare in key)]
    near = difflib.get_close_matches(bare, plain, n=1, cutoff=0.5)
    return inside[0] if inside else plain[near[0]] if near else ", ".join(names) or "none"


def find_partition(site: Site, cluster: ClusterConfig) -> tuple[PartitionInfo | None, Finding]:
    """The partition the job goes to."""
    name = cluster.partition or site.default_partition()
    known = ", ".join(site.partitions)
    if name is None:
        return None, problem(
            "partition",
            "cluster.partition is not set, and the cluster has no default",
            "sbatch refuses the job",
            f"cluster.partition, one of {known}",
        )
    if name not in site.partitions:
        return None, problem(
            "partition",
            f"cluster.partition={name} is not there, or not for you; there are {known}",
            "sbatch refuses the job",
            f"cluster.partition={nearest(name, site.partitions)}",
        )
    partition = site.partitions[name]
    if partition.state != "UP":
        return partition, problem(
            "partition",
            f"{name} is {partition.state}",
            "a job waits there until it is up, or is refused",
            "another partition, or ask when it comes back",
        )
    return partition, ok("partition", f"{name} is up")


def find_qos(site: Site, cluster: ClusterConfig, partition: PartitionInfo) -> Qos | None:
    """The QOS whose limits count: the partition's, the run's, else the default of the association."""
    if site.qos is None:
        return None
    association = find_association(site, cluster)
    of_association = ""
    if association is not None:
        single = association.qos[0] if len(association.qos) == 1 else ""
        of_association = association.default_qos or single
    names = (site.fields[partition.name].get("QoS", ""), cluster.qos or "", of_association)
    return next((site.qos[name] for name in names if name in site.qos), None)


def find_association(site: Site, cluster: ClusterConfig) -> Association | None:
    own = site.associations or ()
    if cluster.account is None:
        return own[0] if len(own) == 1 else None
    return next((each for each in own if each.account.lower() == cluster.account.lower()), None)


def permission_findings(site: Site, cluster: ClusterConfig, partition: PartitionInfo) -> list[Finding]:
    """Account and QOS: whether they exist, and whether the partition takes them."""
    findings = []
    enforced = "associations" in site.setting("AccountingStorageEnforce")
    own = site.associations
    if own is not None:
        accounts = sorted({each.account for each in own})
        if cluster.account and find_association(site, cluster) is None:
            judge = problem if enforced else notice
            means = "sbatch refuses the job" if enforced else "the job's use is booked on an unknown account"
            change = f"cluster.account={nearest(cluster.account, accounts)}"
            found = f"cluster.account={cluster.account}; yours: {', '.join(accounts) or 'none'}"
            findings.append(judge("account", found, means, change))
        elif enforced and not accounts:
            found = f"{site.user} has none, and the cluster enforces associations"
            findings.append(problem("account", found, "sbatch refuses the job", "ask for an account"))
        else:
            findings.append(ok("account", cluster.account or f"the default one of {', '.join(accounts)}"))
    findings += _qos_findings(site, cluster)
    fields = site.fields[partition.name]
    for key, value in (("Accounts", cluster.account), ("Qos", cluster.qos)):
        allowed, denied = fields.get(f"Allow{key}", "ALL"), fields.get(f"Deny{key}", "")
        if value and (
            (allowed not in ("ALL", "") and value not in allowed.split(",")) or value in denied.split(",")
        ):
            found = f"partition {partition.name} takes {key.lower()} {allowed}, not {value}"
            findings.append(
                problem(f"Allow{key}", found, "sbatch refuses the job", "another partition, or ask for leave")
            )
    return findings


def _qos_findings(site: Site, cluster: ClusterConfig) -> list[Finding]:
    if cluster.qos is None or site.qos is None:
        return []
    if cluster.qos not in site.qos:
        found = f"cluster.qos={cluster.qos} is not there"
        change = f"cluster.qos={nearest(cluster.qos, site.qos)}"
        return [problem("qos", found, "sbatch refuses the job", change)]
    association = find_association(site, cluster)
    if association and association.qos and cluster.qos not in association.qos:
        found = f"cluster.qos={cluster.qos}; yours under {association.account}: {', '.join(association.qos)}"
        return [problem("qos", found, "sbatch refuses the job", f"cluster.qos={association.qos[0]}")]
    return [ok("qos", cluster.qos)]


def gpu_findings(cluster: ClusterConfig, nodes: list[NodeInfo]) -> list[Finding]:
    """Whether GPUs are asked for by the name that the site gives them."""
    types = Counter(gres.type for node in nodes for gres in gpus_of(node))
    names = sorted(name for name in types if name)
    shown = ", ".join(f"gpu:{name}" for name in names) or ("gpu without a type" if types else "no GPUs")
    if cluster.gpu_request is GpuRequest.none:
        if cluster.device is Device.cpu or not types:
            return []
        found = f"cluster.gpu_request=none; the nodes have {shown}"
        means = "a job that asks for no GPU sees none where Slurm guards them, or another's where it does not"
        change = f"cluster.gpu_request=gres cluster.gpu_type={names[0] if names else 'null'}"
        return [problem("GPUs", found, means, change)]
    asked = f"cluster.gpu_type={cluster.gpu_type or 'null'}"
    if not types:
        found = f"{asked}; Slurm knows of no GPUs on these nodes"
        change = "cluster.gpu_request=none cluster.exclusive=true, or ask for GresTypes=gpu and a gres.conf"
        return [problem("GPUs", found, "sbatch refuses the job", change)]
    if cluster.gpu_type and cluster.gpu_type not in names:
        change = f"cluster.gpu_type={nearest(cluster.gpu_type, names) if names else 'null'}"
        return [problem("GPUs", f"{asked}; the nodes have {shown}", "sbatch refuses the job", change)]
    if cluster.gpu_type is None and len(names) > 1:
        means = "Slurm may mix them in one job: the slowest and smallest one decides"
        return [notice("GPUs", f"{asked}; the nodes have {shown}", means, f"cluster.gpu_type={names[0]}")]
    return [ok("GPUs", f"asked for as gpu{f':{cluster.gpu_type}' if cluster.gpu_type else ''}")]


def fits(cluster: ClusterConfig, node: NodeInfo) -> str | None:
    """Why a node, empty, cannot take its part of the job; None if it can."""
    asks_gpus = cluster.gpu_request is not GpuRequest.none
    gpus = sum(g.count for g in gpus_of(node) if cluster.gpu_type in (None, g.type))
    cpus = cluster.ranks_per_node * cluster.cpus_per_rank
    if asks_gpus and gpus < cluster.ranks_per_node:
        return f"cluster.ranks_per_node={cluster.ranks_per_node} GPUs, nodes have {gpus}"
    if cpus > node.num_cpus:
        return (
            f"ranks_per_node {cluster.ranks_per_node} × cpus_per_rank {cluster.cpus_per_rank} = {cpus} CPUs, "
            f"nodes have {node.num_cpus}"
        )
    if cluster.mem_gib is not None and cluster.mem_gib * 1024 > node.memory_mib:
        return f"cluster.mem_gib={cluster.mem_gib}, nodes have {node.memory_mib / 1024:.1f} GiB"
    return None


def node_findings(site: Site, cluster: ClusterConfig, partition: PartitionInfo) -> list[Finding]:
    """Whether enough nodes that fit the request are up; those that are out are named with their reason."""
    nodes = site.nodes_of(partition.name)
    findings = gpu_findings(cluster, nodes)
    typed = [
        node for node in nodes if not cluster.gpu_type or cluster.gpu_type in [g.type for g in gpus_of(node)]
    ]
    small = Counter(filter(None, (fits(cluster, node) for node in typed)))
    able = [node for node in typed if fits(cluster, node) is None]
    out = [node for node in able if is_out(node)]
    up, wanted = len(able) - len(out), cluster.num_nodes
    most = site.fields[partition.name].get("MaxNodes", "UNLIMITED")
    for reason, count in small.items():
        if len(able) >= wanted:
            break
        change = "less of it, or other nodes: cluster.partition, cluster.gpu_type"
        found = f"asked {reason} ({count} of {len(typed)} nodes)"
        findings.append(problem("nodes", found, "no node can take it: sbatch refuses the job", change))
    named = "; ".join(f"{node.name} {node.state}" + f" ({node.reason})" * bool(node.reason) for node in out)
    if most.isdigit() and int(most) < wanted:
        found = f"cluster.num_nodes={wanted}, partition {partition.name} gives a job {most}"
        findings.append(problem("MaxNodes", found, "the job never starts", f"cluster.num_nodes={most}"))
    if able and up < wanted:
        can = len(able) >= wanted
        found = (
            f"cluster.num_nodes={wanted}, {up} of {len(able)} that fit are up{'; out: ' * bool(out)}{named}"
        )
        means = f"the job waits until {wanted - up} more are back" if can else "sbatch refuses the job"
        change = f"cluster.num_nodes={up}" if up else "ask for the nodes"
        findings.append(
            problem("nodes", found, means, change + (", or ask for those nodes" if can and up else ""))
        )
    elif out:
        means = f"{up} others that fit are up, enough for this run"
        findings.append(notice("nodes", f"out of service: {named}", means, "ask for them"))
    elif able:
        findings.append(ok("nodes", f"{up} that fit are up, {wanted} are asked for"))
    return findings


def time_findings(
    site: Site, cluster: ClusterConfig, partition: PartitionInfo, qos: Qos | None
) -> list[Finding]:
    """The time limit against those of partition, QOS and association."""
    association = find_association(site, cluster)
    limits = {f"MaxTime of partition {partition.name}": partition.max_time_s}
    if qos is not None:
        limits[f"MaxWall of QOS {qos.name}"] = qos.max_wall_s
    if association is not None:
        limits[f"MaxWall of account {association.account}"] = association.max_wall_s
    known = {name: value for name, value in limits.items() if value is not None}
    where = min(known, key=lambda name: known[name], default=None)
    if cluster.time_limit_min is None:
        limit = partition.default_time_s or (known[where] if where else None)
        if limit is None:
            return [ok("time limit", "none")]
        minutes = limit // 60
        if limit < 3600:
            means = "a run is stopped and sent back into the queue that often"
            found = f"the partition's default, {minutes} min"
            return [notice("time limit", found, means, "cluster.time_limit_min, as much as the site allows")]
        return [ok("time limit", f"the partition's default, {minutes} min", "then the run goes on anew")]
    asked = cluster.time_limit_min * 60
    if where is not None and asked > known[where]:
        enforced = site.setting("EnforcePartLimits") not in ("", "NO") or not where.startswith("MaxTime")
        means = "sbatch refuses the job" if enforced else "the job waits for ever (PartitionTimeLimit)"
        found = f"cluster.time_limit_min={cluster.time_limit_min}, {where} is {known[where] // 60} min"
        change = f"cluster.time_limit_min={known[where] // 60}: a run goes on in the next start"
        return [problem("time limit", found, means, change)]
    if asked <= 2 * cluster.signal_lead_s:
        found = (
            f"cluster.time_limit_min={cluster.time_limit_min}, cluster.signal_lead_s={cluster.signal_lead_s}"
        )
        means = "half of each start or more is over when the ranks are told to save"
        return [notice("time limit", found, means, "a longer limit or a shorter lead")]
    return [ok("time limit", f"{cluster.time_limit_min} min")]


def count_findings(site: Site, cluster: ClusterConfig, qos: Qos | None) -> list[Finding]:
    """Arrays and numbers of jobs."""
    findings = []
    largest = site.number("MaxArraySize")
    if largest is not None and largest <= 64:
        means = f"a sweep of more than {largest} points is refused" if largest else "no sweeps"
        findings.append(notice("MaxArraySize", str(largest), means, "smaller sweeps, or ask for 1001"))
    elif largest is not None:
        findings.append(ok("MaxArraySize", f"{largest}", f"a sweep may have {largest} points"))
    association = find_association(site, cluster)
    limits = {f"QOS {qos.name}": qos.max_submit_per_user} if qos else {}
    if association is not None:
        limits[f"account {association.account}"] = association.max_submit
    for where, limit in limits.items():
        if limit is None:
            continue
        free = limit - site.queued_jobs
        found = f"{limit} ({where}), {site.queued_jobs} of yours are queued"
        if free < 1:
            findings.append(
                problem("MaxSubmitJobs", found, "sbatch refuses the job", "wait, or ask for more")
            )
        else:
            findings.append(ok("MaxSubmitJobs", found, f"{free} more jobs or points of a sweep are taken"))
    return findings


def memory_findings(site: Site, cluster: ClusterConfig, partition: PartitionInfo) -> list[Finding]:
    """What memory a job gets that asks for none."""
    if cluster.mem_gib is not None or "MEMORY" not in site.setting("SelectTypeParameters").upper():
        return []
    fields = site.fields[partition.name]
    cpus = cluster.ranks_per_node * cluster.cpus_per_rank
    for key, count in (
        ("DefMemPerCPU", cpus),
        ("DefMemPerNode", 1),
        ("DefMemPerGPU", cluster.ranks_per_node),
    ):
        value = fields.get(key, site.setting(key))
        if value.isdigit() and int(value):
            gib = ceil(int(value) * count / 1024)
            least = 8 * cluster.ranks_per_node
            if gib < least:
                means = "Linux kills ranks and loaders that need more"
                change = f"cluster.mem_gib, at least {least}"
                return [notice("memory", f"{key}={value}: {gib} GiB a node", means, change)]
            return [ok("memory", f"{gib} GiB a node by default ({key})")]
    means = "nobody else gets onto the nodes meanwhile"
    return [ok("memory", "all of a node's by default", means)]
