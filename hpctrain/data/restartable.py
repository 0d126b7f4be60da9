"""Work that may be stopped at any time and goes on when it is given again.

Several processes do jobs, each of which leaves whole files; a folder remembers the options it was begun
with; a synthetic data set appears whole or not at all.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

from hpctrain.data.progress import show_progress
from hpctrain.errors import ConfigError, DataError

OPTIONS_NAME = "pack.json"

Job = TypeVar("Job")


def run_jobs(
    work: Callable[[Job], int], jobs: Iterator[Job], total: int, unit: str, num_processes: int, show: bool
) -> None:
    """Does jobs with several processes, and shows how far they are.

    Args:
        work: Does one job and returns how many units it dealt with.
        total: Units of all jobs.

    Raises:
        DataError: a process was killed.
    """
    if num_processes == 1:
        with show_progress("packing", total, unit, show) as advance:
            for job in jobs:
                advance(work(job))
        return
    # Forks, made at the first submit: before the progress bar has a thread.
    with ProcessPoolExecutor(num_processes, mp_context=get_context("fork")) as pool:
        try:
            pending = {pool.submit(work, job) for job in itertools.islice(jobs, 2 * num_processes)}
            with show_progress("packing", total, unit, show) as advance:
                while pending:
                    done, pending = wait(pending, return_when=FIRST_COMPLETED)
                    for future in done:
                        advance(future.result())
                    pending |= {pool.submit(work, job) for job in itertools.islice(jobs, len(done))}
        except BrokenProcessPool as error:
            raise DataError(
                "a packing process was killed",
                f"{error} (the kernel does that when memory runs out)",
                "give the same command again, with fewer --processes: it goes on where it was",
            ) from None
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a file that appears under its name only when it is whole and on the disk."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    with open(partial, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def read_begun(out: Path, options: dict[str, Any], what: str) -> dict[str, Any] | None:
    """Returns what `record_begun` wrote into `out`, or None where nothing was begun.

    Args:
        what: Is packed: "images".

    Raises:
        ConfigError: something else is in `out`, or it was begun with other options.
    """
    try:
        begun: dict[str, Any] = json.loads((out / OPTIONS_NAME).read_text(encoding="utf-8"))
    except FileNotFoundError:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise ConfigError(
                f"cannot pack into {out}", "something else is in it", "give a new or an empty folder"
            ) from None
        return None
    different = sorted(name for name in options if begun["options"].get(name) != options[name])
    if different:
        was = ", ".join(f"{name}={begun['options'].get(name)}" for name in different)
        now = ", ".join(f"{name}={options[name]}" for name in different)
        raise ConfigError(
            f"{out} was begun with other options or other {what}: {was}",
            f"now {now}",
            "give the options it was begun with, another folder, or delete this one",
        )
    return begun


def record_begun(out: Path, options: dict[str, Any], **facts: Any) -> None:
    """Makes the folder and notes the options, and what else a restart has to know."""
    out.mkdir(parents=True, exist_ok=True)
    begun = {"options": options, **facts}
    write_atomically(out / OPTIONS_NAME, json.dumps(begun, ensure_ascii=False, indent=1).encode())


def make_once(out: Path, version_name: str, version: int, key: str, make: Callable[[Path], None]) -> None:
    """Lets `make` fill `out` with synthetic data; does nothing where `out` already holds this version.

    `out` appears whole or not at all, also when several processes try at once.

    Args:
        version_name: File in `out` that says which version made it.
        key: Config key that asks for these data.
        make: Is given an empty work folder and leaves the data in its folder `packed`.

    Raises:
        ConfigError: `out` holds something else, or data of another version.
    """
    if _is_packed(out):
        _check_version(out, version_name, version, key)
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    work = out.with_name(f".{out.name}.{os.uname().nodename}.{os.getpid()}")
    try:
        work.mkdir()
        make(work)
        (work / "packed" / version_name).write_text(json.dumps({"version": version}))
        _move(work / "packed", out)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _is_packed(out: Path) -> bool:
    return all((out / split / "meta.json").exists() for split in ("train", "val"))


def _check_version(out: Path, version_name: str, version: int, key: str) -> None:
    try:
        found = json.loads((out / version_name).read_text())["version"]
    except FileNotFoundError:
        found = "an earlier one, or these are data of your own"
    if found != version:
        raise ConfigError(
            f"data.root={out} should hold synthetic data of version {version} ({version_name})",
            f"found version: {found}",
            f"{key}=0 for data of your own; another data.root, or this folder removed, to have them made",
        )


def _move(packed: Path, out: Path) -> None:
    try:
        os.rename(packed, out)
    except OSError as error:
        if not _is_packed(out):  # otherwise another process was first
            raise ConfigError(
                f"cannot put synthetic data into {out}", str(error), "set data.root to a new folder"
            ) from None
