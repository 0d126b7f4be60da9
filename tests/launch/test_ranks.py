"""How ranks are started."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from hpctrain import slurm
from hpctrain.config.schema import ClusterConfig, Config, Device
from hpctrain.launch import network, ranks
from hpctrain.launch.environment import Allocation
from hpctrain.plan.plan import make_plan
from hpctrain.run.directory import RunDirectory


def srun_of(cluster: ClusterConfig, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], dict]:
    """The srun that would be called, and its environment."""
    called: list[tuple[list[str], dict]] = []
    monkeypatch.setattr(ranks, "allocation", lambda: Allocation("7", 0, "n0"))
    monkeypatch.setattr(slurm, "nodes", lambda nodelist: [])
    monkeypatch.setattr(network, "head_address", lambda nodes: "n0")
    monkeypatch.setattr(subprocess, "Popen", lambda command, env: called.append((command, env)))
    (folder / "code" / "abc").mkdir(parents=True)
    (folder / "code" / "current").write_text("abc")
    config = Config(cluster=cluster)
    started = ranks.SlurmRanks(RunDirectory(folder), config, make_plan(config), "7_0_1", lambda ask: ask())
    started.start()
    return called[0]


def test_ranks_bind_themselves_unless_the_user_has_slurm_do_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = ClusterConfig(extra_srun=["--cpu-bind=cores"])
    command, _ = srun_of(chosen, tmp_path, monkeypatch)
    assert [option for option in command if "cpu-bind" in option] == ["--cpu-bind=none", "--cpu-bind=cores"]


@pytest.mark.parametrize("device", Device)
def test_gpus_have_the_numbers_that_the_cluster_file_uses(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    _, environment = srun_of(ClusterConfig(device=device, hardware="cpu"), tmp_path, monkeypatch)
    wanted = {Device.cpu: None, Device.cuda: "PCI_BUS_ID"}[device]
    assert environment.get("CUDA_DEVICE_ORDER") == wanted
