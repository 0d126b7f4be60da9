"""Writing token shards: one piece of the source becomes one shard in each split.

What a job writes is a pure function of the job, so any process may do it, and one that is done is not done
again: a part file, written last, says so and keeps what the index and the report need.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hpctrain.data.documents import Document, LeftOutError, Piece, read_piece
from hpctrain.data.restartable import write_atomically
from hpctrain.data.tokenizer import DocumentTokenizer, Encoded
from hpctrain.data.tokens import DOCUMENT_DTYPE, TokenShard, token_dtype
from hpctrain.errors import DataError

PARTS_NAME = ".parts"
SPLITS = ("train", "val")


@dataclass(frozen=True)
class PieceJob:
    """What one piece of the source shall become."""

    source: Path
    out: Path
    number: int  #: of the piece
    piece: Piece
    tokenizer: Path
    learn: str  #: "agent" or "all"
    val_fraction: float
    seed: int


@dataclass(frozen=True)
class SplitPart:
    """What one piece gave to one split."""

    documents: npt.NDArray[Any]  #: records of DOCUMENT_DTYPE; `shard` is set when all pieces are done
    shard: TokenShard
    num_syllables: int


@dataclass(frozen=True)
class PiecePart:
    """What a part file says about its piece."""

    splits: dict[str, SplitPart]
    left_out: list[tuple[int, str]]  #: line in the piece, from 1; reason
    num_lines: int  #: of the piece
    num_unknown: int  #: tokens for what the vocabulary lacks

    @classmethod
    def read(cls, out: Path, number: int) -> PiecePart:
        with np.load(_part_path(out, number)) as part:
            facts = json.loads(str(part["facts"]))
            splits = {
                name: SplitPart(part[name], TokenShard(**facts[name]["shard"]), facts[name]["syllables"])
                for name in SPLITS
            }
        left_out = [(line, reason) for line, reason in facts["left_out"]]
        return cls(splits, left_out, facts["num_lines"], facts["num_unknown"])


def is_written(out: Path, number: int) -> bool:
    """Whether an earlier run has written a piece."""
    return _part_path(out, number).exists()


def write_piece(job: PieceJob) -> int:
    """Writes the shards of a piece and then its part file; returns the bytes of the source.

    Raises:
        DataError: the source cannot be read, or the shards cannot be written.
    """
    tokenizer = _open_tokenizer(job.tokenizer)
    splits = {name: _Collected() for name in SPLITS}
    left_out, num_unknown = [], 0
    num_lines, records = read_piece(job.source, job.piece)
    for line, record in records:
        try:
            if isinstance(record, LeftOutError):
                raise record
            encoded = tokenizer.encode(record, job.learn)
        except LeftOutError as error:
            left_out.append((line, str(error)))
            continue
        num_unknown += (
            int((encoded.ids == tokenizer.unknown_id).sum()) if tokenizer.unknown_id is not None else 0
        )
        splits["val" if is_val(record, job.val_fraction, job.seed) else "train"].add(encoded)
    facts: dict[str, Any] = {"left_out": left_out, "num_lines": num_lines, "num_unknown": num_unknown}
    try:
        for name, split in splits.items():
            shard = split.write(job.out / name, f"{name}-{job.number:06d}", token_dtype(tokenizer.vocab_size))
            facts[name] = {"shard": shard, "syllables": split.num_syllables}
        buffer = io.BytesIO()
        indexes = {name: split.index() for name, split in splits.items()}
        np.savez(buffer, facts=json.dumps(facts), **indexes)  # type: ignore[arg-type]
        write_atomically(_part_path(job.out, job.number), buffer.getvalue())
    except OSError as error:
        raise cannot_write(job.out, error) from error
    return job.piece.size_bytes


def is_val(document: Document, val_fraction: float, seed: int) -> bool:
    """Whether a document belongs to val: decided by its words alone, so equal documents stay together."""
    words = (
        document if isinstance(document, str) else "".join(f"\0{each.role}\0{each.text}" for each in document)
    )
    digest = hashlib.blake2b(words.encode(), digest_size=8, salt=(seed % (1 << 64)).to_bytes(8, "little"))
    return int.from_bytes(digest.digest(), "little") < val_fraction * 2.0**64


def cannot_write(out: Path, error: OSError) -> DataError:
    """Returns the error for a disk that is full, or otherwise refuses."""
    return DataError(
        f"cannot write into {out}",
        error.strerror or str(error),
        "free some space (df, quota) and give the same command again: it goes on where it was",
    )


class _Collected:
    """The documents of one piece for one split."""

    def __init__(self) -> None:
        self._documents: list[Encoded] = []
        self.num_syllables = 0

    def add(self, encoded: Encoded) -> None:
        self._documents.append(encoded)
        self.num_syllables += encoded.num_syllables

    def index(self) -> npt.NDArray[Any]:
        index = np.zeros(len(self._documents), dtype=DOCUMENT_DTYPE)
        index["length"] = [len(each.ids) for each in self._documents]
        index["learnt"] = [int(each.learnt[1:].sum()) for each in self._documents]
        index["start"] = np.cumsum(index["length"], dtype=np.int64) - index["length"]
        return index

    def write(self, folder: Path, name: str, dtype: np.dtype[Any]) -> dict[str, Any]:
        """Writes the shard, if there is anything in it, and returns the fields of its TokenShard."""
        ids = np.concatenate([np.empty(0, np.int64), *(each.ids for each in self._documents)])
        learnt = np.concatenate([np.empty(0, bool), *(each.learnt for each in self._documents)])
        contents = {"tokens": ids.astype(dtype).tobytes(), "mask": np.packbits(learnt).tobytes()}
        if len(ids):
            folder.mkdir(exist_ok=True)
            for suffix, content in contents.items():
                write_atomically(folder / f"{name}.{suffix}", content)
        digests = {
            f"{suffix}_sha256": hashlib.sha256(content).hexdigest() for suffix, content in contents.items()
        }
        return {"name": name, "num_tokens": len(ids), **digests}


def _part_path(out: Path, number: int) -> Path:
    return out / PARTS_NAME / f"{number:06d}.npz"


@functools.lru_cache(maxsize=1)
def _open_tokenizer(folder: Path) -> DocumentTokenizer:
    return DocumentTokenizer(folder)
