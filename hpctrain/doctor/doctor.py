"""The verb `doctor`: reads how the cluster is set up and judges it for this user and this run."""

from __future__ import annotations

import copy
import getpass
import json
import re
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hpctrain import slurm
from hpctrain.config.schema import ClusterKind, Config, Device
from hpctrain.doctor import judge_queue, judge_request, judge_stop
from hpctrain.doctor.cluster_file import write_cluster
from hpctrain.doctor.drivers import TorchBuild, driver_findings, installed_torch
from hpctrain.doctor.findings import Finding, has_problem, notice, ok, problem, summary, to_text
from hpctrain.doctor.judge_stop import SaveTime
from hpctrain.doctor.preflight import Report, last_report
from hpctrain.doctor.scratch import scratch_findings
from hpctrain.errors import ClusterError, ConfigError, HpctrainError
from hpctrain.launch import submit
from hpctrain.launch.script import check_options, clean_environment, make_executor
from hpctrain.launch.snapshot import package_root
from hpctrain.plan.plan import RunPlan
from hpctrain.run.directory import RunDirectory
from hpctrain.run.ledger import Ledger
from hpctrain.slurm.site import ExpectedStart, Site, expected_start, is_out, read_site

__all__ = ["doctor", "write_cluster"]

MOST_SHAPES = 5


def doctor(config: Config, as_json: bool) -> int:
    """Print the findings; 1 if one of them stops a run or loses its work, else 0.

    Raises ClusterError where Slurm does not answer, ConfigError where there is no Slurm to look at.
    """
    if config.cluster.kind is ClusterKind.local:
        raise ConfigError(
            "doctor looks at a Slurm cluster",
            "cluster.kind=local has none",
            "cluster=rtx4090 or your own, or hpctrain doctor --write-cluster NAME to make one",
        )
    check_options(config.cluster)
    findings = examine(config)
    if as_json:
        print(json.dumps({"findings": [finding.to_dict() for finding in findings]}))
    else:
        print(f"{to_text(findings)}\n{summary(findings)}")
    return 1 if has_problem(findings) else 0


def examine(asked: Config) -> list[Finding]:
    """Ask Slurm, then judge."""
    config, plan, refusal = planned(asked)
    cluster = config.cluster
    site = narrowed(read_site(getpass.getuser()), config)
    save = save_time(config, plan)
    partition, found = judge_request.find_partition(site, cluster)
    findings = [*refusal, ok("Slurm", ".".join(f"{number:02}" for number in site.version)), found]
    if partition is not None:
        qos = judge_request.find_qos(site, cluster, partition)
        findings += judge_request.permission_findings(site, cluster, partition)
        findings += judge_request.node_findings(site, cluster, partition)
        findings += judge_request.memory_findings(site, cluster, partition)
        findings += judge_request.time_findings(site, cluster, partition, qos)
        findings += judge_request.count_findings(site, cluster, qos)
        findings += judge_stop.preemption_findings(site, partition, qos, save)
    findings += judge_stop.ending_findings(site, cluster, save)
    findings += judge_queue.accounting_findings(site)
    nodes = [node.name for node in site.nodes_of(partition.name) if not is_out(node)] if partition else []
    findings += node_software(config, nodes) + scratch_findings(site.setting("ClusterName"))
    findings += judge_queue.share_findings(site, cluster)
    if partition is not None:
        findings += judge_queue.cost_findings(site, cluster, partition)
        if not refusal:
            near = shapes(with_nodes(asked, cluster.num_nodes), partition.num_nodes)
            starts = [(count, start_of(config, count)) for count in near]
            findings += judge_queue.start_findings(starts, cluster.num_nodes)
    return findings


def narrowed(site: Site, config: Config) -> Site:
    """The site with the nodes alone that `nodelist`, `exclude` and a simple `constraint` leave."""
    cluster = config.cluster
    only, without = slurm.expand(cluster.nodelist or ""), slurm.expand(cluster.exclude or "")
    wanted = cluster.constraint if re.fullmatch(r"[\w.-]+", cluster.constraint or "") else None
    kept = tuple(
        node
        for node in site.nodes
        if node.name not in without
        and (not only or node.name in only)
        and (wanted is None or wanted in node.features)
    )
    return replace(site, nodes=kept)


