"""`doctor --write-cluster NAME`: a cluster file from what Slurm says and what a small job sees on a node.

What could not be learned stays in the file as `# question:`.
"""

from __future__ import annotations

import getpass
import json
import re
from pathlib import Path

from hpctrain.config.hardware import known_hardware
from hpctrain.config.load import conf_dir, user_conf_dir
from hpctrain.config.schema import Config, GpuRequest
from hpctrain.doctor import scratch
from hpctrain.doctor.judge_stop import preemption
from hpctrain.doctor.node_facts import Facts, gid_index
from hpctrain.doctor.node_job import ask_node, gpu_kind, place_options, usual_node
from hpctrain.errors import ConfigError
from hpctrain.slurm.records import NodeInfo, PartitionInfo
from hpctrain.slurm.site import Site, gpus_of, is_out, read_site

SCRATCH = "# question: does node scratch keep its files over a requeue?"


def write_cluster(name: str, config: Config) -> int:
    """Write `~/.config/hpctrain/cluster/<name>.yaml`; returns 0.

    Args:
        config: whose partition, account and QOS are taken; without a partition it is the one with most GPUs.

    Raises:
        ConfigError: the name is no file name, or is taken.
        ClusterError: Slurm does not answer.
    """
    path = free_path(name)
    site = read_site(getpass.getuser())
    partition = choose_partition(site, config.cluster.partition)
    account, qos = config.cluster.account, config.cluster.qos
    if account is None and site.associations is not None and len(site.associations) == 1:
        account = site.associations[0].account
    facts, why = ask_node(site, partition, account, qos, Path(config.run_root).absolute())
    text = render(name, site, partition, account, qos, facts, why)
    if facts is not None:
        where = [f"--nodelist={facts['node']}", *place_options(partition, account, qos)]
        job = scratch.send(scratch.answer_of(site.setting("ClusterName")), where)
        text = text.replace(SCRATCH, f"{SCRATCH} Job {job} finds out, doctor will tell" if job else SCRATCH)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    questions = text.count("# question:")
    print(f"{path}\n  {questions} questions are open in it; use it with cluster={name}")
    return 0


def free_path(name: str) -> Path:
    if not re.fullmatch(r"[A-Za-z]\w*", name):
        raise ConfigError(f"--write-cluster {name}", "a name is letters, digits and underscores")
    shipped = sorted(path.stem for path in (conf_dir() / "cluster").glob("*.yaml"))
    if name in shipped:
        raise ConfigError(
            f"--write-cluster {name}", f"shipped with hpctrain: {', '.join(shipped)}", "a new name"
        )
    path = user_conf_dir() / "cluster" / f"{name}.yaml"
    if path.exists():
        raise ConfigError(f"--write-cluster {name}", f"{path} exists", "another name, or remove it")
    return path


def choose_partition(site: Site, asked: str | None) -> PartitionInfo:
    """The one asked for; else, of those that are up, the one with most GPUs, and the default among equals."""
    if asked is not None and asked in site.partitions:
        return site.partitions[asked]
    if asked is not None or not site.partitions:
        known = ", ".join(site.partitions) or "none"
        raise ConfigError(f"cluster.partition={asked}", f"partitions: {known}")

    def rank(partition: PartitionInfo) -> tuple[bool, int, bool]:
        count = sum(gres.count for node in site.nodes_of(partition.name) for gres in gpus_of(node))
        return partition.state == "UP", count, partition.is_default

    return max(site.partitions.values(), key=rank)


def catalogue_entry(gpu_type: str | None) -> str | None:
    """The hardware file that a type's name means: `nvidia_geforce_rtx_4090` is `rtx4090`."""
    bare = re.sub(r"[^a-z0-9]", "", (gpu_type or "").lower())
    found = [name for name in known_hardware() if re.sub(r"[^a-z0-9]", "", name.lower()) in bare]
    return max(found, key=len, default=None) if bare else None


def render(
    name: str,
    site: Site,
    partition: PartitionInfo,
    account: str | None,
    qos: str | None,
    facts: Facts | None,
    why: str,
) -> str:
    """The file's text."""
    nodes = site.nodes_of(partition.name)
    node = usual_node(nodes)
    cluster = site.setting("ClusterName") or name
    lines = [
        f"# Cluster {cluster}, as `hpctrain doctor --write-cluster {name}` found it.",
        "# Every line may be changed; what could not be learned is marked as a question.",
        "kind: slurm",
        *_hardware_lines(node, len([n for n in nodes if not is_out(n)]), facts),
        *_place_lines(site, partition, account, qos),
        *_memory_lines(site, node),
        *_time_lines(site, partition),
        *(_node_lines(facts) if facts else [f"# question: what a node sees was not learned: {why}"]),
    ]
    return "\n".join(lines) + "\n"


