"""One split while it is packed: its rows, shuffled and cut into the jobs of shards, and its index."""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hpctrain.data import listing
from hpctrain.data.order import Stream, permutation
from hpctrain.data.packing import (
    PARTS_NAME,
    Encoding,
    Sample,
    ShardJob,
    ShardPart,
    part_path,
    shard_name,
)
from hpctrain.data.restartable import write_atomically
from hpctrain.data.shards import INDEX_NAME, MAX_BEHAVIOURS, META_NAME, ShardInfo, SplitMeta
from hpctrain.errors import ConfigError, DataError


class Split:
    """The rows of a listing that go to `folder`, which is named after the split.

    Args:
        table: The whole listing; behaviours are numbered over all of it, identities over this split.
        rows: Which of it are packed here.
    """

    def __init__(
        self,
        source: Path,
        folder: Path,
        table: pa.Table,
        rows: npt.NDArray[np.int64],
        encoding: Encoding,
        samples_per_shard: int,
        seed: int,
    ) -> None:
        self.folder, self._source, self._encoding = folder, source, encoding
        self.behaviours = listing.behaviour_names(table)
        if len(self.behaviours) > MAX_BEHAVIOURS:
            raise ConfigError(
                f"{len(self.behaviours)} behaviours are listed", f"at most {MAX_BEHAVIOURS} fit"
            )
        shuffled = rows[permutation(seed, 0, Stream.packing, 0, len(rows))]
        self._table, self._per_shard = table.take(pa.array(shuffled)), samples_per_shard
        self._identities = listing.identity_names(self._table)
        self._numbers = {name: number for number, name in enumerate(self._identities)}
        self.num_samples = len(rows)
        self._num_shards = -(-len(rows) // samples_per_shard)

    def is_complete(self) -> bool:
        """Whether an earlier run has packed it all."""
        return (self.folder / META_NAME).exists()

    def num_written(self) -> int:
        """Returns how many shards are written."""
        if self.is_complete():
            return self._num_shards
        return sum(part_path(self.folder, number).exists() for number in range(self._num_shards))

    def jobs(self) -> Iterator[ShardJob]:
        """Yields the jobs of the shards that are not written yet."""
        (self.folder / PARTS_NAME).mkdir(parents=True, exist_ok=True)
        for number in range(self._num_shards):
            if not part_path(self.folder, number).exists():
                first = number * self._per_shard
                rows = self._table.slice(first, self._per_shard).to_pylist()
                samples = [self._sample(**row) for row in rows]
                yield ShardJob(self._source, self.folder, number, first, samples, self._encoding)

    def parts(self) -> list[ShardPart]:
        """Returns what the part files say, in the order of the shards."""
        return [ShardPart.read(part_path(self.folder, number)) for number in range(self._num_shards)]

    def write_index(self, parts: list[ShardPart]) -> None:
        """Writes the index of all shards.

        Raises:
            DataError: not one image could be read.
        """
        index = np.concatenate([part.index for part in parts])
        if not len(index):
            path, reason = parts[0].damaged[0]
            raise DataError(
                f"none of the {self.num_samples} images of {self.folder.name} can be read",
                f"the first is {self._source / path}: {reason}",
                "check the source folder, and that the paths of the list are relative to it",
            )
        buffer = io.BytesIO()
        np.save(buffer, index)
        write_atomically(self.folder / INDEX_NAME, buffer.getvalue())

    def write_meta(self, parts: list[ShardPart], options: dict[str, Any]) -> None:
        """Writes `meta.json`, which makes the split complete."""
        shards = [
            ShardInfo(shard_name(self.folder, number), part.size_bytes, len(part.index))
            for number, part in enumerate(parts)
        ]
        num_samples = sum(shard.num_samples for shard in shards)
        meta = SplitMeta(num_samples, self._identities, self.behaviours, shards, options)
        write_atomically(self.folder / META_NAME, meta.to_json().encode())

    def forget_parts(self) -> None:
        """Deletes what only an unfinished split needs."""
        shutil.rmtree(self.folder / PARTS_NAME, ignore_errors=True)

    def _sample(self, path: str, identity: str | None, behaviours: str | None) -> Sample:
        names = None if behaviours is None else listing.parse_behaviours(behaviours)
        bits = sum(1 << self.behaviours.index(name) for name in set(names or []))
        number = -1 if identity is None else self._numbers[identity]
        return Sample(path, identity, number, names, bits)
