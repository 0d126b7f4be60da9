from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from hpctrain.data.documents import Turn
from hpctrain.data.tokenizer import DocumentTokenizer
from hpctrain.data.tokens import TokenSet, token_dtype
from hpctrain.errors import DataError
from tests.data.tokenized import make_tokenizer, pack, write_lines


@pytest.fixture
def own_copy(token_folder: Path, tmp_path: Path) -> Path:
    """A copy of the packed split that a test may damage."""
    return Path(shutil.copytree(token_folder / "train", tmp_path / "train"))


def test_documents_come_back_in_order_with_their_tokens_and_masks(token_folder: Path) -> None:
    tokens = TokenSet(token_folder / "train")
    tokenizer = DocumentTokenizer(tokens.tokenizer_folder)
    roles = {"customer": "user", "agent": "assistant"}
    with open(token_folder.parent / "calls.jsonl", encoding="utf-8") as file:
        records = [json.loads(line) for line in file]
    assert tokens.num_documents == len(records) == 120
    for number, record in enumerate(records):
        document = record.get("text") or [Turn(roles[t["role"]], t["content"]) for t in record["turns"]]
        expected = tokenizer.encode(document, "agent")
        assert tokens.tokens(number).tolist() == expected.ids.tolist()
        assert tokens.learnt(number).tolist() == expected.learnt.tolist()
    assert tokens.num_tokens == sum(len(tokens.tokens(i)) for i in range(120))
    assert tokens.meta.num_learnt == sum(int(tokens.learnt(i)[1:].sum()) for i in range(120))


def test_stretches_are_clipped_to_their_document(token_folder: Path) -> None:
    tokens = TokenSet(token_folder / "train")
    for document in (0, 1, 57, 119):
        whole, mask = tokens.tokens(document).tolist(), tokens.learnt(document).tolist()
        for start in range(0, len(whole) + 3, 5):
            for stop in (start, start + 1, start + 13, len(whole), len(whole) + 9):
                assert tokens.tokens(document, start, stop).tolist() == whole[start:stop]
                assert tokens.learnt(document, start, stop).tolist() == mask[start:stop]


def test_a_large_vocabulary_is_stored_in_four_bytes(tmp_path: Path) -> None:
    assert [token_dtype(size).itemsize for size in (1 << 16, (1 << 16) + 1)] == [2, 4]
    folder = make_tokenizer(tmp_path / "tokenizer")
    path = folder / "tokenizer.json"
    raw = json.loads(path.read_text())
    last = {**raw["added_tokens"][0], "id": 99_999, "content": "<|last|>"}
    raw["added_tokens"].append(last)
    raw["model"]["vocab"]["<|last|>"] = 99_999
    path.write_text(json.dumps(raw))
    pack(write_lines(tmp_path / "a.jsonl", [{"text": "một<|last|>"}]), tmp_path / "out", folder)
    tokens = TokenSet(tmp_path / "out" / "train")
    assert tokens.vocab_size == 100_000 and 99_999 in tokens.tokens(0)


@pytest.mark.parametrize("suffix", ["tokens", "mask"])
def test_a_missing_or_truncated_shard_is_found_on_opening(own_copy: Path, suffix: str) -> None:
    path = next(own_copy.glob(f"*.{suffix}"))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match="should have"):
        TokenSet(own_copy)
    path.unlink()
    with pytest.raises(DataError, match="missing"):
        TokenSet(own_copy)


@pytest.mark.parametrize("name", ["tokens", "mask", "npy"])
def test_a_flipped_bit_is_found_by_checksum(own_copy: Path, name: str) -> None:
    TokenSet(own_copy).verify()
    path = next(own_copy.glob(f"*.{name}"))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match="is damaged"):
        TokenSet(own_copy).verify()


def test_a_damaged_index_is_found_on_opening(own_copy: Path) -> None:
    path = own_copy / "documents.npy"
    np.save(path, np.load(path)[:-1])
    with pytest.raises(DataError, match="120 documents"):
        TokenSet(own_copy)
    path.write_bytes(b"")
    with pytest.raises(DataError, match="cannot be read"):
        TokenSet(own_copy)


def test_other_folders_are_refused_with_what_to_do(tmp_path: Path, packed: Path, own_copy: Path) -> None:
    with pytest.raises(DataError, match="hpctrain data tokens"):
        TokenSet(tmp_path)
    with pytest.raises(DataError, match="is of images"):
        TokenSet(packed)
    raw = json.loads((own_copy / "meta.json").read_text())
    (own_copy / "meta.json").write_text(json.dumps({**raw, "format": 9}))
    with pytest.raises(DataError, match="format 9"):
        TokenSet(own_copy)
