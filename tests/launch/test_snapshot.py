"""The code in a run directory: complete, importable, and untouched by later edits."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hpctrain.launch import snapshot
from hpctrain.launch.snapshot import code_digest, current_code, freeze_code, package_root, source_facts


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of this checkout's packages that a test may edit, taken for the running one."""
    copy = tmp_path / "checkout"
    for package in snapshot.PACKAGES:
        shutil.copytree(
            package_root() / package, copy / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    monkeypatch.setattr(snapshot, "package_root", lambda: copy)
    return copy


def test_digest_depends_on_content_and_names(checkout: Path) -> None:
    before = code_digest(checkout)
    assert code_digest(checkout) == before
    target = checkout / "hpctrain" / "errors.py"
    text = target.read_text()
    target.write_text(text + "\n")
    assert code_digest(checkout) != before
    target.write_text(text)
    assert code_digest(checkout) == before
    target.rename(target.with_name("mistakes.py"))
    assert code_digest(checkout) != before


def test_bytecode_does_not_count(checkout: Path) -> None:
    before = code_digest(checkout)
    cache = checkout / "hpctrain" / "__pycache__"
    cache.mkdir()
    (cache / "errors.cpython-311.pyc").write_bytes(b"x")
    assert code_digest(checkout) == before


def test_frozen_code_is_complete(checkout: Path, tmp_path: Path) -> None:
    frozen = freeze_code(tmp_path / "code")
    assert frozen == current_code(tmp_path / "code")
    for package in snapshot.PACKAGES:
        original = {p.relative_to(checkout) for p in (checkout / package).rglob("*") if p.is_file()}
        assert original == {p.relative_to(frozen) for p in (frozen / package).rglob("*") if p.is_file()}
    assert code_digest(frozen) == frozen.name


def test_frozen_code_knows_the_hardware(tmp_path: Path) -> None:
    """Ranks plan too, in a check of the cluster, with nothing but the frozen code."""
    frozen = freeze_code(tmp_path / "code")
    ask = "from hpctrain.config import hardware as h; print(h.__file__, h.find_hardware('rtx4090').name)"
    env = {"PYTHONPATH": str(frozen), "HOME": str(tmp_path), "PATH": os.environ["PATH"]}
    done = subprocess.run(
        [sys.executable, "-c", ask], env=env, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [str(frozen / "hpctrain" / "config" / "hardware.py"), "rtx4090"]


def test_edits_after_freezing_change_nothing(checkout: Path, tmp_path: Path) -> None:
    frozen = freeze_code(tmp_path / "code")
    (checkout / "hpctrain" / "errors.py").write_text("raise SystemExit('edited')\n")
    assert code_digest(frozen) == frozen.name
    assert "edited" not in (frozen / "hpctrain" / "errors.py").read_text()


def test_freezing_again_moves_on_and_keeps_the_old_code(checkout: Path, tmp_path: Path) -> None:
    first = freeze_code(tmp_path / "code")
    assert freeze_code(tmp_path / "code") == first
    (checkout / "hpctrain" / "errors.py").write_text("# edited\n")
    second = freeze_code(tmp_path / "code")
    assert second != first and current_code(tmp_path / "code") == second
    assert first.is_dir() and code_digest(first) == first.name


def test_what_an_interrupted_copy_left_is_replaced(checkout: Path, tmp_path: Path) -> None:
    leftover = tmp_path / "code" / f".{code_digest(checkout)}.tmp" / "hpctrain"
    leftover.mkdir(parents=True)
    (leftover / "half.py").write_text("")
    frozen = freeze_code(tmp_path / "code")
    assert not (frozen / "hpctrain" / "half.py").exists()


def test_frozen_code_is_what_python_imports(tmp_path: Path) -> None:
    """As the batch script sets it up, and with another hpctrain in the current folder."""
    frozen = freeze_code(tmp_path / "code")
    decoy = tmp_path / "hpctrain"
    decoy.mkdir()
    (decoy / "__init__.py").write_text("raise SystemExit('the wrong one')\n")
    done = subprocess.run(
        [sys.executable, "-c", "import hpctrain.launch.supervise as s; print(s.__file__)"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(frozen), "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()) == frozen / "hpctrain" / "launch" / "supervise.py"


def test_source_facts_name_versions_and_command() -> None:
    facts = source_facts(["hpctrain", "+exp=x"])
    assert facts["command"] == ["hpctrain", "+exp=x"]
    assert facts["versions"]["torch"] and facts["versions"]["hydra-core"]
    assert facts["python"] == ".".join(map(str, sys.version_info[:3]))
