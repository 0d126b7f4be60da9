"""Checkpoint folders on disk: begin, commit, find, verify, retain. No torch.

A checkpoint is written under a hidden name that is never used twice, and gets its own name,
`step_00001200.<attempt>`, by a rename as the last act. Names that begin with a dot (`.writing.`, `.trash.`,
`.damaged.`) are never candidates. One process (rank 0 of the only live job of a run) changes the folder.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from hpctrain.checkpoint import manifest as manifests
from hpctrain.checkpoint.manifest import FileRecord, Manifest
from hpctrain.errors import CheckpointError

_NAME = re.compile(r"step_(\d{8,})\.([A-Za-z0-9_-]+)")
_WRITING, _TRASH, _DAMAGED = ".writing.", ".trash.", ".damaged."
_MAX_HASH_THREADS = 8


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: sound manifest, every file there with its size. Contents: see `verify`."""

    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        return self.manifest.step


@dataclass(frozen=True)
class Candidate:
    """A folder named like a checkpoint; `manifest` is None where it cannot be used."""

    path: Path
    manifest: Manifest | None
    problems: list[str]  #: why it is not complete; empty if it is


def folder_name(step: int, attempt: str) -> str:
    """`step_00001200.<attempt>`; raises CheckpointError for what cannot be part of such a name."""
    name = f"step_{step:08d}.{attempt}"
    if not _NAME.fullmatch(name):
        raise CheckpointError(
            f"name a checkpoint of step {step}, attempt {attempt!r}",
            change="a step is not negative; an attempt is made of letters, digits, _ and -",
        )
    return name


def begin(root: Path, step: int, attempt: str) -> Path:
    """Makes the folder that a new checkpoint is written into; `commit` gives it its name.

    Raises:
        CheckpointError: this attempt has already saved this step.
        OSError: the folder cannot be made.
    """
    name = folder_name(step, attempt)
    root.mkdir(parents=True, exist_ok=True)
    _refuse_existing(root / name)
    writing = root / f"{_WRITING}{name}.{secrets.token_hex(4)}"
    writing.mkdir()
    return writing


def commit(writing: Path, manifest: Manifest) -> Path:
    """Turns a folder whose files are all written and synced into a checkpoint; returns its path.

    Raises:
        CheckpointError: a file of the manifest is not there with its size, or the name is taken.
        OSError: the file system refused.
    """
    final = writing.parent / folder_name(manifest.step, manifest.attempt)
    problems = _wrong_sizes(writing, manifest.files)
    if problems:
        raise CheckpointError(
            f"commit {final.name}",
            "; ".join(problems),
            "all ranks must write to one shared file system: check that the run folder is on it",
        )
    manifest.write(writing)
    _sync_folder(writing)
    _refuse_existing(final)
    os.rename(writing, final)
    _sync_folder(final.parent)
    return final


def discard(folder: Path) -> None:
    """Removes a folder in two steps, a rename first: a half-deleted one is never a candidate."""
    trash = folder.parent / f"{_TRASH}{folder.name.lstrip('.')}.{secrets.token_hex(4)}"
    try:
        os.rename(folder, trash)
    except FileNotFoundError:
        return
    shutil.rmtree(trash, ignore_errors=True)  # what is left (a file still open on NFS) goes next time


def set_aside(folder: Path) -> None:
    """Hides a damaged checkpoint from the candidates and keeps it for whoever wants to look at it."""
    os.rename(folder, folder.parent / f"{_DAMAGED}{folder.name}.{secrets.token_hex(4)}")


def candidates(root: Path) -> list[Candidate]:
    """Every folder of `root` named like a checkpoint, newest first, with what keeps it from being complete.

    Newest is the highest step, then the highest attempt (numbers in it count as numbers).

    Raises:
        CheckpointError: one of them was written by a newer program.
    """
    if not root.is_dir():
        return []
    named = [(match, path) for path in root.iterdir() if (match := _NAME.fullmatch(path.name))]
    named.sort(key=lambda pair: (int(pair[0][1]), _numbers_as_numbers(pair[0][2])), reverse=True)
    return [_examine(path) for _, path in named]


def find(root: Path) -> list[Checkpoint]:
    """The complete checkpoints of `root`, newest first."""
    return [Checkpoint(c.path, c.manifest) for c in candidates(root) if c.manifest and not c.problems]


def latest(root: Path) -> Path | None:
    """The newest complete checkpoint, its contents not hashed; None if there is none."""
    complete = find(root)
    return complete[0].path if complete else None


