"""Documents from files: JSON lines, Parquet, plain text; cut into pieces that processes read on their own.

A document is a text, or a call: turns of an agent and a customer. Texts are brought to Unicode NFC, because
Vietnamese comes in both forms. A record that is no document is not an error: it comes out with its reason.
"""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from hpctrain.errors import ConfigError, DataError

JSON_LINES, PARQUET, TEXT = (".jsonl", ".ndjson"), (".parquet",), (".txt",)
SUFFIXES = (*JSON_LINES, *PARQUET, *TEXT)
#: What sources call a speaker, and what chat templates call it.
ROLES = {
    "agent": "assistant",
    "assistant": "assistant",
    "customer": "user",
    "user": "user",
    "system": "system",
}
AGENT = "assistant"

_TURN_KEYS = ("turns", "messages")
_WORD_KEYS = ("content", "text")
_FINGERPRINT_BYTES = 64 << 10


@dataclass(frozen=True)
class Turn:
    """What one speaker says."""

    role: str  #: as chat templates call it: assistant, user, system
    text: str


Document = str | list[Turn]


class LeftOutError(Exception):
    """A record that is no document; the text is the reason, and holds none of the record's words."""


@dataclass(frozen=True)
class Piece:
    """A part of a source file that is read on its own."""

    name: str  #: of the file, relative to the source
    start: int  #: first byte; of Parquet the first row group
    stop: int  #: after the last
    size_bytes: int


def list_files(source: Path) -> list[str]:
    """Returns the files to read, relative to the source and sorted; of a single file, its name.

    Raises:
        ConfigError: there are none.
    """
    if source.is_file() and source.suffix.lower() in SUFFIXES:
        return [source.name]
    paths = source.rglob("*") if source.is_dir() else []
    known = (path.relative_to(source) for path in paths if path.suffix.lower() in SUFFIXES)
    names = sorted(str(path) for path in known if not any(part.startswith(".") for part in path.parts))
    if names:
        return names
    what = (
        "no file in it has one"
        if source.is_dir()
        else "it has another"
        if source.exists()
        else "no such file"
    )
    raise ConfigError(
        f"{source} holds nothing to read: files end with {', '.join(SUFFIXES)}",
        what,
        "name the files so; unpack compressed files first",
    )


def fingerprint(source: Path, names: list[str]) -> str:
    """Returns a hash of the names, the sizes and both ends of the files."""
    digest = hashlib.sha256()
    for name in names:
        with _open(_path(source, name)) as file:
            size = file.seek(0, 2)
            digest.update(f"{name}\0{size}\0".encode())
            for offset in (0, max(0, size - _FINGERPRINT_BYTES)):
                file.seek(offset)
                digest.update(file.read(_FINGERPRINT_BYTES))
    return digest.hexdigest()


def cut_pieces(source: Path, names: list[str], piece_bytes: int) -> list[Piece]:
    """Cuts files into pieces of about `piece_bytes` between records."""
    pieces: list[Piece] = []
    for name in names:
        path = _path(source, name)
        if path.suffix.lower() in PARQUET:
            pieces += _cut_row_groups(path, name, piece_bytes)
            continue
        cuts = list(_find_cuts(path, piece_bytes, path.suffix.lower() in TEXT))
        pieces += [
            Piece(name, start, stop, stop - start) for start, stop in zip([0, *cuts], cuts, strict=False)
        ]
    return pieces


def read_piece(source: Path, piece: Piece) -> tuple[int, Iterator[tuple[int, Document | LeftOutError]]]:
    """Returns the lines (of Parquet: rows) of a piece, and its records with their line in it, from 1.

    Raises:
        DataError: the file cannot be read.
    """
    path = _path(source, piece.name)
    if path.suffix.lower() in PARQUET:
        rows = _read_rows(path, piece)
        return len(rows), ((i, _try_parse(row)) for i, row in enumerate(rows, start=1))
    with _open(path) as file:
        file.seek(piece.start)
        data = file.read(piece.stop - piece.start)
    if piece.start == 0:
        data = data.removeprefix("\ufeff".encode())
    lines = data.split(b"\n")
    if not lines[-1]:
        lines.pop()
    records = _paragraphs(lines) if path.suffix.lower() in TEXT else enumerate(lines, start=1)
    parse = _text_of if path.suffix.lower() in TEXT else _json_of
    return len(lines), ((i, _try_parse(line, parse)) for i, line in records if line.strip())


