"""What the tests of packing share."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

from hpctrain.data.prepare import PackReport, pack_images


def pack(source: Path, out: Path, **options: Any) -> PackReport:
    return pack_images(source, out, **{"show": False, **options})


def labels(folder: Path) -> list[dict[str, Any]]:
    """The label files of a split in packing order, read as WebDataset would."""
    found = []
    for path in sorted(folder.glob("*.tar")):
        with tarfile.open(path) as tar:
            for member in tar:
                if member.name.endswith(".json"):
                    file = tar.extractfile(member)
                    assert file is not None
                    found.append(json.loads(file.read()))
    return found


def contents(folder: Path) -> dict[str, bytes]:
    return {str(each.relative_to(folder)): each.read_bytes() for each in folder.rglob("*") if each.is_file()}
