"""Loading: the newest checkpoint that proves sound, on all ranks the same one, on any number of ranks.

All ranks hash a share of the files; rank 0 alone looks for candidates and decides. Nothing that comes from
the disk is executed: DCP's pickled metadata passes an unpickler that knows DCP's own classes only, values
are read with `weights_only`.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    create_default_local_load_plan,
)
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import STORAGE_TYPES, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

from hpctrain.checkpoint import manifest as manifests
from hpctrain.checkpoint import store
from hpctrain.checkpoint.exchange import Exchange
from hpctrain.checkpoint.manifest import Manifest
from hpctrain.checkpoint.store import Candidate, Checkpoint
from hpctrain.checkpoint.writer import PER_RANK, VISIBLE_TIMEOUT_S, rank_key
from hpctrain.errors import CheckpointError

_METADATA = ".metadata"
_DCP = "torch.distributed.checkpoint."
_ALLOWED = {
    (_DCP + "metadata", name)
    for name in (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    )
} | {(_DCP + "filesystem", "_StorageInfo"), ("torch", "Size"), ("torch.serialization", "_get_layout")}


@dataclass(frozen=True)
class Loaded:
    """What a checkpoint brought besides the tensors."""

    path: Path
    step: int
    facts: dict[str, Any]  #: as passed to `save`
    layout: dict[str, Any]  #: world_size and degrees it was saved with
    per_rank: dict[str, Any] | None  #: this rank's own state; None if saved by another number of ranks
    skipped: list[tuple[str, str]]  #: newer checkpoints that could not be used: name, reason


def load(root: Path, *, state: dict[str, Any], group: dist.ProcessGroup, timeout_s: float) -> Loaded | None:
    """Fills `state` in place from the newest sound checkpoint below `root`; None if there is none at all.

    Collective over `group`, a Gloo group of all ranks. Checkpoints that are incomplete or damaged are passed
    over; once an older one has been loaded, the damaged ones are renamed to `.damaged.…`.

    Args:
        state: As for `save`: tensors are copied into, other values replaced. Its `per_rank`, if any, is
            ignored. The checkpoint may hold more.

    Raises:
        CheckpointError: on every rank: nothing usable is left (starting from scratch would be silent
            loss), a key of `state` is missing in the checkpoint, a shape or dtype differs, a rank died.
    """
    with Exchange(group, timeout_s, f"load a checkpoint from {root}") as ranks:
        found = ranks.lead(lambda: store.candidates(root))
        chosen, skipped, damaged = _choose(ranks, found, min(VISIBLE_TIMEOUT_S, timeout_s / 2))
        if chosen is None:
            if skipped:
                raise _nothing_usable(root, skipped)
            return None
        path, manifest = chosen.path, chosen.manifest
        own: list[dict[str, Any] | None] = []
        ranks.everyone(lambda: own.append(_fill(path, manifest, state, ranks)))
        ranks.lead(lambda: _set_aside(damaged))
    return Loaded(path, manifest.step, manifest.facts, manifest.layout, own[0], skipped)


def load_full(path: Path, parts: Collection[str] | None = None) -> dict[str, Any]:
    """A checkpoint as a nested dict of whole tensors on the CPU, without a process group (for export).

    Args:
        parts: Top-level keys to read; all by default, the ranks' own state (`per_rank`) included.

    Raises:
        CheckpointError: it is incomplete or damaged, or has no such part.
    """
    metadata = _verified_metadata(path)
    paths = metadata.planner_data
    known = sorted({key_path[0] for key_path in paths.values()})
    unknown = sorted(set(parts or ()) - set(known))
    if unknown:
        raise CheckpointError(f"load {', '.join(unknown)} from {path}", f"it has {', '.join(known)}")
    keys = [key for key, key_path in paths.items() if parts is None or key_path[0] in parts]
    return _read_keys(path, metadata, keys)


class Part(Mapping[str, torch.Tensor]):
    """The tensors of one part of a checkpoint by name, each read from disk when it is asked for.

    Raises:
        CheckpointError: the checkpoint is incomplete or damaged.
    """

    def __init__(self, path: Path, part: str) -> None:
        self._path, self._part, self._metadata = path, part, _verified_metadata(path)
        paths = self._metadata.planner_data.items()
        self._key_of: dict[str, str] = {where[1]: key for key, where in paths if where[0] == part}

    def __getitem__(self, name: str) -> torch.Tensor:
        value = _read_keys(self._path, self._metadata, [self._key_of[name]])[self._part][name]
        assert isinstance(value, torch.Tensor)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._key_of)

    def __len__(self) -> int:
        return len(self._key_of)


def _verified_metadata(path: Path) -> Metadata:
    problems = store.verify(path)
    try:
        if not problems:
            return read_metadata(path, manifests.read(path))
    except (OSError, ValueError, pickle.UnpicklingError) as error:
        problems = [str(error)]
    raise CheckpointError(f"load {path}", "; ".join(problems), "take another checkpoint")


def read_metadata(path: Path, manifest: Manifest) -> Metadata:
    """DCP's metadata of a checkpoint; only DCP's own classes are unpickled.

    Raises:
        pickle.UnpicklingError: it is no such pickle, or asks for anything else.
        ValueError: it points to files that the manifest does not list.
    """
    with open(path / _METADATA, "rb") as file:
        try:
            metadata = _MetadataUnpickler(file).load()
        except (EOFError, AttributeError, IndexError, KeyError, TypeError) as error:
            raise pickle.UnpicklingError(f"{_METADATA} is not DCP metadata: {error!r}") from error
    if not isinstance(metadata, Metadata):
        raise pickle.UnpicklingError(f"{_METADATA} holds a {type(metadata).__name__}, not DCP metadata")
    unlisted = {info.relative_path for info in metadata.storage_data.values()} - set(manifest.files)
    if unlisted:
        raise ValueError(f"{_METADATA} points to {min(unlisted)}, which the manifest does not list")
    return metadata


def _choose(
    ranks: Exchange, found: list[Candidate], visible_timeout_s: float
) -> tuple[Checkpoint | None, list[tuple[str, str]], list[Path]]:
    """The first sound candidate, the ones passed over with the reason, and which of those are damaged."""
    skipped: list[tuple[str, str]] = []
    damaged: list[Path] = []
    for candidate in found:
        problems = candidate.problems
        if candidate.manifest and not problems:
            checkpoint = Checkpoint(candidate.path, candidate.manifest)
            told = ranks.everyone(partial(_check_share, checkpoint, ranks, visible_timeout_s))
            problems = list(dict.fromkeys(problem for some in told for problem in some))
            if not problems:
                return checkpoint, skipped, damaged
            damaged.append(candidate.path)
        skipped.append((candidate.path.name, "; ".join(problems)))
    return None, skipped, damaged


def _check_share(checkpoint: Checkpoint, ranks: Exchange, visible_timeout_s: float) -> list[str]:
    """Hashes this rank's share of the files; rank 0 reads the metadata as well."""
    store.wait_visible(checkpoint.path, visible_timeout_s)
    names = sorted(checkpoint.manifest.files)[ranks.rank :: ranks.world_size]
    problems = store.verify(checkpoint.path, names)
    if ranks.rank == 0 and not problems:
        try:
            read_metadata(checkpoint.path, checkpoint.manifest)
        except (OSError, ValueError, pickle.UnpicklingError) as error:
            return [str(error)]
    return problems