def planned(config: Config) -> tuple[Config, RunPlan | None, list[Finding]]:
    """The config with what the planner was asked to choose, and the plan or what it says against the run.

    A deadline chooses nodes here; whether a given number meets it is the business of `hpctrain plan`.
    """
    chosen = copy.deepcopy(config)
    if chosen.cluster.num_nodes != -1:
        chosen.deadline = None
    try:
        return chosen, submit.planned(chosen), []
    except HpctrainError as error:
        chosen.cluster.num_nodes = max(1, chosen.cluster.num_nodes)  # the least, where none could be chosen
        refusal = problem("plan", str(error), "submit refuses the run", "hpctrain plan shows it whole")
        return chosen, None, [refusal]


def save_time(config: Config, plan: RunPlan | None) -> SaveTime | None:
    """How long the run takes to stop: as its ledger measured it, else as the plan reckons."""
    assert config.name is not None
    run = RunDirectory(Path(config.run_root) / config.name)
    measured = [e["save_s"] for e in Ledger(run.ledger).events() if e["event"] == "saved" and "save_s" in e]
    step_s = measured_step_s(config, run)
    forecast = plan.forecast if plan else None
    if step_s is None:
        step_s = forecast.step_s.mid if forecast else 0.0
    if measured:
        source = f"measured: the longest of {len(measured)} of this run"
        return SaveTime(save_s=max(measured), step_s=step_s, source=source)
    if forecast is None:
        return None
    size = forecast.checkpoint_bytes / 1e9
    source = f"plan: {size:.3g} GB; a guess until the run has saved once"
    return SaveTime(save_s=forecast.save_s.mid, step_s=step_s, source=source)


def measured_step_s(config: Config, run: RunDirectory) -> float | None:
    """Longest step of late, from the run's metrics."""
    if not run.metrics.exists():
        return None
    rates = []
    for line in run.metrics.read_text(errors="replace").splitlines()[-50:]:
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if record.get("kind") == "train" and record.get("samples_per_s"):
            rates.append(record["samples_per_s"])
    return config.optim.global_batch_size / min(rates) if rates else None


def node_software(config: Config, nodes: Sequence[str]) -> list[Finding]:
    """Drivers and sick nodes, as the last preflight found them."""
    report = last_report(config.run_root)
    drivers, build, where = {}, installed_torch(), ""
    if report is not None:
        drivers = {node: each["driver"] for node, each in report["nodes"].items() if each["gpus"]}
        where = " (last preflight)"
        torch = next((each["torch"] for each in report["nodes"].values() if each["torch"]), None)
        if config.cluster.python and torch:
            build = TorchBuild(torch["version"], torch["cuda"])
    is_cuda = config.cluster.device is Device.cuda
    return driver_findings(build, drivers, is_cuda, where, nodes) + sick_findings(config, report)


def sick_findings(config: Config, report: Report | None) -> list[Finding]:
    """Nodes that the last preflight found bad and that the run does not leave out."""
    if report is None:
        return []
    excluded = slurm.expand(config.cluster.exclude or "")
    left = [node for node in report["exclude"] if node not in excluded]
    if not left:
        return [ok("last preflight", f"{len(report['nodes'])} nodes, {len(report['exclude'])} left out")]
    why = "; ".join(f"{node} {report['nodes'][node]['reasons'][0]}" for node in left)
    means = "a run that gets such a node fails or is slow on all of them"
    change = f"cluster.exclude={','.join([*excluded, *left])}, and tell the administrator"
    return [notice("last preflight", f"bad: {why}", means, change)]


def shapes(config: Config, most: int) -> list[int]:
    """Numbers of nodes that the plan takes: that of the run, and halves and doubles of it."""
    wanted = config.cluster.num_nodes
    near = [
        n for n in (wanted // 4, wanted // 2, wanted, wanted * 2, wanted * 4) if 0 < n <= max(most, wanted)
    ]
    return [n for n in dict.fromkeys(near) if n == wanted or planned(with_nodes(config, n))[1]][:MOST_SHAPES]


def with_nodes(config: Config, num_nodes: int) -> Config:
    changed = copy.deepcopy(config)
    changed.cluster.num_nodes, changed.deadline = num_nodes, None
    return changed


def start_of(config: Config, num_nodes: int) -> ExpectedStart:
    """When Slurm would start the run with so many nodes: it is asked with the very script."""
    with tempfile.TemporaryDirectory() as folder, clean_environment():
        executor = make_executor(with_nodes(config, num_nodes), Path(folder), package_root())
        script = Path(folder) / "job.sh"
        text = executor._make_submission_file_text(executor._submitit_command_str, "doctor")
        script.write_text(text)
        try:
            return expected_start(str(script))
        except ClusterError as error:
            return ExpectedStart(start_time_s=None, nodes="", said=error.found)
