"""Does a node's NVIDIA driver carry the PyTorch that is installed? Without importing torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from hpctrain.doctor.findings import Finding, notice, ok, problem, question

# First driver of each CUDA toolkit, and the first with which its minor-version compatibility begins (NVIDIA,
# CUDA Toolkit Release Notes, tables 2 and 3, Linux).
_FIRST_DRIVER = {
    (13, 1): (590, 580), (13, 0): (580, 580), (12, 9): (575, 525), (12, 8): (570, 525), (12, 6): (560, 525),
    (12, 5): (555, 525), (12, 4): (550, 525), (12, 3): (545, 525), (12, 2): (535, 525), (12, 1): (530, 525),
    (12, 0): (525, 525), (11, 8): (520, 450),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """An installed torch."""

    version: str
    cuda: str | None  #: toolkit it was built with, `13.0`; None for a CPU build


def installed_torch() -> TorchBuild | None:
    """The torch of this interpreter, read from its files; None if there is none."""
    try:
        found = metadata.distribution("torch")
    except metadata.PackageNotFoundError:
        return None
    path = Path(str(found.locate_file("torch/version.py")))
    return parse_torch_version(found.version, path.read_text() if path.is_file() else "")


def parse_torch_version(version: str, text: str) -> TorchBuild:
    """From the package's version and its version.py: `cuda: Optional[str] = '13.0'`."""
    full = re.search(r"^__version__ = ['\"]([^'\"]+)", text, re.MULTILINE)
    cuda = re.search(r"^cuda\b[^=\n]*= ['\"]([\d.]+)", text, re.MULTILINE)
    return TorchBuild(full[1] if full else version, cuda[1] if cuda else None)


def first_drivers(cuda: str) -> tuple[int, int] | None:
    """Driver branches with which a toolkit works in full, and with minor-version compatibility."""
    major, minor = (int(number) for number in f"{cuda}.0".split(".")[:2])
    known = sorted((key for key in _FIRST_DRIVER if key[0] == major and key[1] <= minor), reverse=True)
    return _FIRST_DRIVER[known[0]] if known else None


def driver_findings(
    build: TorchBuild | None,
    drivers: Mapping[str, str | None],
    is_cuda: bool,
    where: str = "",
    nodes: Sequence[str] = (),
) -> list[Finding]:
    """Judge the drivers of the nodes by the torch that they are to carry.

    Args:
        drivers: node to driver version, as far as known; None for a node without one.
        where: how the drivers are known.
        nodes: those that a job may get.
    """
    if not is_cuda:
        return []
    if build is None:
        change = "pip install torch, docs/install.md"
        return [problem("torch", "not installed in this environment", "no rank can start", change)]
    if build.cuda is None:
        found = f"torch {build.version} is a build for the CPU, and cluster.device=cuda"
        return [problem("torch", found, "ranks find no GPU", "a CUDA build, docs/install.md")]
    branches = first_drivers(build.cuda)
    carried = f"torch {build.version}, built for CUDA {build.cuda}"
    if branches is None:
        return [question("driver", f"{carried}: which driver that needs is not known here")]
    full, least = branches
    if not drivers:
        means = f"it needs driver {full} or newer on every node"
        if least < full:
            means += f" ({least} with minor-version compatibility)"
        return [
            question("driver", f"{carried}; the nodes' drivers are not known", means, "hpctrain preflight")
        ]
    findings = _judge(carried, full, least, drivers, where)
    unknown = [node for node in nodes if node not in drivers]
    if unknown:
        shown = ", ".join(unknown[:3]) + f" and {len(unknown) - 3} more" * (len(unknown) > 3)
        means = "a job may get them all the same"
        findings.append(question("driver", f"not known of {shown}", means, "hpctrain preflight over them"))
    return findings


def _judge(
    carried: str, full: int, least: int, drivers: Mapping[str, str | None], where: str
) -> list[Finding]:
    branch = {node: int((version or "0").split(".")[0]) for node, version in drivers.items()}
    old = [f"{node} {drivers[node] or 'none'}" for node, number in branch.items() if number < least]
    partly = [f"{node} {drivers[node]}" for node, number in branch.items() if least <= number < full]
    if old:
        found = f"{carried}, needs driver {least}; {', '.join(old)}{where}"
        means = "torch.cuda.is_available() is false there"
        change = (
            f"cluster.exclude={','.join(word.split()[0] for word in old)}, or a torch build for an older "
        )
        change += "CUDA (docs/install.md), or ask for a newer driver"
        return [problem("driver", found, means, change)]
    if partly:
        found = f"{carried}, made with driver {full}; {', '.join(partly)}{where}"
        means = "runs by minor-version compatibility; what is compiled to PTX for a newer card is not"
        return [notice("driver", found, means, "ask for a newer driver where torch complains")]
    versions = ", ".join(sorted({str(version) for version in drivers.values()}))
    return [ok("driver", f"{versions} on {len(drivers)} nodes{where}", f"carries {carried}")]
