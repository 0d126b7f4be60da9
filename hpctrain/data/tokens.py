"""Packed tokens: memory-mapped shards, the loss mask as bits, and an index of the documents.

A split is a folder: `train-000000.tokens` (little-endian uint16, or uint32 for vocabularies above 65,536),
`train-000000.mask` (a bit a token, first token in the highest bit: whether it is learnt), `documents.npy`
with a record per document, and `meta.json`, which is written last: a folder without it is not finished.
The tokenizer lies beside the splits.
"""

from __future__ import annotations

import functools
import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hpctrain.errors import DataError

FORMAT_VERSION = 1
DOCUMENT_DTYPE = np.dtype(
    [
        ("shard", "<i4"),
        ("start", "<i8"),  #: first token in the shard
        ("length", "<i4"),  #: tokens
        ("learnt", "<i4"),  #: tokens that are learnt; the first is never, nothing predicts it
    ]
)
META_NAME = "meta.json"
DOCUMENTS_NAME = "documents.npy"
TOKENIZER_NAME = "tokenizer"

_MAX_OPEN_SHARDS = 512
_AGAIN = "copy it again, or pack the tokens again"


@dataclass(frozen=True)
class TokenShard:
    """One shard: a file of tokens and one of bits."""

    name: str  #: without the suffix
    num_tokens: int
    tokens_sha256: str
    mask_sha256: str


@dataclass(frozen=True)
class TokenMeta:
    """What `meta.json` says about a split."""

    num_documents: int
    num_tokens: int
    num_learnt: int  #: tokens with weight in the loss
    num_syllables: int  #: of the documents' words, as spaces divide them
    vocab_size: int
    eos_id: int
    tokenizer_sha256: str
    documents_sha256: str
    shards: list[TokenShard]
    options: dict[str, Any] = field(default_factory=dict)  #: how the split was packed
    kind: str = "tokens"
    format: int = FORMAT_VERSION

    def to_json(self) -> str:
        """Returns the text of `meta.json`."""
        return json.dumps(asdict(self), ensure_ascii=False, indent=1)

    @classmethod
    def read(cls, folder: Path) -> TokenMeta:
        """Reads `meta.json`.

        Raises:
            DataError: the file is missing, damaged, of images, or of another format version.
        """
        path = folder / META_NAME
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
            found = raw.get("kind", "images"), raw["format"]
            if found == ("tokens", FORMAT_VERSION):
                return cls(**{**raw, "shards": [TokenShard(**each) for each in raw["shards"]]})
        except FileNotFoundError:
            raise DataError(
                f"{folder} is no folder of packed tokens",
                f"it has no {META_NAME} (never packed, or packing did not finish)",
                "pack it with `hpctrain data tokens SOURCE OUT --tokenizer FOLDER`, or set data.root to the "
                "folder that holds train/ and val/",
            ) from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{path} cannot be read", repr(error), "pack the tokens again") from error
        raise DataError(
            f"{path} is of {found[0]}, format {found[1]}",
            f"this reads tokens, format {FORMAT_VERSION}",
            "set data to the kind that the folder holds, or pack again",
        )


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Returns the type of stored tokens."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


class TokenSet:
    """A packed split, open for reading. Opening looks at names and sizes only.

    Raises:
        DataError: a file is missing or has another size than `meta.json` says.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.meta = TokenMeta.read(self.folder)
        self.dtype = token_dtype(self.meta.vocab_size)
        self.documents = self._open_documents()  #: records of DOCUMENT_DTYPE, memory-mapped
        for shard in self.meta.shards:
            self._check_size(f"{shard.name}.tokens", shard.num_tokens * self.dtype.itemsize)
            self._check_size(f"{shard.name}.mask", -(-shard.num_tokens // 8))
        self._shard = functools.lru_cache(_MAX_OPEN_SHARDS)(self._map_shard)

    @property
    def num_documents(self) -> int:
        """Documents in the split."""
        return self.meta.num_documents

    @property
    def num_tokens(self) -> int:
        """Tokens in the split."""
        return self.meta.num_tokens

    @property
    def vocab_size(self) -> int:
        """Token ids are 0 … vocab_size-1."""
        return self.meta.vocab_size

    @property
    def tokenizer_folder(self) -> Path:
        """The Hugging Face tokenizer folder that made the tokens."""
        return self.folder.parent / TOKENIZER_NAME

    def tokens(self, document: int, start: int = 0, stop: int | None = None) -> npt.NDArray[np.int64]:
        """Returns tokens `start` … `stop`-1 of a document, clipped to it."""
        shard, first, after = self._stretch(document, start, stop)
        return self._shard(shard)[0][first:after].astype(np.int64)

    def learnt(self, document: int, start: int = 0, stop: int | None = None) -> npt.NDArray[np.bool_]:
        """Returns which of the tokens `start` … `stop`-1 of a document are learnt."""
        shard, first, after = self._stretch(document, start, stop)
        bits = np.unpackbits(self._shard(shard)[1][first // 8 : -(-after // 8)])
        return bits[first % 8 : first % 8 + after - first].astype(bool)

    def verify(self) -> None:
        """Reads every file and compares it with its checksum.

        Raises:
            DataError: a file differs.
        """
        expected = {DOCUMENTS_NAME: self.meta.documents_sha256}
        for shard in self.meta.shards:
            expected[f"{shard.name}.tokens"] = shard.tokens_sha256
            expected[f"{shard.name}.mask"] = shard.mask_sha256
        for name, digest in expected.items():
            with open(self.folder / name, "rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            if found != digest:
                raise DataError(
                    f"{self.folder / name} is damaged",
                    f"sha256 {found}, but {META_NAME} says {digest}",
                    _AGAIN,
                )

    def _stretch(self, document: int, start: int, stop: int | None) -> tuple[int, int, int]:
        shard, first, length, _ = self.documents[document].item()
        start, stop = min(start, length), length if stop is None else min(stop, length)
        return shard, first + start, first + max(start, stop)

    def _map_shard(self, number: int) -> tuple[npt.NDArray[Any], npt.NDArray[np.uint8]]:
        path = self.folder / self.meta.shards[number].name
        try:
            return (
                np.memmap(path.with_suffix(".tokens"), dtype=self.dtype, mode="r"),
                np.memmap(path.with_suffix(".mask"), dtype=np.uint8, mode="r"),
            )
        except (OSError, ValueError) as error:
            raise DataError(f"shard {path} cannot be read", str(error), _AGAIN) from error

    def _open_documents(self) -> npt.NDArray[Any]:
        path = self.folder / DOCUMENTS_NAME
        try:
            documents: npt.NDArray[Any] = np.load(path, mmap_mode="r")
        except (OSError, ValueError, EOFError) as error:
            raise DataError(f"{path} cannot be read", repr(error), _AGAIN) from error
        if documents.dtype != DOCUMENT_DTYPE or documents.shape != (self.meta.num_documents,):
            raise DataError(
                f"{path} should hold {self.meta.num_documents} documents, as {META_NAME} says",
                f"{documents.shape} records of {documents.dtype.itemsize} bytes",
                _AGAIN,
            )
        return documents

    def _check_size(self, name: str, size_bytes: int) -> None:
        path = self.folder / name
        try:
            found = path.stat().st_size
        except OSError as error:
            raise DataError(f"{path} is missing", error.strerror or str(error), _AGAIN) from None
        if found != size_bytes:
            raise DataError(f"{path} should have {size_bytes} bytes", f"it has {found}", _AGAIN)
