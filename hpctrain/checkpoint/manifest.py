"""The manifest: what a checkpoint must consist of, as JSON. A folder without a sound one is no checkpoint.

It carries a digest of itself, so that a flipped bit in a step count is found like one in a tensor.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpctrain.errors import CheckpointError

FILE_NAME = "manifest.json"
FORMAT_VERSION = 1


@dataclass(frozen=True)
class FileRecord:
    """A file as it was handed to the file system."""

    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """A checkpoint's contents."""

    step: int
    attempt: str  #: which start of the run wrote it: <job>_<restart>_<try>
    layout: dict[str, Any]  #: world_size and the parallel degrees it was written with
    torch_version: str
    files: dict[str, FileRecord]  #: every file of the folder but the manifest, by name
    facts: dict[str, Any]  #: what the caller wants back: samples consumed, seed, …
    format_version: int = FORMAT_VERSION

    def write(self, folder: Path) -> None:
        """Writes the manifest into `folder` and syncs it to the disk.

        Raises:
            TypeError, ValueError: layout or facts do not survive JSON.
            OSError: it could not be written.
        """
        content = asdict(self)
        content["sha256"] = _digest(content)
        with open(folder / FILE_NAME, "x", encoding="utf-8") as file:
            json.dump(content, file, indent=1, sort_keys=True, allow_nan=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())


def read(folder: Path) -> Manifest:
    """The manifest of `folder`.

    Raises:
        ValueError: there is none, or it is damaged; the message says which.
        CheckpointError: a newer program wrote it.
        OSError: it could not be read.
    """
    try:
        content = json.loads((folder / FILE_NAME).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{FILE_NAME} is missing") from None
    except ValueError as error:
        raise ValueError(f"{FILE_NAME} is not JSON: {error}") from None
    if not isinstance(content, dict) or content.pop("sha256", None) != _digest(content):
        raise ValueError(f"{FILE_NAME} is damaged: it does not match its own sha256")
    if content["format_version"] > FORMAT_VERSION:
        raise CheckpointError(
            f"read the checkpoint {folder}",
            f"its format is {content['format_version']}, this program knows up to {FORMAT_VERSION}",
            "use the version of hpctrain that wrote it, or move the folder away",
        )
    files = {name: FileRecord(**record) for name, record in content.pop("files").items()}
    for name in files:
        if name != os.path.basename(name) or name in ("", ".", ".."):
            raise ValueError(f"{FILE_NAME} names a file outside the folder: {name!r}")
    return Manifest(files=files, **content)


def check_jsonable(name: str, value: Mapping[str, Any]) -> None:
    """Raises CheckpointError unless `value` comes back from JSON as it was."""
    try:
        same = json.loads(json.dumps(value, allow_nan=False)) == value
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"store {name} in the manifest", str(error), "pass plain JSON values") from None
    if not same:
        raise CheckpointError(
            f"store {name} in the manifest",
            "JSON changes it (tuples, keys that are not strings)",
            "pass lists and string keys",
        )


def _digest(content: Mapping[str, Any]) -> str:
    """SHA-256 of the content (without its own digest) as compact JSON with sorted keys."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()
