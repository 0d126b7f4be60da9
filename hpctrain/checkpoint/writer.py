"""Saving: DCP plans who writes what; this file sees to it that what it calls written is written.

Hashes are taken from the bytes on their way out, never from the file afterwards: a hash of the file would
certify whatever happened to land there. A checkpoint is committed only after every rank has said that all
it had to write is on the disk. Synchronous: `save` returns when the checkpoint is durable.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_saver as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from hpctrain.checkpoint import store
from hpctrain.checkpoint.exchange import Exchange
from hpctrain.checkpoint.manifest import FileRecord, Manifest, check_jsonable
from hpctrain.errors import CheckpointError

PER_RANK = "per_rank"
VISIBLE_TIMEOUT_S = 60.0  # NFS clients cache the absence of a name for up to acdirmax = 60 s, nfs(5)


def save(
    root: Path,
    *,
    step: int,
    attempt: str,
    state: Mapping[str, Any],
    facts: dict[str, Any],
    group: dist.ProcessGroup,
    timeout_s: float,
    layout: dict[str, Any],
) -> Path:
    """Writes a checkpoint and returns its path once it is on the disk under its final name.

    Collective over `group`, a Gloo group of all ranks: every rank must call it. A rank that dies or waits
    for another longer than `timeout_s` makes it fail on all; nothing is committed then.

    Args:
        root: Folder of the checkpoints, on a file system that all ranks share.
        attempt: Which start of the run this is, `<job>_<restart>_<try>`: no two may be alike.
        state: Nested dict of tensors (DTensors are written shard by shard, replicated ones once), numbers,
            strings, bytes. The same keys on every rank, except below `per_rank`: there each rank puts what
            is its own (RNG, …) and gets that back.
        facts: JSON values for the manifest; rank 0's count.
        layout: Parallel degrees for the manifest; `world_size` is added.

    Raises:
        CheckpointError: on every rank, with each failed rank's reason.
    """
    with Exchange(group, timeout_s, f"save step {step} of attempt {attempt}") as ranks:
        plan = Manifest(
            step, attempt, {**layout, "world_size": ranks.world_size}, str(torch.__version__), {}, facts
        )
        writing = ranks.lead(lambda: _begin(root, plan))
        visible_timeout_s = min(VISIBLE_TIMEOUT_S, timeout_s / 2)
        try:
            written = ranks.everyone(
                lambda: _write_shards(writing, state, ranks.rank, group, visible_timeout_s)
            )
            return ranks.lead(lambda: _commit(writing, plan, written))
        except CheckpointError:
            if ranks.rank == 0:
                _try_discard(writing)
            raise


def _begin(root: Path, plan: Manifest) -> Path:
    check_jsonable("facts", plan.facts)
    check_jsonable("layout", plan.layout)
    return store.begin(root, plan.step, plan.attempt)


def _commit(
    writing: Path, plan: Manifest, written: list[tuple[dict[str, int], dict[str, FileRecord]]]
) -> Path:
    files = {name: record for _, records in written for name, record in records.items()}
    _require_files(written[0][0], files)
    return store.commit(writing, replace(plan, files=files))


def rank_key(rank: int) -> str:
    """Key of a rank's own state below `per_rank`."""
    return f"rank_{rank:05d}"


def _write_shards(
    writing: Path, state: Mapping[str, Any], rank: int, group: dist.ProcessGroup, visible_timeout_s: float
) -> tuple[dict[str, int], dict[str, FileRecord]]:
    """Writes this rank's share; returns how long each file must be (rank 0 only), and the files written."""
    shared = {key: value for key, value in state.items() if key != PER_RANK}
    if state.get(PER_RANK):
        # One key for all ranks would be taken for replicas of one value, of which one is kept.
        shared[PER_RANK] = {rank_key(rank): state[PER_RANK]}
    writer = ShardWriter(writing, visible_timeout_s)
    metadata = dcp.save(shared, storage_writer=writer, planner=_SavePlanner(), process_group=group)
    return (_planned_lengths(metadata) if rank == 0 else {}), writer.files


