"""What there is to pack: images with their labels, from a folder or a list file, and the train/val split.

A listing is an Arrow table, so that tens of millions of rows fit in memory: `path` (relative to the
source), `identity` (null for none), `behaviours` (names joined by `|`; null where nobody labelled them,
empty where somebody looked and saw none).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet

from hpctrain.data.order import Stream, permutation
from hpctrain.errors import ConfigError, DataError

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".pgm", ".ppm", ".bmp", ".webp", ".tif", ".tiff")
LABELLED_NONE = "-"  #: in a CSV cell: somebody looked and saw no behaviour

_COLUMNS = ("path", "identity", "behaviours")


def natural_key(name: str) -> list[tuple[int, str]]:
    """Returns a sort key under which s2 comes before s10."""
    parts = re.split(r"(\d+)", name)
    return [(int(part), part) if part.isdigit() else (-1, part) for part in parts]


def list_folder(source: Path, walk: bool) -> pa.Table:
    """Lists a folder of identity folders, one level deep; with `walk` every image below each of them.

    Raises:
        ConfigError: the folder is missing or holds no images where they are looked for.
    """
    _check_folder(source)
    paths: list[str] = []
    identities: list[str] = []
    for identity in sorted(_names(source, folders=True), key=natural_key):
        files = _walk(source / identity) if walk else _names(source / identity, folders=False)
        images = sorted((each for each in files if each.lower().endswith(IMAGE_SUFFIXES)), key=natural_key)
        paths += [f"{identity}/{each}" for each in images]
        identities += [identity] * len(images)
    if not paths:
        raise ConfigError(
            f"found no images in {source}",
            f"looked for {', '.join(IMAGE_SUFFIXES)} in {len(_names(source, folders=True))} folders, "
            f"one per identity{'' if walk else ', one level deep'}",
            "give a folder of identity folders, a list with --list FILE, or --walk for deeper folders",
        )
    return _table(pa.array(paths), pa.array(identities), pa.nulls(len(paths), pa.string()))


def read_list(source: Path, list_file: Path) -> pa.Table:
    """Reads a list file, CSV or Parquet, with columns path, identity, behaviours (one of the last two).

    An empty cell or null means "no label". Behaviours are separated by `;` or `|`, or are a Parquet list;
    `-`, or an empty Parquet list, means "labelled, and none seen".

    Raises:
        ConfigError: the source or the list is missing, or a column is.
        DataError: the list cannot be read.
    """
    _check_folder(source)
    if not list_file.is_file():
        raise ConfigError(f"there is no list file {list_file}", "", "give the path of a CSV or Parquet file")
    try:
        table = _read_table(list_file)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{list_file} cannot be read", str(error), "give a CSV or Parquet file") from None
    found = table.column_names
    if "path" not in found or not {"identity", "behaviours"} & set(found):
        raise ConfigError(
            f"{list_file} needs a column path and at least one of identity, behaviours",
            f"its columns are {', '.join(found)}",
            "rename the columns in its first line",
        )
    if not len(table):
        raise ConfigError(f"{list_file} lists no images", "it has no rows", "add one row per image")
    if table["path"].null_count:
        raise ConfigError(
            f"{list_file} has rows without a path", f"{table['path'].null_count} of {len(table)}"
        )
    nothing = pa.nulls(len(table), pa.string())
    return _table(
        table["path"],
        _strings(table["identity"]) if "identity" in found else nothing,
        _behaviour_strings(table["behaviours"]) if "behaviours" in found else nothing,
    )


def parse_behaviours(joined: str) -> list[str]:
    """Splits names joined by `|`."""
    return [name.strip() for name in joined.split("|") if name.strip()]


def identity_names(table: pa.Table) -> list[str]:
    """Returns the identities of a listing, naturally sorted."""
    return sorted(pc.unique(table["identity"].drop_null()).to_pylist(), key=natural_key)


def behaviour_names(table: pa.Table) -> list[str]:
    """Returns the behaviours that occur in a listing, naturally sorted."""
    joined = pc.unique(table["behaviours"].drop_null()).to_pylist()
    return sorted({name for each in joined for name in parse_behaviours(each)}, key=natural_key)


def split_rows(
    table: pa.Table, val_fraction: float, by_identity: bool, val_identities: Iterable[str] | None, seed: int
) -> npt.NDArray[np.bool_]:
    """Chooses the rows of the val split, a pure function of the arguments.

    By identity, no person is in both splits; images without an identity are divided one by one.

    Raises:
        ConfigError: `val_identities` names someone who is not listed.
    """
    num_rows = len(table)
    one_by_one = permutation(seed, 0, Stream.split, 0, num_rows) < round(val_fraction * num_rows)
    if not by_identity and val_identities is None:
        return one_by_one
    names = identity_names(table)
    if val_identities is None:
        order = permutation(seed, 0, Stream.split, 1, len(names)).tolist()
        chosen = [names[i] for i in order[: _num_val(len(names), val_fraction)]]
    else:
        chosen = list(val_identities)
        unknown = sorted(set(chosen) - set(names), key=natural_key)
        if unknown:
            raise ConfigError(
                f"--val-identities names {', '.join(unknown[:5])}",
                f"the {len(names)} identities are {', '.join(names[:5])} … {', '.join(names[-2:])}",
                "name identities that are listed",
            )
    is_val = np.asarray(pc.is_in(table["identity"], value_set=pa.array(chosen, pa.string())))
    return np.where(np.asarray(pc.is_null(table["identity"])), one_by_one, is_val).astype(bool)


def expand_names(parts: list[str], known: list[str]) -> list[str]:
    """Expands ranges such as `s31-s40` to the known names within; other parts stay as they are."""
    names: list[str] = []
    for part in parts:
        match = re.fullmatch(r"(.*?)(\d+)-\1(\d+)", part)
        if match is None or part in known:
            names.append(part)
            continue
        prefix, low, high = match[1], int(match[2]), int(match[3])
        numbered = [(name, re.fullmatch(re.escape(prefix) + r"(\d+)", name)) for name in known]
        names += [name for name, found in numbered if found and low <= int(found[1]) <= high] or [part]
    return names


def _num_val(num_identities: int, fraction: float) -> int:
    if fraction <= 0 or num_identities < 2:
        return 0
    return min(max(1, round(fraction * num_identities)), num_identities - 1)


def _check_folder(source: Path) -> None:
    if not source.is_dir():
        raise ConfigError(
            f"there is no folder {source}",
            "it is a file" if source.exists() else "nothing is there",
            "give the folder that holds the images (with --list, the one that its paths are relative to)",
        )


def _names(folder: Path, folders: bool) -> list[str]:
    with os.scandir(folder) as entries:
        return [each.name for each in entries if each.is_dir() == folders and not each.name.startswith(".")]


def _walk(folder: Path) -> list[str]:
    return [
        os.path.relpath(os.path.join(place, name), folder)
        for place, _, names in os.walk(folder)
        for name in names
    ]


def _read_table(list_file: Path) -> pa.Table:
    if list_file.suffix.lower() in (".parquet", ".pq"):
        present = set(pa.parquet.read_schema(list_file).names)
        return pa.parquet.read_table(
            list_file, columns=[each for each in _COLUMNS if each in present] or None
        )
    as_text = pa.csv.ConvertOptions(
        column_types={each: pa.string() for each in _COLUMNS}, null_values=[""], strings_can_be_null=True
    )
    return pa.csv.read_csv(list_file, convert_options=as_text)


def _strings(column: pa.ChunkedArray) -> pa.ChunkedArray:
    return column.cast(pa.string())


def _behaviour_strings(column: pa.ChunkedArray) -> pa.ChunkedArray:
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        return pc.binary_join(column.cast(pa.list_(pa.string())), "|")
    text = _strings(column)
    if pa.types.is_null(column.type):
        return text
    joined = pc.replace_substring(text, ";", "|")
    return pc.if_else(pc.equal(pc.utf8_trim_whitespace(text), LABELLED_NONE), "", joined)


def _table(paths: pa.Array, identities: pa.Array, behaviours: pa.Array) -> pa.Table:
    return pa.table({"path": paths, "identity": identities, "behaviours": behaviours})
