"""The wheel: what it holds, and that it works away from the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def run(command: list[str], cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        command, cwd=cwd, env={**kept, **environment}, capture_output=True, text=True, timeout=300
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that a build leaves nothing in the checkout."""
    source = tmp_path_factory.mktemp("source")
    for name in ("hpctrain", "hydra_plugins", "conf", "tests"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    out = tmp_path_factory.mktemp("dist")
    done = run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)], source)
    assert done.returncode == 0, done.stderr
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet", "--target"]
    done = run([*command, str(target), str(wheel)], target)
    assert done.returncode == 0, done.stderr
    return target


def test_wheel_holds_package_plugin_and_configs_and_no_tests(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for path in (ROOT / "conf").rglob("*.yaml"):
        assert f"hpctrain/conf/{path.relative_to(ROOT / 'conf').as_posix()}" in names
    assert "hpctrain/plan/backbones.json" in names
    for package in ("hpctrain", "hydra_plugins"):
        for path in (ROOT / package).rglob("*.py"):
            assert path.relative_to(ROOT).as_posix() in names
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"hpctrain", "hydra_plugins"}


def test_installed_wheel_plans_the_laptop_run_away_from_the_checkout(installed: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import hpctrain; print(hpctrain.__file__)"]
    assert Path(run(command, tmp_path, PYTHONPATH=str(installed)).stdout.strip()).is_relative_to(installed)
    done = run(
        [sys.executable, "-m", "hpctrain", "plan", "+exp=vision_city_laptop"],
        tmp_path,
        PYTHONPATH=str(installed),
    )
    assert done.returncode == 0, done.stderr
    assert "dp_replicate 2" in done.stdout and "64 samples a step" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_installed_wheel_finds_its_launcher_and_freezes_its_own_code(installed: Path, tmp_path: Path) -> None:
    sweep = run(
        [sys.executable, "-m", "hpctrain", "-m", "+exp=vision_city_laptop", "seed=0,1"],
        tmp_path,
        PYTHONPATH=str(installed),
    )
    assert sweep.returncode == 2 and "a sweep goes to Slurm as one job array" in sweep.stderr
    code = (
        "from pathlib import Path; from hpctrain.launch.snapshot import freeze_code;"
        f"print(freeze_code(Path({str(tmp_path)!r})))"
    )
    done = run([sys.executable, "-c", code], tmp_path, PYTHONPATH=str(installed))
    assert done.returncode == 0, done.stderr
    frozen = Path(done.stdout.strip())
    assert (frozen / "hpctrain" / "launch" / "supervise.py").is_file()
    assert not list(frozen.rglob("submitit")), "only our own packages are copied"


def test_console_script_is_declared(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (entry,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
    assert "hpctrain = hpctrain.cli:main" in archive.read(entry).decode()
