"""How a site has set Slurm up, as typed records: settings, partitions, QOS, associations, shares.

The parsers are pure functions of text; `read_site` asks. Accounts may be absent: then their fields are None.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpctrain.errors import ClusterError
from hpctrain.slurm import nodes, run, version
from hpctrain.slurm.records import (
    NodeInfo,
    PartitionInfo,
    parse_duration_s,
    parse_partitions,
    parse_records,
    parse_tables,
    parse_time_s,
)

# States with which a node takes no work until somebody acts (scontrol(1), NODES, State). One that is powered
# down to save energy wakes up by itself.
_OUT = {"DOWN", "DRAIN", "DRAINED", "DRAINING", "FAIL", "FAILING", "NOT_RESPONDING", "NO_RESPOND", "MAINT"}
_OUT |= {"ERROR", "UNKNOWN", "FUTURE", "INVALID_REG"}


@dataclass(frozen=True, kw_only=True)
class Qos:
    """A quality of service and its limits; None where it sets none."""

    name: str
    grace_time_s: int
    preempt_mode: str  #: `cluster` takes the global one
    preempts: tuple[str, ...]  #: QOS whose jobs it may preempt
    max_wall_s: int | None
    max_submit_per_user: int | None
    max_tres_per_user: str
    flags: str


@dataclass(frozen=True, kw_only=True)
class Association:
    """What a user may do under an account."""

    account: str
    partition: str  #: empty for all
    qos: tuple[str, ...]
    default_qos: str
    max_submit: int | None
    max_wall_s: int | None


@dataclass(frozen=True, kw_only=True)
class Share:
    """A user's standing under an account (sshare(1))."""

    account: str
    norm_shares: float | None  #: promised share
    effective_usage: float | None  #: share that was used of late
    fair_share: (
        float  #: 1 is best; 0.5 is used as promised (classic), or the middle of the ranking (Fair Tree)
    )


@dataclass(frozen=True, kw_only=True)
class Standing:
    """Priority of a pending job, and what it is made of (sprio(1)), weighted."""

    job_id: str
    priority: float
    factors: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Site:
    """Everything that `doctor` reads of a cluster."""

    user: str
    version: tuple[int, int]
    settings: Mapping[str, str]  #: of `scontrol show config`, as printed
    partitions: Mapping[str, PartitionInfo]
    fields: Mapping[str, Mapping[str, str]]  #: of each partition, as printed
    nodes: tuple[NodeInfo, ...]
    qos: Mapping[str, Qos] | None = None  #: None where there is no accounting
    associations: tuple[Association, ...] | None = None
    shares: tuple[Share, ...] = ()
    standings: tuple[Standing, ...] = ()
    queued_jobs: int = 0  #: of this user, pending or running

    def setting(self, name: str) -> str:
        """Empty for what Slurm prints as not set, and for what this version does not know."""
        value = self.settings.get(name, "")
        return "" if value in ("(null)", "None", "N/A", "none") else value

    def seconds(self, name: str) -> int | None:
        """A setting such as `30 sec` or `5 min`; None if there is no number in it."""
        found = re.match(r"(\d+)(?: (min))?", self.setting(name))
        return None if found is None else int(found[1]) * (60 if found[2] else 1)

    def number(self, name: str) -> int | None:
        return int(self.setting(name)) if self.setting(name).isdigit() else None

    @property
    def has_accounting(self) -> bool:
        return self.setting("AccountingStorageType").rpartition("/")[2] not in ("", "none")

    def default_partition(self) -> str | None:
        return next((name for name, each in self.partitions.items() if each.is_default), None)

    def nodes_of(self, partition: str) -> list[NodeInfo]:
        return [node for node in self.nodes if partition in node.partitions]


@dataclass(frozen=True, kw_only=True)
class ExpectedStart:
    """What `sbatch --test-only` answered."""

    start_time_s: float | None  #: None where Slurm would not take the job
    nodes: str
    said: str


@dataclass(frozen=True, slots=True)
class Gres:
    """A generic resource of a node: `gpu:rtx4090:8`."""

    name: str
    type: str | None
    count: int


def is_out(node: NodeInfo) -> bool:
    """Whether a node is down, drained or leaves: it will take no job until somebody acts."""
    words = node.state.split("+")
    return any(word.rstrip("*~#!%$@^-") in _OUT or word.endswith("*") for word in words)


def parse_gres(text: str) -> list[Gres]:
    """`gpu:rtx4090:8(S:0-1),gpu:a100:no_consume:2,mps:400` to its parts; units such as 4K are thousands."""
    found = []
    for part in re.sub(r"\([^)]*\)", "", text).split(","):
        words = [word for word in part.split(":") if word and word != "no_consume"]
        if not words:
            continue
        count = re.fullmatch(r"(\d+)([KMG]?)", words[-1])
        number = int(count[1]) * 1024 ** " KMG".index(count[2] or " ") if count else 1
        middle = words[1:-1] if count else words[1:]
        found.append(Gres(words[0], middle[0] if middle else None, number))
    return found


def gpus_of(node: NodeInfo) -> list[Gres]:
    return [gres for gres in parse_gres(node.gres) if gres.name == "gpu"]


def parse_settings(text: str) -> dict[str, str]:
    """What `scontrol show config` prints."""
    pairs = (line.split("=", 1) for line in text.splitlines() if " = " in line or line.rstrip().endswith("="))
    return {key.strip(): value.strip() for key, value in pairs}