def _path(source: Path, name: str) -> Path:
    return source if source.is_file() else source / name


def _open(path: Path) -> BinaryIO:
    try:
        return open(path, "rb")
    except OSError as error:
        raise DataError(f"{path} cannot be read", error.strerror or str(error)) from None


def _find_cuts(path: Path, piece_bytes: int, is_text: bool) -> Iterator[int]:
    """Yields where pieces end: after a line, of text after a blank line, and at the end of the file."""
    with _open(path) as file:
        size = file.seek(0, 2)
        cut = 0
        while cut < size:
            file.seek(cut + piece_bytes)
            file.readline()  # the rest of a line
            while is_text and file.readline().strip():
                pass
            cut = min(size, file.tell())
            yield cut


def _cut_row_groups(path: Path, name: str, piece_bytes: int) -> Iterator[Piece]:
    facts = _open_parquet(path).metadata
    start = size_bytes = 0
    for group in range(facts.num_row_groups):
        size_bytes += facts.row_group(group).total_byte_size
        if size_bytes >= piece_bytes or group == facts.num_row_groups - 1:
            yield Piece(name, start, group + 1, size_bytes)
            start, size_bytes = group + 1, 0


def _read_rows(path: Path, piece: Piece) -> list[Any]:
    file = _open_parquet(path)
    columns = [name for name in file.schema_arrow.names if name in ("text", *_TURN_KEYS)]
    if not columns:
        raise ConfigError(
            f"{path} holds no documents: it needs a column text, turns or messages",
            f"columns: {', '.join(file.schema_arrow.names)}",
            "rename the column",
        )
    try:
        groups = file.read_row_groups(list(range(piece.start, piece.stop)), columns=columns)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path} cannot be read", str(error), "copy it again") from error
    return list(groups.to_pylist())


def _open_parquet(path: Path) -> Any:
    try:
        return pq.ParquetFile(path)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path} cannot be read as Parquet", str(error), "copy it again") from error


def _paragraphs(lines: list[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yields runs of lines that are not blank, with the number of their first line."""
    run: list[bytes] = []
    for i, line in enumerate([*lines, b""], start=1):
        if line.strip():
            run.append(line)
        elif run:
            yield i - len(run), b"\n".join(run)
            run = []


def _try_parse(record: Any, decode: Any = None) -> Document | LeftOutError:
    try:
        return _parse(decode(record) if decode else record)
    except LeftOutError as error:
        return error


def _text_of(record: bytes) -> dict[str, str]:
    try:
        return {"text": record.decode().replace("\r\n", "\n")}
    except UnicodeDecodeError:
        raise LeftOutError("not UTF-8") from None


def _json_of(line: bytes) -> Any:
    try:
        return json.loads(line.decode())
    except UnicodeDecodeError:
        raise LeftOutError("not UTF-8") from None
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else type(error).__name__
        raise LeftOutError(f"not JSON: {reason}") from None


def _parse(record: Any) -> Document:
    if not isinstance(record, dict):
        raise LeftOutError("no object with a text, turns or messages")
    for key in _TURN_KEYS:
        if record.get(key) is not None:
            return _turns(key, record[key])
    if "text" not in record:
        raise LeftOutError("no text, turns or messages")
    text = _nfc("text", record["text"])
    if not text.strip():
        raise LeftOutError("empty")
    return text


def _turns(key: str, raw: Any) -> list[Turn]:
    if not isinstance(raw, list):
        raise LeftOutError(f"{key} is no list")
    turns = [turn for turn in _each_turn(raw) if turn.text]
    if not turns:
        raise LeftOutError("empty")
    return turns


def _each_turn(raw: Iterable[Any]) -> Iterator[Turn]:
    for number, turn in enumerate(raw, start=1):
        if not isinstance(turn, dict):
            raise LeftOutError(f"turn {number} is no object")
        name = turn.get("role")
        role = ROLES.get(name.lower()) if isinstance(name, str) else None
        if role is None:
            raise LeftOutError(f"turn {number} has role {name!r:.40}; known: {', '.join(ROLES)}")
        words = next((turn[key] for key in _WORD_KEYS if turn.get(key) is not None), None)
        yield Turn(role, _nfc(f"content of turn {number}", words).strip())


def _nfc(what: str, text: Any) -> str:
    if not isinstance(text, str):
        raise LeftOutError(f"{what} is no text")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise LeftOutError(f"{what} is no valid Unicode (half of a surrogate pair)") from None
    return unicodedata.normalize("NFC", text)
