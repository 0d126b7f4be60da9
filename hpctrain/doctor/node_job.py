"""A small job on one node of a partition: what the probe sees there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from hpctrain.doctor.node_facts import Facts
from hpctrain.launch.environment import scrubbed
from hpctrain.launch.snapshot import package_root
from hpctrain.slurm.records import NodeInfo, PartitionInfo
from hpctrain.slurm.site import Site, gpus_of, is_out

PROBE_S = 120  # how long it may wait for a node and run


def usual_node(nodes: Sequence[NodeInfo]) -> NodeInfo | None:
    """A node of the most frequent make, one that is up if there is one."""
    kinds = Counter((node.gres.partition("(")[0], node.num_cpus) for node in nodes)
    if not kinds:
        return None
    kind = kinds.most_common(1)[0][0]
    alike = [node for node in nodes if (node.gres.partition("(")[0], node.num_cpus) == kind]
    return next((node for node in alike if not is_out(node)), alike[0])


def gpu_kind(node: NodeInfo) -> tuple[str | None, int]:
    """Type, as the site names it, and number of a node's GPUs."""
    found = gpus_of(node)
    most = max(found, key=lambda gres: gres.count, default=None)
    return (most.type, most.count) if most else (None, 0)


def place_options(partition: PartitionInfo, account: str | None, qos: str | None) -> list[str]:
    """For sbatch and srun: one task in the partition."""
    options = ["--nodes=1", "--ntasks=1", f"--partition={partition.name}"]
    return options + [f"--account={account}"] * bool(account) + [f"--qos={qos}"] * bool(qos)


def ask_node(
    site: Site, partition: PartitionInfo, account: str | None, qos: str | None, root: Path
) -> tuple[Facts | None, str]:
    """What the probe sees on one node, or why nothing was seen. Waits for a node two minutes at most."""
    node = usual_node(site.nodes_of(partition.name))
    if node is None:
        return None, "the partition has no nodes"
    if shutil.which("srun") is None:
        return None, "srun is not installed here"
    kind, count = gpu_kind(node)
    options = [*place_options(partition, account, qos), "--time=5", f"--immediate={PROBE_S}"]
    options += [f"--job-name=hpctrain-probe-{os.getpid()}"]
    options += [f"--gres=gpu:{f'{kind}:' if kind else ''}{count}"] if count else []
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root, prefix=".probe") as folder:
        probe = [sys.executable, "-m", "hpctrain.doctor.probe", "facts", folder]
        environment = {**scrubbed(os.environ), "PYTHONPATH": str(package_root())}
        try:
            done = subprocess.run(
                ["srun", *options, *probe],
                env=environment,
                capture_output=True,
                text=True,
                timeout=PROBE_S + 60,
            )
        except subprocess.TimeoutExpired:
            return None, f"no node was free within {PROBE_S} s"
        found = sorted(Path(folder).glob("*.facts.json"))
        if done.returncode or not found:
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            return None, lines[-1] if lines else f"srun exited with {done.returncode}"
        facts: Facts = json.loads(found[0].read_text())
        facts["run_folder"]["path"] = str(root)
        return {**facts, "node": found[0].name.removesuffix(".facts.json")}, ""
