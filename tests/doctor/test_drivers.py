from __future__ import annotations

import subprocess
import sys

import pytest

from hpctrain.doctor.drivers import (
    TorchBuild,
    driver_findings,
    first_drivers,
    installed_torch,
    parse_torch_version,
)
from hpctrain.doctor.findings import Level

CUDA13 = TorchBuild("2.14.1+cu130", "13.0")
CUDA128 = TorchBuild("2.14.1+cu128", "12.8")


def levels(build: TorchBuild | None, drivers: dict[str, str | None]) -> list[Level]:
    return [finding.level for finding in driver_findings(build, drivers, is_cuda=True)]


def test_the_installed_torch_is_read_as_torch_says_itself() -> None:
    code = "import torch; print(torch.__version__, torch.version.cuda)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    found = installed_torch()
    assert found is not None and f"{found.version} {found.cuda}" == said.strip()


def test_a_cpu_build_has_no_cuda() -> None:
    text = "__version__ = '2.14.1+cpu'\ncuda: Optional[str] = None\nhip: Optional[str] = None\n"
    assert parse_torch_version("2.14.1", text) == TorchBuild("2.14.1+cpu", None)
    assert [f.level for f in driver_findings(TorchBuild("2", None), {}, is_cuda=True)] == [Level.problem]


@pytest.mark.parametrize(
    ("cuda", "branches"),
    [("13.0", (580, 580)), ("12.8", (570, 525)), ("12.6", (560, 525)), ("11.8", (520, 450)), ("9.0", None)],
)
def test_first_drivers_are_those_of_nvidias_release_notes(
    cuda: str, branches: tuple[int, int] | None
) -> None:
    assert first_drivers(cuda) == branches


def test_the_oldest_driver_decides_and_its_node_is_named() -> None:
    (found,) = driver_findings(CUDA13, {"n1": "580.65.06", "n2": "550.54.14"}, is_cuda=True)
    assert found.level is Level.problem and "n2 550.54.14" in found.found and "n1" not in found.change
    assert found.change.startswith("cluster.exclude=n2,")


def test_a_node_without_a_driver_is_a_problem() -> None:
    assert levels(CUDA13, {"n1": None}) == [Level.problem]


def test_minor_version_compatibility_is_noticed() -> None:
    assert levels(CUDA128, {"n1": "535.183.01"}) == [Level.notice]
    assert levels(CUDA128, {"n1": "570.86.10"}) == levels(CUDA13, {"n1": "590.1"}) == [Level.ok]


def test_drivers_that_nobody_has_seen_are_a_question() -> None:
    assert levels(CUDA13, {}) == [Level.question]
    assert driver_findings(CUDA13, {}, is_cuda=False) == []


def test_without_torch_no_rank_can_start() -> None:
    assert levels(None, {"n1": "580.1"}) == [Level.problem]
