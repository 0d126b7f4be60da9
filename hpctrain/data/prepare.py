"""`hpctrain data images SOURCE OUT`: images and labels become packed shards, split into train and val.

Samples are shuffled once, so that neighbours in a shard are of different people. Several processes write
whole shards; a second run goes on where the first was stopped, and with other options it is refused.
`meta.json`, written last, makes a split complete.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from hpctrain.data import listing
from hpctrain.data.order import Stream, permutation
from hpctrain.data.packing import DAMAGE, TAR_OVERHEAD_BYTES, Encoding, encode, write_shards
from hpctrain.data.restartable import read_begun, record_begun, write_atomically
from hpctrain.data.shards import SplitMeta
from hpctrain.data.split import Split
from hpctrain.errors import ConfigError

DAMAGED_NAME = "damaged.txt"

_TRIED_IMAGES = 64  #: encoded beforehand to learn the mean size
_DEFAULT_IMAGE_BYTES = 64 << 10


@dataclass(frozen=True)
class PackReport:
    """What was packed."""

    out: str
    num_images: dict[str, int]  #: by split
    num_identities: dict[str, int]  #: by split
    num_shards: dict[str, int]  #: by split
    size_bytes: int
    behaviours: list[str]
    num_damaged: int  #: left out, and listed in `damaged.txt`
    shards_found: int  #: written by an earlier run
    seconds: float


def pack_images(
    source: Path,
    out: Path,
    *,
    list_file: Path | None = None,
    max_side: int | None = None,
    quality: int = 90,
    val_fraction: float = 0.05,
    val_by: str = "identity",
    val_identities: list[str] | None = None,
    num_processes: int = 1,
    shard_mib: int = 256,
    walk: bool = False,
    seed: int = 0,
    show: bool = True,
) -> PackReport:
    """Packs the images of a folder, or of a list, into `out/train` and `out/val`.

    Args:
        list_file: CSV or Parquet with path (relative to `source`), identity, behaviours; None takes the
            folders in `source` as identities.
        max_side: Longer side is shrunk to this, pixels; None leaves the size.
        quality: JPEG quality of what is re-encoded. Upright JPEGs that keep their size keep their bytes.
        val_by: "identity": nobody is in both splits. "image": images are divided one by one.
        val_identities: Whom val holds, instead of a fraction: names and ranges such as `s31-s40`.
        walk: Look into deeper folders of each identity too.
        show: Print progress to stderr.

    Raises:
        ConfigError: a wrong option, nothing to pack, or `out` was begun with other options.
        DataError: no image of a split could be read.
    """
    started_s = time.monotonic()
    _check_options(max_side, quality, val_fraction, val_by, num_processes, shard_mib)
    table = listing.read_list(source, list_file) if list_file else listing.list_folder(source, walk)
    chosen = listing.expand_names(val_identities, listing.identity_names(table)) if val_identities else None
    is_val = listing.split_rows(table, val_fraction, val_by == "identity", chosen, seed)
    options = {
        "max_side": max_side,
        "quality": quality,
        "val_fraction": val_fraction,
        "val_by": val_by,
        "val_identities": val_identities,
        "shard_mib": shard_mib,
        "seed": seed,
        "listing_sha256": _digest(table),
    }
    splits = _make_splits(source, out, table, is_val, Encoding(max_side, quality), options)
    found = sum(split.num_written() for split in splits)
    if not all(split.is_complete() for split in splits):
        jobs = (job for split in splits for job in split.jobs())
        write_shards(jobs, sum(split.num_samples for split in splits), num_processes, show)
        _publish(out, splits, options)
    for split in splits:
        split.forget_parts()
    return _report(out, splits, found, time.monotonic() - started_s)


def main(argv: list[str]) -> int:
    """Runs `hpctrain data images …`; returns the exit code.

    Raises:
        HpctrainError: as `pack_images`; the command line prints it and takes its exit code.
    """
    options = vars(_parser().parse_args(argv))
    as_json, names = options.pop("json"), options.pop("val_identities")
    report = pack_images(**options, val_identities=_names(names) if names else None)
    if as_json:
        print(json.dumps(asdict(report), ensure_ascii=False))
        return 0
    for split, num_images in report.num_images.items():
        people, shards = report.num_identities[split], report.num_shards[split]
        print(f"{split}: {num_images:,} images of {people:,} identities in {shards:,} shards")
    print(f"behaviours: {', '.join(report.behaviours) or 'none'}")
    print(
        f"damaged: {report.num_damaged:,}"
        + (f" (see {Path(report.out) / DAMAGED_NAME})" * bool(report.num_damaged))
    )
    print(f"{report.size_bytes / 2**20:,.1f} MiB in {report.out}, {report.seconds:.1f} s")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hpctrain data images",
        description="Packs images into tar shards with an index, split into train/ and val/.",
        epilog="In a list, an empty behaviours cell means that nobody labelled them, - that none were seen.",
    )
    add = parser.add_argument
    add("source", type=Path, help="folder of identity folders, or what the paths of --list are relative to")
    add("out", type=Path, help="folder to pack into; a stopped run goes on when it is given again")
    add("--list", dest="list_file", type=Path, help="CSV or Parquet: path, identity, behaviours (a;b)")
    add("--walk", action="store_true", help="look into deeper folders of each identity too")
    add("--max-side", type=int, help="shrink the longer side to this, pixels")
    add("--quality", type=int, default=90, help="JPEG quality of what is re-encoded (default 90)")
    add("--val-fraction", type=float, default=0.05, help="share of the val split (default 0.05)")
    add("--val-by", choices=["identity", "image"], default="identity", help="what is divided")
    add("--val-identities", help="whom val holds: s31-s40, a comma list, or a file of names")
    add("--processes", dest="num_processes", type=int, default=len(os.sched_getaffinity(0)))
    add("--shard-mib", type=int, default=256, help="size of a shard, MiB (default 256)")
    add("--seed", type=int, default=0, help="decides the split and the shuffle (default 0)")
    add("--json", action="store_true", help="print the report as JSON")
    return parser


def _names(text: str) -> list[str]:
    if Path(text).is_file():
        text = Path(text).read_text(encoding="utf-8").replace("\n", ",")
    return [name.strip() for name in text.split(",") if name.strip()]


def _check_options(
    max_side: int | None, quality: int, val_fraction: float, val_by: str, num_processes: int, shard_mib: int
) -> None:
    wrong = {
        f"--max-side {max_side}": max_side is not None and max_side < 8,
        f"--quality {quality}": not 1 <= quality <= 100,
        f"--val-fraction {val_fraction}": not 0 <= val_fraction < 1,
        f"--val-by {val_by}": val_by not in ("identity", "image"),
        f"--processes {num_processes}": num_processes < 1,
        f"--shard-mib {shard_mib}": shard_mib < 1,
    }
    for option, is_wrong in wrong.items():
        if is_wrong:
            raise ConfigError(
                f"{option} is out of range",
                "",
                "side ≥ 8 pixels, quality 1 … 100, fraction 0 … 1 (without 1), processes and MiB ≥ 1",
            )


def _make_splits(
    source: Path,
    out: Path,
    table: pa.Table,
    is_val: npt.NDArray[np.bool_],
    encoding: Encoding,
    options: dict[str, Any],
) -> list[Split]:
    """Returns the splits that have rows, as the run that began `out` cut them, or begins it."""
    seed = options["seed"]
    begun = read_begun(out, options, "images")
    if begun is None:
        begun = {"samples_per_shard": _samples_per_shard(source, table, encoding, options["shard_mib"], seed)}
        record_begun(out, options, **begun)
    per_shard = int(begun["samples_per_shard"])
    return [
        Split(source, out / name, table, np.flatnonzero(mask), encoding, per_shard, seed)
        for name, mask in {"train": ~is_val, "val": is_val}.items()
        if mask.any()
    ]


def _samples_per_shard(source: Path, table: pa.Table, encoding: Encoding, shard_mib: int, seed: int) -> int:
    """Encodes a few images to learn how many fill a shard."""
    tried = permutation(seed, 0, Stream.packing, 1, len(table))[:_TRIED_IMAGES]
    sizes = []
    for path in table["path"].take(pa.array(tried)).to_pylist():
        try:
            sizes.append(len(encode(source / path, encoding)))
        except DAMAGE:
            continue
    mean_bytes = sum(sizes) / len(sizes) if sizes else _DEFAULT_IMAGE_BYTES
    return max(1, int((shard_mib << 20) / (mean_bytes + TAR_OVERHEAD_BYTES)))


def _publish(out: Path, splits: list[Split], options: dict[str, Any]) -> None:
    """Writes the indexes and the list of damaged images, and then what makes the splits complete."""
    parts = [split.parts() for split in splits]
    damaged = [f"{path}\t{reason}\n" for part in itertools.chain(*parts) for path, reason in part.damaged]
    for split, its_parts in zip(splits, parts, strict=True):
        split.write_index(its_parts)
    write_atomically(out / DAMAGED_NAME, "".join(damaged).encode())
    for split, its_parts in zip(splits, parts, strict=True):
        split.write_meta(its_parts, options)


def _report(out: Path, splits: list[Split], shards_found: int, seconds: float) -> PackReport:
    metas = {split.folder.name: SplitMeta.read(split.folder) for split in splits}
    return PackReport(
        out=str(out),
        num_images={name: meta.num_samples for name, meta in metas.items()},
        num_identities={name: len(meta.identities) for name, meta in metas.items()},
        num_shards={name: len(meta.shards) for name, meta in metas.items()},
        size_bytes=sum(shard.size_bytes for meta in metas.values() for shard in meta.shards),
        behaviours=splits[0].behaviours,
        num_damaged=len((out / DAMAGED_NAME).read_text(encoding="utf-8").splitlines()),
        shards_found=shards_found,
        seconds=seconds,
    )


def _digest(table: pa.Table) -> str:
    """Returns a hash of the listed paths and labels."""
    digest = hashlib.sha256()
    for name in table.column_names:
        for chunk in pc.fill_null(table[name], "\0").chunks:
            digest.update("".join(f"{value}\n" for value in chunk.to_pylist()).encode())
    return digest.hexdigest()
