from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hpctrain.data.documents import (
    Document,
    LeftOutError,
    Turn,
    cut_pieces,
    fingerprint,
    list_files,
    read_piece,
)
from hpctrain.errors import ConfigError, DataError
from tests.data.tokenized import call, write_lines


def _read(source: Path, piece_bytes: int = 1 << 20) -> list[tuple[str, int, Document | str]]:
    """File, line and document (or the reason why it is left out) of every record."""
    found: list[tuple[str, int, Document | str]] = []
    before: dict[str, int] = {}
    for piece in cut_pieces(source, list_files(source), piece_bytes):
        num_lines, records = read_piece(source, piece)
        for line, record in records:
            words = str(record) if isinstance(record, LeftOutError) else record
            found.append((piece.name, before.get(piece.name, 0) + line, words))
        before[piece.name] = before.get(piece.name, 0) + num_lines
    return found


def _one(tmp_path: Path, record: Any) -> Document | str:
    [(_, _, document)] = _read(write_lines(tmp_path / "a.jsonl", [record]))
    return document


def test_a_text_and_a_call_are_read_under_every_name_that_they_go_by(tmp_path: Path) -> None:
    assert _one(tmp_path, {"text": " xin chào ", "id": 7}) == " xin chào "
    for turns, words in (("turns", "content"), ("messages", "text")):
        record = {
            turns: [
                {"role": "system", words: "a"},
                {"role": "customer", words: " b "},
                {"role": "Agent", words: "c"},
                {"role": "user", words: "d"},
                {"role": "assistant", words: "e"},
            ]
        }
        roles = ("system", "user", "assistant", "user", "assistant")
        assert _one(tmp_path, record) == [Turn(*pair) for pair in zip(roles, "abcde", strict=True)]


def test_turns_without_words_are_skipped(tmp_path: Path) -> None:
    assert _one(tmp_path, call("a", "", "b", "c")) == [
        Turn("user", "a"),
        Turn("user", "b"),
        Turn("assistant", "c"),
    ]


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ('{"text": "cụt', "not JSON"),
        ("[" * 100_000, "not JSON"),
        ([1], "no object"),
        ({"words": "a"}, "no text, turns or messages"),
        ({"text": 3}, "text is no text"),
        ({"text": " \n"}, "empty"),
        ({"turns": []}, "empty"),
        (call("", " "), "empty"),
        ({"turns": "a"}, "turns is no list"),
        ({"turns": ["a"]}, "turn 1 is no object"),
        ({"turns": [{"role": "agent", "content": "a"}, {"content": "b"}]}, "turn 2 has role None"),
        ({"turns": [{"role": "khách", "content": "a"}]}, "turn 1 has role 'khách'; known: agent, assistant"),
        ({"turns": [{"role": "agent", "content": ["a"]}]}, "content of turn 1 is no text"),
        ({"turns": [{"role": "agent"}]}, "content of turn 1 is no text"),
        ('{"text": "\\ud800"}', "no valid Unicode"),
    ],
)
def test_what_is_no_document_comes_out_with_its_reason(tmp_path: Path, record: Any, reason: str) -> None:
    found = _one(tmp_path, record)
    assert isinstance(found, str) and reason in found


def test_bytes_that_are_not_utf8_are_left_out_and_the_next_line_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "\xff"}\r\n\r\n{"text": "b"}\r\n')
    assert _read(tmp_path) == [("a.jsonl", 1, "not UTF-8"), ("a.jsonl", 3, "b")]


def test_a_byte_order_mark_is_no_part_of_the_first_record(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n', encoding="utf-8-sig")
    (tmp_path / "b.txt").write_text("b", encoding="utf-8-sig")
    assert [document for _, _, document in _read(tmp_path)] == ["a", "b"]


def test_blank_lines_divide_the_documents_of_a_text_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\nmột\nhai\n \n\nba\r\nbốn")
    assert _read(tmp_path) == [("a.txt", 2, "một\nhai"), ("a.txt", 6, "ba\nbốn")]


@pytest.mark.parametrize("piece_bytes", [1, 7, 40, 200, 1000])
@pytest.mark.parametrize("suffix", ["jsonl", "txt", "parquet"])
def test_pieces_of_any_size_hold_every_record_once_with_its_line(
    tmp_path: Path, suffix: str, piece_bytes: int
) -> None:
    texts = [f"câu {i} " + "dài " * (i % 7) + ("\nhai" if suffix == "txt" else "") for i in range(60)]
    path = tmp_path / f"a.{suffix}"
    if suffix == "jsonl":
        write_lines(path, [json.dumps({"text": text}) + "\n" * (i % 3) for i, text in enumerate(texts)])
    elif suffix == "txt":
        path.write_text("".join(text + "\n" * (2 + i % 3) for i, text in enumerate(texts)))
    else:
        pq.write_table(pa.table({"text": texts}), path, row_group_size=5)
    assert _read(path, piece_bytes) == _read(path, 1 << 30)
    assert [document for _, _, document in _read(path, piece_bytes)] == texts
    lines = path.read_text().splitlines() if suffix != "parquet" else []
    for (_, line, _), text in zip(_read(path, piece_bytes), texts, strict=True) if lines else ():
        assert text.splitlines()[0] in (
            lines[line - 1] if suffix == "txt" else json.loads(lines[line - 1])["text"]
        )


def test_parquet_holds_texts_or_turns_and_null_is_left_out(tmp_path: Path) -> None:
    turns = [call("a", "b")["turns"], None]
    pq.write_table(pa.table({"messages": turns, "text": ["x", "y"], "other": [1, 2]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"text": ["c", None]}), tmp_path / "b.parquet")
    assert _read(tmp_path) == [
        ("a.parquet", 1, [Turn("user", "a"), Turn("assistant", "b")]),
        ("a.parquet", 2, "y"),
        ("b.parquet", 1, "c"),
        ("b.parquet", 2, "text is no text"),
    ]


def test_parquet_that_is_damaged_or_has_other_columns_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(DataError, match="as Parquet"):
        _read(tmp_path)
    pq.write_table(pa.table({"words": ["c"]}), tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match="words"):
        _read(tmp_path)


def test_files_are_read_in_the_order_of_their_names_and_hidden_ones_not_at_all(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    for name in ("b.txt", "a.jsonl", "deep/c.ndjson", ".hidden.txt", "readme.md"):
        (tmp_path / name).write_text("")
    assert list_files(tmp_path) == ["a.jsonl", "b.txt", "deep/c.ndjson"]


@pytest.mark.parametrize("name", ["calls.jsonl.gz", "missing"])
def test_nothing_to_read_is_refused_with_the_known_suffixes(tmp_path: Path, name: str) -> None:
    (tmp_path / "calls.jsonl.gz").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"\.jsonl, \.ndjson, \.parquet, \.txt"):
        list_files(tmp_path / name)
    with pytest.raises(ConfigError, match="no file in it"):
        list_files(tmp_path)


def test_the_fingerprint_notices_a_longer_and_an_edited_file(tmp_path: Path) -> None:
    seen = set()
    for text in ("một", "một\n", "hai\n"):
        (tmp_path / "a.txt").write_text(text)
        seen.add(fingerprint(tmp_path, ["a.txt"]))
    assert len(seen) == 3