def parse_qos(text: str) -> dict[str, Qos]:
    """What `sacctmgr --parsable2 show qos` prints, with its header."""
    return {
        row["Name"]: Qos(
            name=row["Name"],
            grace_time_s=parse_duration_s(row.get("GraceTime", "")) or 0,
            preempt_mode=row.get("PreemptMode", "") or "cluster",
            preempts=_names(row.get("Preempt", "")),
            max_wall_s=parse_duration_s(row.get("MaxWall", "")),
            max_submit_per_user=_number(row.get("MaxSubmitPU", "")),
            max_tres_per_user=row.get("MaxTRESPU", ""),
            flags=row.get("Flags", ""),
        )
        for row in parse_tables(text)
    }


def parse_associations(text: str, user: str) -> list[Association]:
    """Those of one user from what `sacctmgr --parsable2 show assoc` prints, with its header."""
    return [
        Association(
            account=row["Account"],
            partition=row.get("Partition", ""),
            qos=_names(row.get("QOS", "")),
            default_qos=row.get("Def QOS", ""),
            max_submit=_number(row.get("MaxSubmit", "") or row.get("MaxSubmitJobs", "")),
            max_wall_s=parse_duration_s(row.get("MaxWall", "")),
        )
        for row in parse_tables(text)
        if row.get("User") == user
    ]


def parse_shares(text: str, user: str) -> list[Share]:
    """Those of one user from what `sshare --parsable2 --all` prints, with its header."""
    shares = []
    for row in parse_tables(text):
        standing = _real(row.get("FairShare", ""))
        if row.get("User") == user and standing is not None:
            usage = _real(row.get("EffectvUsage", ""))
            norm = _real(row.get("NormShares", ""))
            share = Share(
                account=row["Account"], norm_shares=norm, effective_usage=usage, fair_share=standing
            )
            shares.append(share)
    return shares


def parse_standings(text: str) -> list[Standing]:
    """What `sprio --noheader --format='%i|%Y|%A|%F|%J|%P|%Q|%T'` prints."""
    names = ("age", "fair share", "job size", "partition", "QOS")
    standings = []
    for line in text.splitlines():
        job_id, priority, *factors = (word.strip() for word in line.split("|"))
        values = {name: _real(value) for name, value in zip(names, factors, strict=False)}
        kept = {name: value for name, value in values.items() if value}
        standings.append(Standing(job_id=job_id, priority=_real(priority) or 0.0, factors=kept))
    return standings


def parse_expected_start(text: str, returncode: int) -> ExpectedStart:
    """What `sbatch --test-only` prints on stderr."""
    said = " ".join(line.removeprefix("sbatch: ").strip() for line in text.splitlines() if line.strip())
    found = re.search(r"to start at (\S+) .*? on (?:nodes )?(\S+)", said)
    if returncode or not found:
        said = said.replace("allocation failure: ", "").replace("error: ", "")
        return ExpectedStart(start_time_s=None, nodes="", said=said or f"sbatch exited with {returncode}")
    return ExpectedStart(start_time_s=parse_time_s(found[1]), nodes=found[2], said=said)


def expected_start(script: str) -> ExpectedStart:
    """When Slurm would start this batch script; nothing is queued."""
    done = run(["sbatch", "--test-only", script], patience_s=10, check=False)
    return parse_expected_start(done.stderr, done.returncode)


def read_site(user: str) -> Site:
    """Ask Slurm for all of it. Raises ClusterError where the controller does not answer."""
    text = run(["scontrol", "show", "partition"]).stdout
    facts: dict[str, Any] = {
        "user": user,
        "version": version(),
        "settings": parse_settings(run(["scontrol", "show", "config"]).stdout),
        "partitions": {each.name: each for each in parse_partitions(text)},
        "fields": {each["PartitionName"]: each for each in parse_records(text) if "PartitionName" in each},
        "nodes": tuple(nodes()),
    }
    qos = _optional(["sacctmgr", "--parsable2", "show", "qos"])
    own = _optional(["sacctmgr", "--parsable2", "show", "assoc", f"user={user}"])
    shares = _optional(["sshare", "--parsable2", f"--users={user}"])
    standings = _optional(["sprio", "--noheader", f"--user={user}", "--format=%i|%Y|%A|%F|%J|%P|%Q|%T"])
    queued = _optional(["squeue", "--noheader", "--array", f"--user={user}", "--format=%i"])
    return Site(
        **facts,
        qos=parse_qos(qos) if qos else None,
        associations=tuple(parse_associations(own, user)) if own and qos else None,
        shares=tuple(parse_shares(shares or "", user)),
        standings=tuple(parse_standings(standings or "")),
        queued_jobs=len((queued or "").split()),
    )


def _optional(argv: Sequence[str]) -> str | None:
    """What a program prints that a site may lack or forbid; None if it has nothing to say."""
    if shutil.which(argv[0]) is None:
        return None
    try:
        done = run(argv, timeout_s=20, patience_s=5, check=False)
    except ClusterError:
        return None
    return None if done.returncode else done.stdout


def _names(text: str) -> tuple[str, ...]:
    return tuple(word for word in text.split(",") if word)


def _number(text: str) -> int | None:
    return int(text) if text.isdigit() else None


def _real(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