def _hardware_lines(node: NodeInfo | None, num_up: int, facts: Facts | None) -> list[str]:
    if node is None:
        return ["# question: the partition has no nodes", "device: cpu", "hardware: cpu"]
    kind, count = gpu_kind(node)
    seen = (facts or {}).get("gpus") or []
    model = kind or (str(seen[0]["name"]) if seen else None)
    entry = catalogue_entry(model) or "cpu"
    lines = [f"device: {'cuda' if count else 'cpu'}"]
    if count and entry == "cpu":
        known = ", ".join(known_hardware())
        lines.append(f"# question: which entry of the catalogue is {model or 'this GPU'}? There are {known}")
    if count and facts is not None and not seen:
        lines.append(f"# question: {facts['node']} shows no GPU to a job: {facts['no_gpus']}")
    lines += [f"hardware: {entry}", f"num_nodes: {max(1, num_up)}  # that are up now"]
    if not count:
        return [*lines, "ranks_per_node: 1", f"cpus_per_rank: {node.num_cpus}", "gpu_request: none"]
    cpus = max(1, node.num_cpus // count)
    lines += [f"ranks_per_node: {count}", f"cpus_per_rank: {cpus}  # {node.num_cpus} CPUs a node"]
    lines += [f"gpu_request: {GpuRequest.gres.name}", f"gpu_type: {kind or 'null'}"]
    roots = (facts or {}).get("pcie_roots") or []
    if roots:
        lines.append(f"pcie_roots: {json.dumps(roots)}  # nvidia-smi topo -m")
    else:
        lines.append("# question: pcie_roots, from `nvidia-smi topo -m` on a node")
    return lines


def _place_lines(site: Site, partition: PartitionInfo, account: str | None, qos: str | None) -> list[str]:
    others = ", ".join(name for name in site.partitions if name != partition.name)
    lines = [f"partition: {partition.name}" + f"  # others: {others}" * bool(others)]
    if account:
        lines.append(f"account: {account}")
    elif site.associations:
        accounts = ", ".join(sorted({each.account for each in site.associations}))
        lines.append(f"# question: account, one of {accounts}; without it Slurm takes your default one")
    else:
        lines.append("# question: account, if the site wants one (no accounting could be read)")
    return lines + ([f"qos: {qos}"] if qos else [])


def _memory_lines(site: Site, node: NodeInfo | None) -> list[str]:
    if node is None:
        return []
    gib = node.memory_mib / 1024
    if "MEMORY" in site.setting("SelectTypeParameters").upper():
        return [f"mem_gib: {max(1, int(gib * 0.95))}  # of {gib:.0f} GiB a node"]
    return [f"# mem_gib: a node has {gib:.0f} GiB; Slurm does not count memory here"]


def _time_lines(site: Site, partition: PartitionInfo) -> list[str]:
    limit, default = partition.max_time_s, partition.default_time_s
    lines = [f"time_limit_min: {limit // 60}  # the most there is"] if limit else ["# no time limit here"]
    if default and not limit:
        lines.append(f"# without time_limit_min a start lasts {default // 60} min")
    risk = preemption(site, partition, None)
    if risk is None and not site.setting("PreemptType").endswith("qos"):
        lines.append("# preemption: none in this partition")
    elif risk is None:
        lines.append("# preemption: by QOS; grace and mode are in `sacctmgr show qos`")
    else:
        kill_wait = site.setting("KillWait")
        lines.append(f"# preemption: {risk.mode}, {risk.grace_s} s of grace, then KillWait {kill_wait}")
    lines.append("# question: signal_lead_s, longest step + a save with room to spare; doctor judges it")
    return [*lines, "signal_lead_s: 120"]


def _node_lines(facts: Facts) -> list[str]:
    """What a job saw on a node: settings as keys, the rest as comments."""
    driver = (
        f"driver {facts['driver']}, up to CUDA {facts['driver_cuda']}" if facts["driver"] else "no driver"
    )
    torch = facts["torch"]
    build = f"torch {torch['version']}, CUDA {torch['cuda']}" if torch else "no torch"
    lines = [f"# node {facts['node']}: {driver}; python {facts['python']}, {build}"]
    lines += _network_lines(facts)
    lock = facts["memlock_bytes"]
    text = "unlimited" if lock is None else f"{lock / 2**20:.0f} MiB"
    lines.append(f"# locked memory (ulimit -l): {text}" + "; RDMA needs unlimited" * (lock is not None))
    lines.append(f"# /dev/shm: {facts['shm_gib']:.0f} GiB")
    for each in facts["scratch"][:3]:
        lines.append(f"# scratch: {each['path']} ({each['type']}), {each['free_gib']:.0f} GiB free")
    lines.append(SCRATCH)
    run = facts["run_folder"]
    lines.append(f"# runs: {run['path']} ({run['type']}), {run['free_gib']:.0f} GiB free")
    quota = (run["quota"] or "").splitlines()
    lines += [f"#   {line}" for line in quota[:8]] or ["# question: is there a quota on it?"]
    return [*lines, "# question: drivers of the other nodes: hpctrain preflight looks at all of them"]


def _network_lines(facts: Facts) -> list[str]:
    cards = [card for card in facts["nics"] if card["address"] and card["name"] != "lo"]
    real = [card for card in cards if not card["is_virtual"]] or cards
    lines = []
    for card in real:
        speed = f"{card['speed_gbit']:g} Gbit/s" if card["speed_gbit"] else "speed unknown"
        lines.append(f"# interface {card['name']}: {card['address']}, {speed}, mtu {card['mtu']}")
    if len(real) == 1 or (real and all(card["speed_gbit"] for card in real)):
        fastest = max(real, key=lambda card: card["speed_gbit"] or 0.0)
        lines.append(f"network_interface: {fastest['name']}")
    else:
        lines.append("# question: network_interface, the fast one between nodes")
    ports = facts["rdma"]
    index = gid_index(ports)
    lines += [
        f"# RDMA {p['device']} port {p['port']}: {p['state']}, {p['rate']}, {p['layer']}" for p in ports
    ]
    if index is not None:
        lines += ["env:", f'  NCCL_IB_GID_INDEX: "{index}"  # RoCE v2 over IPv4']
    elif any(port["layer"] == "Ethernet" for port in ports):
        lines.append("# question: NCCL_IB_GID_INDEX, show_gids on a node; ports differ or have no RoCE v2")
    return lines
