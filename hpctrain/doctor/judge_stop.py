"""Does Slurm leave a run the time to save, and bring it back? Findings on preemption, time limit and requeue.

The warning windows are those of Slurm's source (`_job_check_grace_internal` of interfaces/preempt.c,
`_rpc_terminate_job` of slurmd/req.c, `send_job_warn_signal` of slurmctld/job_mgr.c).
"""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.config.schema import ClusterConfig
from hpctrain.doctor.findings import Finding, notice, ok, problem, question
from hpctrain.slurm.records import PartitionInfo
from hpctrain.slurm.site import Qos, Site

LEAST_KILL_WAIT_S = 5  # slurmd waits at least this long between SIGTERM and SIGKILL
LAST_WORDS_S = 10  # in which the supervisor writes down why the run ended and asks for the next start
ROOM = 2.0  # a save may take so many times as long when others use the storage too
EXIT_CODES = {1, 2, 3, 4}  # of a supervisor that gives up (hpctrain.errors)


@dataclass(frozen=True, kw_only=True)
class SaveTime:
    """How long it takes a run to stop with nothing lost: the step in hand, then the save."""

    save_s: float
    step_s: float = 0.0
    source: str  #: `measured: …` or `plan: …`

    @property
    def total_s(self) -> float:
        return self.save_s + self.step_s

    def text(self) -> str:
        step = f" and a step {self.step_s:.3g} s" if self.step_s else ""
        return f"a save takes {self.save_s:.3g} s{step} ({self.source})"


@dataclass(frozen=True, kw_only=True)
class Preemption:
    """What befalls our job when another one wants its nodes."""

    mode: str  #: OFF, CANCEL, REQUEUE, SUSPEND
    grace_s: int
    where: str  #: the setting that grace comes from
    by: tuple[str, ...]  #: partitions or QOS that may do it


def preemption(site: Site, partition: PartitionInfo, qos: Qos | None) -> Preemption | None:
    """Who may preempt a job in this partition under this QOS, and how; None if nobody may."""
    kind = site.setting("PreemptType").rpartition("/")[2]
    words = site.setting("PreemptMode").split(",")
    mode = next((word for word in words if word not in ("GANG", "WITHIN", "PRIORITY")), "OFF")
    if kind == "partition_prio":
        own = _tier(site, partition.name)
        shared = {node.name for node in site.nodes_of(partition.name)}
        by = tuple(
            name
            for name in site.partitions
            if _tier(site, name) > own and shared & {node.name for node in site.nodes_of(name)}
        )
        own_mode = partition.preempt_mode.split(",")[-1] or mode
        return _preemption(own_mode, partition.grace_time_s, f"partition {partition.name}", by)
    if kind == "qos" and qos is not None and site.qos is not None:
        by = tuple(name for name, each in site.qos.items() if qos.name in each.preempts)
        own_mode = mode if qos.preempt_mode.lower() == "cluster" else qos.preempt_mode.upper().split(",")[-1]
        return _preemption(own_mode, qos.grace_time_s, f"QOS {qos.name}", by)
    return None


def _preemption(mode: str, grace_s: int, where: str, by: tuple[str, ...]) -> Preemption | None:
    if not by or mode in ("OFF", "DISABLED"):
        return None
    return Preemption(mode=mode, grace_s=grace_s, where=where, by=by)


def _tier(site: Site, name: str) -> int:
    return int(site.fields[name].get("PriorityTier", "1"))


def preemption_findings(
    site: Site, partition: PartitionInfo, qos: Qos | None, save: SaveTime | None
) -> list[Finding]:
    """Whether a preempted run can save and comes back."""
    if site.setting("PreemptType").endswith("qos") and qos is None:
        return [
            question(
                "preemption",
                "QOS decide who is preempted, and the run's QOS is not known",
                change="name it: cluster.qos",
            )
        ]
    found = preemption(site, partition, qos)
    if found is None:
        return [ok("preemption", f"no job of partition {partition.name} is preempted")]
    by = f"by jobs of {', '.join(found.by)}"
    findings = [_mode_finding(found, by, save), _grace_finding(site, found, save)]
    words = site.setting("PreemptParameters") + site.setting("SlurmctldParameters")
    sent = "the --signal signal" if "send_user_signal" in words else "SIGTERM alone"
    findings.append(ok("send_user_signal", f"a preempted step gets {sent}", "a run saves at either"))
    batch, is_counted = site.number("MaxBatchRequeue"), site.version >= (24, 5) and found.mode == "REQUEUE"
    if batch is not None and batch < 5 and is_counted:
        findings.append(
            notice(
                "MaxBatchRequeue",
                f"{batch}",
                "a job that ends by itself within its grace that often is held by Slurm",
                "scontrol release JOB when it happens; ask for MaxBatchRequeue=5 or more",
            )
        )
    return findings


def _mode_finding(found: Preemption, by: str, save: SaveTime | None) -> Finding:
    if found.mode == "REQUEUE":
        return ok("PreemptMode", f"REQUEUE, {by}", "a preempted run comes back")
    if found.mode == "CANCEL":
        has_time = save is not None and ROOM * save.total_s <= found.grace_s
        return (notice if has_time else problem)(
            "PreemptMode",
            f"CANCEL ({found.where}), {by}",
            "a run comes back only if it has saved and requeued itself before its grace ends; else it "
            "waits for your `hpctrain resume`",
            "ask for PreemptMode=REQUEUE",
        )
    return problem(
        "PreemptMode",
        f"{found.mode} ({found.where}), {by}",
        "a suspended run keeps its memory, its connections time out, and it starts again from its last "
        "checkpoint when it wakes",
        "ask for PreemptMode=REQUEUE, or use a partition whose jobs are not suspended",
    )


