"""The verb `preflight`: a job over all nodes of the request checks each of them, and their links.

Nodes answer in files of `<run_root>/preflight/<number>/`; the verdict is `preflight.json` there, and a copy
of a cluster's last one in `<run_root>/preflight/`, which `doctor` reads.
"""

from __future__ import annotations

import copy
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpctrain import slurm
from hpctrain.config.load import load_config, save_config
from hpctrain.config.schema import ClusterKind, Config, Device, GpuRequest
from hpctrain.doctor import verdict
from hpctrain.doctor.probe import answer_path, check
from hpctrain.errors import ClusterError, RunError
from hpctrain.launch import submit
from hpctrain.launch.environment import allocation, node_name
from hpctrain.launch.ranks import gpu_option
from hpctrain.launch.script import check_options, check_sbatch, last_words, send_function
from hpctrain.launch.snapshot import package_root
from hpctrain.run.directory import write_json

Report = dict[str, Any]

TIME_LIMIT_MIN = 15
STEP_S = 300.0  # of a check on all nodes; one that has not answered by then is bad
NFS_S = 10.0  # how long a file written on another node may stay unseen
LOOK_S = 10.0  # between two looks at the queue


def preflight(config: Config, as_json: bool) -> int:
    """Check the nodes, print a verdict of each and what to exclude; 1 if a node is bad.

    Sends a job and waits for it; inside an allocation it checks that, with cluster.kind=local this machine.
    Raises HpctrainError where no job can be sent or it ends without a verdict.
    """
    is_local, is_inside = config.cluster.kind is ClusterKind.local, allocation().is_slurm
    if not is_local:
        check_options(config.cluster)
        if not is_inside:
            check_sbatch()
            if config.cluster.num_nodes == -1:
                config = copy.deepcopy(config)
                submit.planned(config)  # which chooses
    folder = new_folder(config.run_root)
    if is_local:
        report = check_here(config, folder)
    else:
        report = run_in_allocation(config, folder) if is_inside else run_as_job(config, folder)
        shutil.copyfile(folder / "preflight.json", folder.parent / "preflight.json")
    print(json.dumps(report) if as_json else to_text(report))
    return 1 if report["exclude"] else 0


def new_folder(run_root: str) -> Path:
    """`<run_root>/preflight/1`, or the next number that is free."""
    root = Path(run_root).absolute() / "preflight"
    root.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        try:
            (root / str(number)).mkdir()
            return root / str(number)
        except FileExistsError:
            continue
    raise AssertionError


def last_report(run_root: str) -> Report | None:
    """The last verdict, if there is one."""
    path = Path(run_root) / "preflight" / "preflight.json"
    try:
        report = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError):
        return None
    return report if isinstance(report, dict) else None


def check_here(config: Config, folder: Path) -> Report:
    """Check this machine alone."""
    write_request(config, folder)
    answer = check(folder)
    return conclude(config, folder, {node_name(): answer}, [], {})


def write_request(config: Config, folder: Path) -> None:
    write_json(folder / "request.json", {"device": config.cluster.device.name})


def run_as_job(config: Config, folder: Path) -> Report:
    """Send the job and wait; Ctrl-C cancels it. The folder of a job that Slurm refuses is removed."""
    job_config = copy.deepcopy(config)
    job_config.name = "preflight"
    limit = config.cluster.time_limit_min or TIME_LIMIT_MIN
    job_config.cluster.time_limit_min = min(limit, TIME_LIMIT_MIN)
    save_config(job_config, folder / "config.yaml")
    try:
        job = send_function(job_config, folder, carry_out)
    except ClusterError:
        shutil.rmtree(folder)
        raise
    print(
        f"job {job} checks {config.cluster.num_nodes} nodes; answers in {folder}", file=sys.stderr, flush=True
    )
    try:
        wait(job, folder)
    except KeyboardInterrupt:
        slurm.cancel(job)
        raise
    report: Report = json.loads((folder / "preflight.json").read_text())
    return report


def carry_out(folder: str) -> None:
    """What the job runs, on its first node."""
    run_in_allocation(load_config(Path(folder) / "config.yaml"), Path(folder))


def wait(job: str, folder: Path) -> None:
    """Return when the verdict is there. Raises RunError if the job ended without one."""
    told, next_look = "", 0.0
    while not (folder / "preflight.json").exists():
        if time.monotonic() >= next_look:
            next_look = time.monotonic() + LOOK_S
            found = slurm.job(job)
            text = f"job {job} {found.state} {found.reason}".strip() if found else f"job {job} is gone"
            if found is None or found.state in slurm.TERMINAL_STATES:
                time.sleep(0 if (folder / "preflight.json").exists() else NFS_S)
                if (folder / "preflight.json").exists():
                    return
                words = last_words(folder)
                raise RunError("preflight: the job ended without a verdict", f"{text}\n{words}")
            if text != told:
                print(text, file=sys.stderr, flush=True)
                told = text
        time.sleep(0.5)


def run_in_allocation(config: Config, folder: Path) -> Report:
    """Check the nodes of the allocation around us and write the verdict."""
    nodelist = allocation().nodelist
    assert nodelist is not None
    infos = slurm.nodes(nodelist)
    names = [info.name for info in infos]
    write_request(config, folder)
    run_step(config, "check", folder, names)
    answers = collect(folder, names, "check")
    alive = [info for info in infos if answers[info.name] is not None]
    links: list[dict[str, Any]] = []
    meanwhile: dict[str, dict[str, Any]] = {}
    if len(alive) > 1:
        places = [place(info, answers[info.name] or {}, config.cluster.network_interface) for info in alive]
        write_json(folder / "nodes.json", {"nodes": places, "interface": config.cluster.network_interface})
        links, meanwhile = measure(config, folder, [info.name for info in alive])
    return conclude(config, folder, answers, links, meanwhile)


