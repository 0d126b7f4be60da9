"""The verb `calibrate`: sends a job whose ranks measure, and writes what they found as figures."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict
from typing import Any

from hpctrain.config.hardware import Hardware, find_hardware, known_hardware, save_hardware
from hpctrain.config.schema import Config, Device, Precision
from hpctrain.errors import ConfigError, RunError
from hpctrain.launch.script import wait_for_job
from hpctrain.launch.submit import submit
from hpctrain.plan.calibration import Calibration, figures_of
from hpctrain.plan.plan import make_plan
from hpctrain.run.directory import RunDirectory, free_name

LOOK_S = 3.0  # between two looks at a job that is waited for


def calibrate(config: Config, name: str | None, as_json: bool) -> int:
    """Measure the cluster of a config, and write the figures that its plans use from now on.

    Args:
        config: With `calibrate` set. What it says of model, batch and layout is not used.
        name: Of the file of figures; None takes `cluster.hardware`.

    Returns:
        0 when the file is written.

    Raises:
        HpctrainError: the job cannot be sent, or it failed.
    """
    name, is_cuda = name or config.cluster.hardware, config.cluster.device is Device.cuda
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name):
        raise ConfigError(f"calibrate as {name!r}", "it names a file", "letters, digits, _, - and .")
    if is_cuda and name == "cpu":
        raise ConfigError(
            "calibrate cluster.device=cuda as cpu",
            "the file of machines without GPUs would get the figures of one",
            "--name NAME, then cluster.hardware=NAME for runs; or cluster.hardware=rtx4090, if it is one",
        )
    before = find_hardware(name if name in known_hardware() else config.cluster.hardware)
    if is_cuda and before.name == "cpu":  # what was measured without GPUs says nothing of them
        before = Hardware("cpu", {n: f for n, f in before.figures.items() if f.kind != "measured"})
    run, job = carry_out(config)
    calibration = Calibration.from_dict(json.loads(run.calibration.read_text()))
    after = calibrated(name, before, calibration)
    path = save_hardware(after)
    if as_json:
        print(
            json.dumps(
                {"run": str(run.path), "job": job, "file": str(path), **facts(before, after, calibration)}
            )
        )
    else:
        print(text(before, after, calibration))
        print(f"\n  written to {path}, which plans with cluster.hardware={name} read")
        print(f"  sizes and seconds are in {run.calibration}")
    return 0


def carry_out(config: Config) -> tuple[RunDirectory, str | None]:
    """Send the run and wait for its end; without Slurm measure here. Returns its folder and its job."""
    if config.name == "calibrate":  # as its experiment is called: no name was given
        config.name = free_name(config.run_root, "calibrate")
    cluster = config.cluster
    if cluster.device is Device.cuda and config.optim.precision is Precision.fp32:
        _say("hpctrain: products are measured in fp32; optim.precision=bf16 for runs that train in bf16")
    config.optim.global_batch_size = cluster.num_nodes * cluster.ranks_per_node  # one that can be cut
    config.parallelism.microbatch_size = None
    sent = submit(config, make_plan(config))
    if sent.job is not None:
        _say(sent.text())
        try:
            wait_for_job(sent.job, LOOK_S)
        except KeyboardInterrupt:
            again = f"`hpctrain calibrate name={sent.run.name}` with the same options"
            _say(f"hpctrain: job {sent.job} goes on; when it is over, {again} writes its figures")
            raise
    if not sent.run.calibration.exists():
        raise RunError(
            f"calibration {sent.run.name} left no times",
            f"its job {sent.job} is over" if sent.job else "its ranks are over",
            f"hpctrain logs {sent.run.path}",
        )
    return sent.run, sent.job


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def calibrated(name: str, before: Hardware, calibration: Calibration) -> Hardware:
    """The measured figures over those there were; what was not measured keeps its kind and source.

    A data sheet's peak stays: efficiencies are shares of it.
    """
    peak = before.figures.get(calibration.place["peak"])
    known = peak.value if peak is not None and peak.kind == "data_sheet" else None
    measured = figures_of(calibration, known)
    # One node says nothing of a file server's limit, unless nobody has said anything yet.
    if (
        "storage_total_gbps" not in measured
        and "storage_total_gbps" not in before
        and "storage_gbps" in measured
    ):
        measured["storage_total_gbps"] = measured["storage_gbps"]
    return Hardware(name, {**before.figures, **measured})


def _is_new(figure: str, after: Hardware, calibration: Calibration) -> bool:
    return after.figures[figure].source == calibration.source


def facts(before: Hardware, after: Hardware, calibration: Calibration) -> dict[str, Any]:
    """What was measured beside what was known, and the names of what was not measured."""
    new = [figure for figure in after.figures if _is_new(figure, after, calibration)]
    return {
        "place": calibration.place,
        "measured": {
            figure: {**asdict(after.figures[figure]), "before": before.get(figure)} for figure in new
        },
        "kept": [figure for figure in after.figures if figure not in new],
    }


def text(before: Hardware, after: Hardware, calibration: Calibration) -> str:
    """The table for a terminal."""
    place = calibration.place
    lines = [
        f"calibrate: {place['nodes']} nodes x {place['ranks_per_node']} ranks, {place['device']}, "
        f"{place['precision']}, torch {place['torch']}",
        f"  {'figure':<26}{'before':>10}  {'':<12}{'measured':>10}  range",
    ]
    kept = []
    for figure, now in after.figures.items():
        if not _is_new(figure, after, calibration):
            kept.append(figure)
            continue
        old = before.figures.get(figure)
        was, kind = (f"{old.value:.4g}", old.kind) if old else ("", "")
        spread = f"{now.low:.3g} … {now.high:.3g}" if now.low < now.high else ""
        lines.append(f"  {figure:<26}{was:>10}  {kind:<12}{now.value:>10.4g}  {spread}".rstrip())
    if kept:
        lines.append(f"  not measured, as before: {', '.join(kept)}")
    return "\n".join(lines)
