"""The code that will run, copied into the run directory: queued jobs do not run tomorrow's edits."""

from __future__ import annotations

import hashlib
import platform
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

# A wheel has its conf/ inside hpctrain/. Ranks read no config, but the figures of the hardware.
PACKAGES = ("hpctrain", "hydra_plugins", "conf/cluster/hardware")
VERSIONS = ("torch", "torchvision", "timm", "hydra-core", "omegaconf", "submitit", "numpy")


def package_root() -> Path:
    """The folder that holds the running `hpctrain` package."""
    return Path(__file__).resolve().parents[2]


def _files(root: Path) -> list[Path]:
    return sorted(
        p
        for package in PACKAGES
        for p in (root / package).rglob("*")
        if p.suffix in (".py", ".yaml", ".json", ".css")
    )


def code_digest(root: Path) -> str:
    """Twelve hex digits over names and contents of the package's files."""
    digest = hashlib.sha256()
    for path in _files(root):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def snapshot_code(destination: Path) -> Path:
    """Copy the running package to `destination/<digest>/` and return that folder."""
    root = package_root()
    digest = code_digest(root)
    target = destination / digest
    if target.is_dir():
        return target
    temporary = destination / f".{digest}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    for path in _files(root):
        copy = temporary / path.relative_to(root)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    temporary.rename(target)
    return target


def source_facts(command: list[str]) -> dict[str, Any]:
    """Where the code came from: git commit and uncommitted diff of the checkout, versions, the command."""
    root = package_root()
    facts: dict[str, Any] = {
        "command": command,
        "python": platform.python_version(),
        "interpreter": sys.executable,
        "versions": {name: _version(name) for name in VERSIONS},
        "git_commit": _git(root, "rev-parse", "HEAD"),
        "git_diff": _git(root, "diff", "HEAD", "--", *PACKAGES),
    }
    return facts


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _git(root: Path, *arguments: str) -> str | None:
    if not (root / ".git").exists():
        return None
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def freeze_code(code: Path) -> Path:
    """Snapshot the running package into a run's `code/` and make it the one that the run uses."""
    code.mkdir(parents=True, exist_ok=True)
    target = snapshot_code(code)
    pointer = code / ".current.tmp"
    pointer.write_text(target.name + "\n")
    pointer.rename(code / "current")
    return target


def current_code(code: Path) -> Path:
    """The frozen package of a run."""
    return code / (code / "current").read_text().strip()