def _fill(path: Path, manifest: Manifest, state: dict[str, Any], ranks: Exchange) -> dict[str, Any] | None:
    """Reads `state` in place; returns this rank's own state if the number of ranks is the same."""
    metadata = read_metadata(path, manifest)
    shared = {key: value for key, value in state.items() if key != PER_RANK}
    _read(path, metadata, shared, _LoadPlanner())
    state.update(shared)
    if manifest.layout["world_size"] != ranks.world_size:
        return None
    own = (PER_RANK, rank_key(ranks.rank))
    keys = [key for key, key_path in metadata.planner_data.items() if key_path[:2] == own]
    return _read_keys(path, metadata, keys)[own[0]][own[1]] if keys else None


def _read_keys(path: Path, metadata: Metadata, keys: Iterable[str]) -> dict[str, Any]:
    """Whole values of some flattened keys, on the CPU, as the nested dict that was saved."""
    flat: dict[str, Any] = {}
    for key in keys:
        stored = metadata.state_dict_metadata[key]
        flat[key] = None
        if isinstance(stored, TensorStorageMetadata):
            flat[key] = torch.empty(stored.size, dtype=stored.properties.dtype)
    _read(path, metadata, flat, _LoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False))
    return unflatten_state_dict(flat, metadata.planner_data)


def _read(path: Path, metadata: Metadata, state: dict[str, Any], planner: DefaultLoadPlanner) -> None:
    """What `dcp.load` does on one rank. Loading needs no agreement: each rank reads what it lacks."""
    planner.set_up_planner(state, metadata, is_coordinator=True)
    reader = FileSystemReader(path)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    reader.read_data(planner.finish_plan(planner.create_local_plan()), planner).wait()


def _set_aside(damaged: list[Path]) -> None:
    """Hides what rank 0 too finds damaged: next time it is neither hashed again nor counted as kept."""
    for path in damaged:
        try:
            if store.verify(path):
                store.set_aside(path)
        except OSError:
            pass  # a folder that we may only read is passed over again the next time


def _nothing_usable(root: Path, skipped: list[tuple[str, str]]) -> CheckpointError:
    return CheckpointError(
        f"load a checkpoint from {root}",
        "none is usable: " + "; ".join(f"{name}: {reason}" for name, reason in skipped),
        "repair one, or move them all away to start from the beginning",
    )


class _LoadPlanner(DefaultLoadPlanner):
    """DCP's planner, strict about keys, shapes and dtypes, and reading values without running code."""

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        stored = self.metadata.state_dict_metadata
        told = [_mismatch(key, value, stored.get(key)) for key, value in self.state_dict.items()]
        problems = [problem for problem in told if problem]
        if problems:
            rest = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
            raise CheckpointError(
                "load the state of this model from a checkpoint",
                "; ".join(problems[:5]) + rest,
                "load it with the model and optimizer it was saved with",
            )
        return create_default_local_load_plan(self.state_dict, self.metadata)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        loaded = torch.load(value, map_location="cpu", weights_only=True)
        key = read_item.dest_index.fqn
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[key], loaded)
        else:
            self.state_dict[key] = loaded


def _mismatch(key: str, value: Any, stored: STORAGE_TYPES | None) -> str | None:
    """What keeps `value` from being filled from what is stored."""
    if stored is None:
        return f"{key} is missing in the checkpoint"
    if not isinstance(stored, TensorStorageMetadata):
        return f"{key} is a tensor, in the checkpoint it is none" if isinstance(value, torch.Tensor) else None
    if not isinstance(value, torch.Tensor):
        return f"{key} is a {type(value).__name__}, in the checkpoint it is a tensor"
    if (value.shape, value.dtype) != (stored.size, stored.properties.dtype):
        there = f"{stored.properties.dtype}{list(stored.size)}"
        return f"{key} is {value.dtype}{list(value.shape)}, in the checkpoint {there}"
    return None


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return super().find_class(module, name)
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f"{_METADATA} asks for {module}.{name}, which is not DCP metadata")