def _planned_lengths(metadata: Metadata) -> dict[str, int]:
    """Least size of each file, bytes, for what the metadata says is in it."""
    lengths: dict[str, int] = {}
    for info in metadata.storage_data.values():
        end = info.offset + info.length
        lengths[info.relative_path] = max(end, lengths.get(info.relative_path, 0))
    return lengths


def _require_files(lengths: dict[str, int], files: dict[str, FileRecord]) -> None:
    for name, length in lengths.items():
        if name not in files or files[name].size_bytes < length:
            raise CheckpointError(
                "commit a checkpoint", f"no rank has reported the {length} bytes of {name} as written"
            )


def _try_discard(writing: Path) -> None:
    # What stays, `retain` removes in the next attempt; the error being raised matters more.
    with suppress(OSError):
        store.discard(writing)


class HashingStream(io.RawIOBase):
    """A new file whose SHA-256 is taken from the bytes as they are written."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "xb")  # noqa: SIM115  closed by close()
        self._sha256 = hashlib.sha256()
        self._size_bytes = 0
        self.failure: OSError | None = None  #: what the disk refused; torch's own words hide it

    @property
    def record(self) -> FileRecord:
        return FileRecord(self._size_bytes, self._sha256.hexdigest())

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._sha256.update(data)
        try:
            written = self._file.write(data)
        except OSError as error:
            self.failure = error
            raise
        self._size_bytes += written
        return written

    def tell(self) -> int:
        return self._size_bytes

    def fileno(self) -> int:
        return self._file.fileno()

    def flush(self) -> None:
        if not self._file.closed:
            self._file.flush()

    def close(self) -> None:
        try:
            self._file.close()
        finally:
            super().close()


class _HashingFileSystem(FileSystem):
    """DCP's file system, keeping a record of every file written."""

    def __init__(self, visible_timeout_s: float) -> None:
        self.files: dict[str, FileRecord] = {}
        self.failure: OSError | None = None
        self._visible_timeout_s = visible_timeout_s

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        stream = HashingStream(Path(path))
        try:
            with stream:
                yield stream
        finally:
            self.failure = self.failure or stream.failure
        self.files[Path(path).name] = stream.record

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.files[Path(new_path).name] = self.files.pop(Path(path).name)

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        # Rank 0 has made it. Making it here would hide that this node does not share the file system.
        store.wait_visible(Path(path), self._visible_timeout_s)


class ShardWriter(FileSystemWriter):
    """DCP's writer that hashes, syncs, and fails unless everything that was planned was written."""

    def __init__(self, folder: Path, visible_timeout_s: float, thread_count: int = 1) -> None:
        super().__init__(folder, sync_files=True, thread_count=thread_count, overwrite=False)
        self.fs: _HashingFileSystem = _HashingFileSystem(visible_timeout_s)

    @property
    def files(self) -> dict[str, FileRecord]:
        return self.fs.files

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            future = super().write_data(plan, planner)
        except RuntimeError as error:
            raise self.fs.failure or error from error
        # DCP drops exceptions of its writer threads and reports what is left as a success (pytorch#191391).
        lost = {item.index for item in plan.items} - {result.index for result in future.value()}
        if lost:
            names = sorted({index.fqn for index in lost})
            raise OSError(
                f"{len(lost)} of {len(plan.items)} planned items were not written, {names[0]} among them"
            )
        return future

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()  # the default would pickle the path of the temporary folder


class _SavePlanner(DefaultSavePlanner):
    """DCP's planner, refusing values that could only be read back by running a pickle."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        data = super().transform_object(write_item, object)
        is_plain = object is None or isinstance(object, bool | int | float | str | bytes)
        if write_item.type == WriteItemType.BYTE_IO and not is_plain:
            buffer = cast(io.BytesIO, data)
            buffer.seek(0)
            try:
                torch.load(buffer, weights_only=True)
            except Exception:
                raise CheckpointError(
                    f"save {write_item.index.fqn}",
                    f"a {type(object).__name__} cannot be read back without running code",
                    "pass tensors, numbers, strings, bytes, and tuples, lists or dicts of them",
                ) from None
        return data