def run_step(config: Config, verb: str, folder: Path, names: Sequence[str]) -> None:
    """Run the probe once on each of these nodes; what hangs is ended."""
    cluster = config.cluster
    command = [
        "srun",
        f"--nodes={len(names)}",
        f"--ntasks={len(names)}",
        "--ntasks-per-node=1",
        f"--nodelist={','.join(names)}",
        f"--cpus-per-task={cluster.cpus_per_rank * cluster.ranks_per_node}",
        *gpu_option(cluster),
        "--cpu-bind=none",
        "--kill-on-bad-exit=0",
        "--wait=0",
        "--export=ALL",
        f"--output={folder / f'{verb}_%t.log'}",
        *cluster.extra_srun,
        *(cluster.python or sys.executable, "-u", "-m", "hpctrain.doctor.probe", verb, str(folder)),
    ]
    path = os.pathsep.join(filter(None, [str(package_root()), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, **cluster.env, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
    process = subprocess.Popen(command, env=environment)
    try:
        process.wait(timeout=STEP_S)
    except subprocess.TimeoutExpired:
        process.terminate()
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def collect(folder: Path, names: Sequence[str], verb: str) -> dict[str, dict[str, Any] | None]:
    """Answers by node; None where there is none, once the file system has had time to show it."""
    deadline = time.monotonic() + NFS_S
    answers: dict[str, dict[str, Any] | None] = dict.fromkeys(names)
    while True:
        for name in names:
            path = answer_path(folder, name, verb)
            if answers[name] is None and path.exists():
                answers[name] = json.loads(path.read_text())
        if all(answer is not None for answer in answers.values()) or time.monotonic() > deadline:
            return answers
        time.sleep(0.2)


def place(info: slurm.NodeInfo, answer: dict[str, Any], interface: str | None) -> dict[str, Any]:
    """Where the others reach a node: its address on the chosen interface, else what Slurm knows."""
    cards = {card["name"]: card["address"] for card in answer["nics"]}
    address = cards.get(interface or "") or info.address
    return {"node": info.name, "address": address, "port": answer["port"]}


def measure(
    config: Config, folder: Path, names: Sequence[str]
) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
    """All links, and the answers they came with; slow ones are measured again before they count as slow."""
    run_step(config, "links", folder, names)
    answers = {n: a for n, a in collect(folder, names, "links").items() if a is not None}
    links = [link for answer in answers.values() for link in answer["links"]]
    if not verdict.slow_links(links):
        return links, answers
    for name in names:
        answer_path(folder, name, "links").unlink(missing_ok=True)
    run_step(config, "links", folder, names)
    again = [a for a in collect(folder, names, "links").values() if a is not None]
    return verdict.better(links, [link for answer in again for link in answer["links"]]), answers


def conclude(
    config: Config,
    folder: Path,
    answers: verdict.Answers,
    links: Sequence[dict[str, Any]],
    meanwhile: dict[str, dict[str, Any]],
) -> Report:
    """Judge, and write the verdict down."""
    cluster = config.cluster
    num_gpus = 0 if cluster.gpu_request is GpuRequest.none else cluster.ranks_per_node
    verdicts = verdict.judge(answers, num_gpus=num_gpus, is_cuda=cluster.device is Device.cuda)
    verdict.judge_interfaces(verdicts, answers, cluster.network_interface)
    verdict.judge_links(verdicts, links)
    fabric = verdict.judge_fabric(verdicts, meanwhile) if meanwhile else None
    facts = {n: a or {} for n, a in answers.items()}
    report: Report = {
        "job": allocation().job,
        "time": round(time.time()),
        "nodes": {
            node: {
                **each.to_dict(),
                "driver": facts[node].get("driver"),
                "torch": facts[node].get("torch"),
                "gpus": len(facts[node].get("gpus", [])),
            }
            for node, each in verdicts.items()
        },
        "links": list(links),
        "fabric": fabric,
        "exclude": [node for node, each in verdicts.items() if each.is_bad],
    }
    write_json(folder / "preflight.json", report)
    return report


def to_text(report: Report) -> str:
    """A verdict per node, the fabric, and what to exclude."""
    lines = []
    for node, each in report["nodes"].items():
        lines.append(f"{'✗' if each['reasons'] else '✓'} {node}  {each['verdict']}")
        lines += [f"    bad: {reason}" for reason in each["reasons"]]
        lines += [f"    {text}" for text in each["notices"]]
    speeds = [link["gbps"] for link in report["links"] if link["gbps"]]
    if speeds:
        lines.append(f"links   {min(speeds):g} to {max(speeds):g} GB/s over TCP, all nodes at once")
    if report["fabric"]:
        word = {True: "yes", False: "no", None: "not known"}[report["fabric"]["lossless"]]
        lines.append(f"lossless fabric   {word}: {report['fabric']['why']}")
    bad = ",".join(report["exclude"])
    lines.append(f"leave out: cluster.exclude={bad}" if bad else f"{len(report['nodes'])} nodes, none is bad")
    return "\n".join(lines)