def verify(path: Path, names: Collection[str] | None = None) -> list[str]:
    """Hashes files in parallel and compares them with the manifest; returns what is wrong, a line each.

    Args:
        names: The files to check; all of the manifest by default.
    """
    candidate = _examine(path, names)
    if candidate.manifest is None or candidate.problems:
        return candidate.problems
    files = candidate.manifest.files
    wanted = list(files) if names is None else names
    with ThreadPoolExecutor(min(_MAX_HASH_THREADS, os.cpu_count() or 1)) as threads:
        found = threads.map(lambda name: _hash_problem(path / name, files[name]), wanted)
        return [problem for problem in found if problem]


def retain(root: Path, *, keep_last: int, keep_every_steps: int, attempt: str) -> list[str]:
    """Deletes what need not be kept; returns the names of the checkpoints deleted.

    Kept are the newest `keep_last` complete checkpoints, those whose step is a multiple of
    `keep_every_steps` (0: none for that reason), and the newest one of `attempt`, which has just been
    written and hashed: it stays even where older attempts left damaged ones with higher steps.
    Incomplete folders count for nothing and are left alone. Leftovers of deletions, and of saves that
    other attempts did not finish, are removed.

    Raises:
        CheckpointError: `keep_last` is below 1, or a folder could not be removed.
    """
    if keep_last < 1:
        raise CheckpointError(
            f"keep the newest {keep_last} checkpoints", "nothing to resume from", "checkpoint.keep_last=1"
        )
    complete = find(root)
    keep = {each.path for each in complete[:keep_last]}
    if keep_every_steps:
        keep |= {each.path for each in complete if each.step % keep_every_steps == 0}
    keep |= {each.path for each in [c for c in complete if c.manifest.attempt == attempt][:1]}
    old = [each.path for each in complete if each.path not in keep]
    try:
        for path in [*_leftovers(root, attempt), *old]:
            discard(path)
    except OSError as error:
        raise CheckpointError(f"remove old checkpoints from {root}", str(error)) from error
    return [path.name for path in old]


def wait_visible(folder: Path, timeout_s: float) -> None:
    """Waits until this node sees a folder that another node has made (NFS caches absence for a while).

    Raises:
        CheckpointError: it is still not there after `timeout_s`.
    """
    deadline_s = time.monotonic() + timeout_s
    while not folder.is_dir():
        if time.monotonic() > deadline_s:
            raise CheckpointError(
                f"use the checkpoint folder {folder}",
                f"rank 0 made it, but this node did not see it within {timeout_s:g} s",
                "put the run folder on a file system that all nodes share",
            )
        if folder.parent.is_dir():
            os.listdir(folder.parent)  # makes an NFS client ask the server again
        time.sleep(0.02)


def _examine(path: Path, names: Collection[str] | None = None) -> Candidate:
    try:
        manifest = manifests.read(path)
    except (ValueError, TypeError, KeyError, OSError) as error:
        return Candidate(path, None, [str(error)])
    files = manifest.files if names is None else {name: manifest.files[name] for name in names}
    problems = _wrong_sizes(path, files)
    if folder_name(manifest.step, manifest.attempt) != path.name:
        problems.append(f"the folder was renamed: it holds step {manifest.step} of {manifest.attempt}")
    return Candidate(path, manifest, problems)


def _wrong_sizes(folder: Path, files: dict[str, FileRecord]) -> list[str]:
    problems = []
    for name, record in files.items():
        try:
            size_bytes = os.stat(folder / name).st_size
        except OSError as error:
            problems.append(f"{name}: {error.strerror}")
            continue
        if size_bytes != record.size_bytes:
            problems.append(f"{name}: {size_bytes} bytes, not {record.size_bytes}")
    return problems


def _hash_problem(path: Path, record: FileRecord) -> str | None:
    try:
        with open(path, "rb", buffering=0) as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        return f"{path.name}: {error.strerror}"
    return None if found == record.sha256 else f"{path.name}: sha256 is {found}, not {record.sha256}"


def _leftovers(root: Path, attempt: str) -> list[Path]:
    if not root.is_dir():
        return []
    dead = re.compile(rf"{re.escape(_WRITING)}step_\d+\.(?!{re.escape(attempt)}\.).*")
    return [path for path in root.iterdir() if path.name.startswith(_TRASH) or dead.fullmatch(path.name)]


def _refuse_existing(final: Path) -> None:
    if final.exists():
        raise CheckpointError(
            f"write the checkpoint {final.name}",
            "it exists already, and a checkpoint folder is never written twice",
            "save a step once per attempt",
        )


def _numbers_as_numbers(attempt: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"[_-]", attempt)]


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
