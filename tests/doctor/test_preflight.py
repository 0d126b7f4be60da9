from __future__ import annotations

import copy
from pathlib import Path

import pytest

from hpctrain.cli import compose
from hpctrain.config.schema import ClusterKind, Config, VisionConfig
from hpctrain.doctor.preflight import preflight
from hpctrain.errors import ClusterError, ConfigError
from hpctrain.launch import submit


def slurm_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sbatch: str | None) -> Config:
    """A config for Slurm, on a login node with this sbatch or without one."""
    programs = tmp_path / "bin"
    programs.mkdir()
    if sbatch is not None:
        (programs / "sbatch").write_text(f"#!/bin/sh\n{sbatch}\n")
        (programs / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    config = Config(model=VisionConfig(), name="city", run_root=str(tmp_path / "runs"))
    config.cluster.kind = ClusterKind.slurm
    return config


def test_without_sbatch_no_folder_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ClusterError, match="sbatch is not installed"):
        preflight(slurm_config(tmp_path, monkeypatch, None), as_json=False)
    assert not (tmp_path / "runs").exists()


def test_a_wrong_option_makes_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = slurm_config(tmp_path, monkeypatch, "exit 0")
    config.cluster.extra_sbatch = {"nodes": "3"}
    with pytest.raises(ConfigError, match="nodes"):
        preflight(config, as_json=False)
    assert not (tmp_path / "runs").exists()


def test_a_job_that_slurm_refuses_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = "sbatch: error: invalid partition specified: gpus"
    config = slurm_config(tmp_path, monkeypatch, f"echo '{words}' >&2; exit 1")
    with pytest.raises(ClusterError, match="invalid partition specified: gpus"):
        preflight(config, as_json=False)
    assert list((tmp_path / "runs" / "preflight").iterdir()) == []


def test_nodes_that_the_deadline_chooses_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (point,) = compose(["+exp=vision_city", "cluster.num_nodes=-1", "deadline=36h", f"run_root={tmp_path}"])
    config = point.resolve(without_data=True)
    script = submit.render(copy.deepcopy(config))
    slurm_config(
        tmp_path,
        monkeypatch,
        'for word; do script="$word"; done; /bin/grep -- --nodes= "$script" >&2; exit 1',
    )
    (option,) = (line for line in script.splitlines() if "--nodes=" in line)
    with pytest.raises(ClusterError, match=f"found: {option}\n"):
        preflight(config, as_json=False)