def _grace_finding(site: Site, found: Preemption, save: SaveTime | None) -> Finding:
    kill_wait = max(site.seconds("KillWait") or 30, LEAST_KILL_WAIT_S)
    window = found.grace_s or kill_wait
    what = (
        f"{found.grace_s} s ({found.where})"
        if found.grace_s
        else f"0 ({found.where}): KillWait, {kill_wait} s, is all there is"
    )
    if save is None:
        return question(
            "GraceTime",
            what,
            "how long this run takes to save is not known yet",
            "look again when it has saved once, or give cluster.figures.write_gbps",
        )
    needed = save.total_s + LAST_WORDS_S * bool(found.grace_s == 0)
    wish = max(60, round(ROOM * needed + 9, -1))
    if needed > window:
        lost = "a preempted run is killed while it saves and repeats all since its last checkpoint"
        ask = f"ask for GraceTime={wish:.0f}; meanwhile a smaller checkpoint.every_steps loses less"
        return problem("GraceTime", f"{what}; {save.text()}", lost, ask)
    if needed * ROOM > window:
        tight = "enough when the storage is idle, not when it is busy"
        return notice("GraceTime", f"{what}; {save.text()}", tight, f"ask for GraceTime={wish:.0f}")
    return ok("GraceTime", f"{what}; {save.text()}")


def ending_findings(site: Site, cluster: ClusterConfig, save: SaveTime | None) -> list[Finding]:
    """The time limit's warning, KillWait, and what brings a job back."""
    findings = []
    lead = cluster.signal_lead_s
    if save is not None and save.total_s > lead:
        findings.append(
            problem(
                "signal_lead_s",
                f"cluster.signal_lead_s={lead}; {save.text()}",
                "at its time limit the run is killed while it saves",
                f"cluster.signal_lead_s={max(60, round(ROOM * save.total_s + 9, -1)):.0f}",
            )
        )
    else:
        findings.append(
            ok("signal_lead_s", f"ranks are warned {lead} to {lead + 60} s before the time limit")
        )
    kill_wait = max(site.seconds("KillWait") or 30, LEAST_KILL_WAIT_S)
    if kill_wait < LAST_WORDS_S:
        findings.append(
            notice(
                "KillWait",
                f"{site.setting('KillWait')}",
                "at scancel the supervisor may be killed before it has written down why the run ended; the "
                "next start does it instead",
                "ask for KillWait=30, Slurm's default",
            )
        )
    else:
        findings.append(ok("KillWait", f"{kill_wait} s from SIGTERM to SIGKILL"))
    return findings + requeue_findings(site)


def requeue_findings(site: Site) -> list[Finding]:
    findings = []
    value = site.setting("JobRequeue") or "1"
    findings.append(ok("JobRequeue", f"{value}", "jobs are sent with --requeue, which decides"))
    codes = parse_exit_codes(site.setting("RequeueExit"))
    held = parse_exit_codes(site.setting("RequeueExitHold"))
    if codes & EXIT_CODES:
        findings.append(
            problem(
                "RequeueExit",
                site.setting("RequeueExit"),
                f"a run that failed for good ({_listed(codes & EXIT_CODES)}) is started again and again",
                "ask to take these exit codes out; until then `hpctrain cancel` a run that has failed",
            )
        )
    elif held & EXIT_CODES:
        findings.append(
            notice(
                "RequeueExitHold",
                site.setting("RequeueExitHold"),
                f"a run that failed ({_listed(held & EXIT_CODES)}) stays in the queue, held",
                "scancel it, then hpctrain resume",
            )
        )
    else:
        findings.append(ok("RequeueExit", site.setting("RequeueExit") or "none", "a failed run stays failed"))
    return [*findings, *restart_findings(site)]


def restart_findings(site: Site) -> list[Finding]:
    """How soon a start follows the one before."""
    findings = []
    expire = [word.partition("=")[2] for word in site.setting("AuthInfo").split(",") if "cred_expire" in word]
    delay = int(expire[0]) if expire and expire[0].isdigit() else 120
    for word in site.setting("SchedulerParameters").split(","):
        if word.startswith("requeue_delay="):
            delay = int(word.partition("=")[2])
    findings.append(ok("requeue delay", f"a requeued job waits about {delay} s before it may start"))
    unseen = site.seconds("SlurmdTimeout")
    if unseen is not None and (unseen == 0 or unseen > 600):
        findings.append(
            notice(
                "SlurmdTimeout",
                f"{unseen} s",
                "a run on a lost node waits that long (0: for ever) until Slurm gives it another",
                "ask for SlurmdTimeout=300, Slurm's default",
            )
        )
    return findings


def parse_exit_codes(text: str) -> set[int]:
    """`1,5-7` to the numbers."""
    codes: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if first.isdigit() and (last.isdigit() or not dash):
            codes |= set(range(int(first), int(last or first) + 1))
    return codes


def _listed(codes: set[int]) -> str:
    return f"exit code {', '.join(map(str, sorted(codes)))}"
