"""Packed images: tar shards in WebDataset's format, and an index that gives random access to them.

A split is a folder: `train-000000.tar …` with members `<key>.jpg` and `<key>.json`, `index.npy` with one
record per sample in packing order, and `meta.json`, which is written last: a folder without it is not
finished. The index is memory-mapped, so the ranks and workers of a node share its pages.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hpctrain.errors import DataError

FORMAT_VERSION = 1
MAX_BEHAVIOURS = 64  #: they are the bits of one 64-bit word
INDEX_DTYPE = np.dtype(
    [
        ("shard", "<i4"),
        ("offset", "<i8"),  #: of the image's bytes in the shard
        ("size", "<i4"),  #: of the image, bytes
        ("identity", "<i4"),  #: -1 for none
        ("behaviours", "<u8"),  #: bit k for behaviour k
        ("has_behaviour", "u1"),  #: 0 where nobody labelled the behaviour
    ]
)
META_NAME = "meta.json"
INDEX_NAME = "index.npy"

_MAX_READ_BYTES = 8 << 20
_MAX_GAP_BYTES = 128 << 10  #: reading over a gap like this costs less than a second request
_MAX_OPEN_SHARDS = 64


@dataclass(frozen=True)
class ShardInfo:
    """One tar file."""

    name: str
    size_bytes: int
    num_samples: int


@dataclass(frozen=True)
class SplitMeta:
    """What `meta.json` says about a split."""

    num_samples: int
    identities: list[str]  #: name of identity 0, 1, …
    behaviours: list[str]  #: name of behaviour 0, 1, …
    shards: list[ShardInfo]
    options: dict[str, Any] = field(default_factory=dict)  #: how the split was packed
    format: int = FORMAT_VERSION

    def to_json(self) -> str:
        """Returns the text of `meta.json`."""
        return json.dumps(asdict(self), ensure_ascii=False, indent=1)

    @classmethod
    def read(cls, folder: Path) -> SplitMeta:
        """Reads `meta.json`.

        Raises:
            DataError: the file is missing, damaged or of another format version.
        """
        path = folder / META_NAME
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
            found = raw["format"]
            if found == FORMAT_VERSION:
                return cls(**{**raw, "shards": [ShardInfo(**each) for each in raw["shards"]]})
        except FileNotFoundError:
            raise DataError(
                f"{folder} is no folder of packed images",
                f"it has no {META_NAME} (never packed, or packing did not finish)",
                "pack it with `hpctrain data images SOURCE OUT`, or set data.root to the folder that "
                "holds train/ and val/",
            ) from None
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path} cannot be read", repr(error), "pack the images again") from error
        raise DataError(f"{path} has format {found}", f"this version reads {FORMAT_VERSION}", "pack again")


class ShardSet:
    """A packed split, open for reading. Opening looks at names and sizes only; `read` opens shards.

    Raises:
        DataError: a shard is missing or has another size than the index says, or the index is damaged.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.meta = SplitMeta.read(self.folder)
        self.index = self._open_index()  #: records of INDEX_DTYPE, one per sample, memory-mapped
        for shard in self.meta.shards:
            self._check_shard(shard)
        self._files: OrderedDict[int, int] = OrderedDict()

    @property
    def num_samples(self) -> int:
        """Samples in the split."""
        return self.meta.num_samples

    @property
    def num_identities(self) -> int:
        """Identities of the split; its samples carry 0 … num_identities-1, or -1 for none."""
        return len(self.meta.identities)

    @property
    def behaviours(self) -> list[str]:
        """Names of the behaviours, in the order of the label matrix."""
        return self.meta.behaviours

    def behaviour_matrix(self, records: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        """Returns the labels of index records as 0/1, shape [len(records), len(behaviours)]."""
        bits = np.arange(len(self.behaviours), dtype=np.uint64)
        return ((records["behaviours"][:, None] >> bits) & np.uint64(1)).astype(np.float32)

    def read(self, sample_ids: Sequence[int] | npt.NDArray[np.int64]) -> list[bytes]:
        """Returns the encoded images, in the order asked; neighbours are read with one request.

        Raises:
            DataError: the storage gives fewer bytes than the index says.
        """
        records = self.index[np.asarray(sample_ids, dtype=np.int64)]
        images: list[bytes] = [b""] * len(records)
        order = np.lexsort((records["offset"], records["shard"])).tolist()
        for shard, start, stop, members in _runs(records, order):
            data = self._pread(shard, start, stop - start)
            for i in members:
                first = int(records["offset"][i]) - start
                images[i] = data[first : first + int(records["size"][i])]
        return images

    def prefetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Asks the kernel to read ranges of sample ids (first, after the last) ahead, as whole blocks.

        The small reads of all processes of the node then come from the page cache.
        """
        for first, after in ranges:
            records = self.index[first:after]
            for shard in np.unique(records["shard"]).tolist():
                mine = records[records["shard"] == shard]
                start, stop = int(mine["offset"][0]), int(mine["offset"][-1]) + int(mine["size"][-1])
                with contextlib.suppress(OSError):  # advice only; not every file system takes it
                    os.posix_fadvise(self._file(shard), start, stop - start, os.POSIX_FADV_WILLNEED)

    def close(self) -> None:
        """Closes the shards that this process has opened."""
        while self._files:
            os.close(self._files.popitem()[1])

    def __del__(self) -> None:
        if hasattr(self, "_files"):
            self.close()

    def _open_index(self) -> npt.NDArray[Any]:
        path = self.folder / INDEX_NAME
        try:
            index: npt.NDArray[Any] = np.load(path, mmap_mode="r")
        except (OSError, ValueError, EOFError) as error:
            raise DataError(
                f"{path} cannot be read", repr(error), "copy it again, or pack the images again"
            ) from error
        if index.dtype != INDEX_DTYPE or index.shape != (self.meta.num_samples,):
            raise DataError(
                f"{path} should hold {self.meta.num_samples} samples, as {META_NAME} says",
                f"{index.shape} records of {index.dtype.itemsize} bytes",
                "copy the whole folder again, or pack the images again",
            )
        return index

    def _check_shard(self, shard: ShardInfo) -> None:
        path = self.folder / shard.name
        try:
            size_bytes = path.stat().st_size
        except OSError as error:
            raise DataError(
                f"shard {path} is missing",
                f"{error.strerror}; {META_NAME} names {len(self.meta.shards)} shards",
                "copy it from where the images were packed, or pack them again",
            ) from None
        if size_bytes != shard.size_bytes:
            raise DataError(
                f"shard {path} is damaged: it should have {shard.size_bytes} bytes",
                f"it has {size_bytes}",
                "copy it again, or pack the images again",
            )

    def _file(self, shard: int) -> int:
        if shard in self._files:
            self._files.move_to_end(shard)
            return self._files[shard]
        if len(self._files) >= _MAX_OPEN_SHARDS:
            os.close(self._files.popitem(last=False)[1])
        # A descriptor that a fork inherits stays usable: pread has no shared position.
        self._files[shard] = os.open(self.folder / self.meta.shards[shard].name, os.O_RDONLY | os.O_CLOEXEC)
        return self._files[shard]

    def _pread(self, shard: int, offset: int, size: int) -> bytes:
        name = self.meta.shards[shard].name
        try:
            data = os.pread(self._file(shard), size, offset)
        except OSError as error:
            raise DataError(f"shard {self.folder / name} cannot be read", str(error)) from error
        if len(data) != size:
            raise DataError(
                f"shard {self.folder / name} ends early: {size} bytes at {offset} were asked for",
                f"{len(data)} came",
                "copy it again, or pack the images again",
            )
        return data


def _runs(records: npt.NDArray[Any], order: list[int]) -> Iterable[tuple[int, int, int, list[int]]]:
    """Yields (shard, first byte, byte after the last, rows) of reads that cover the records in order."""
    shards, offsets, sizes = (records[name].tolist() for name in ("shard", "offset", "size"))
    members: list[int] = []
    shard, start, stop = -1, 0, 0
    for i in order:
        end = offsets[i] + sizes[i]
        joins = shards[i] == shard and offsets[i] <= stop + _MAX_GAP_BYTES and end - start <= _MAX_READ_BYTES
        if not joins:
            if members:
                yield shard, start, stop, members
            shard, start, stop, members = shards[i], offsets[i], offsets[i], []
        members.append(i)
        stop = max(stop, end)
    if members:
        yield shard, start, stop, members
