from __future__ import annotations

import json
import multiprocessing
import os
import resource
import signal
import unicodedata
from pathlib import Path
from typing import Any

import pytest

from hpctrain.cli import main as cli
from hpctrain.data import prepare_tokens, token_shards
from hpctrain.data.prepare_tokens import main
from hpctrain.data.token_shards import PieceJob, write_piece
from hpctrain.data.tokenizer import DocumentTokenizer
from hpctrain.data.tokens import TokenSet
from hpctrain.errors import ConfigError, DataError
from tests.data.packed import contents
from tests.data.tokenized import SENTENCES, VIETNAMESE, call, make_tokenizer, pack, real_texts, write_lines
from tests.helpers.ranks import run_ranks


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two files of calls and texts, some broken, in many pieces of 2,000 bytes."""
    folder = tmp_path_factory.mktemp("source")
    calls = [call(f"Cuộc gọi số {i}: " + SENTENCES[i % 8], SENTENCES[(i + 1) % 8]) for i in range(80)]
    write_lines(folder / "a.jsonl", [*calls[:30], "{", *calls[30:], call("", "")])
    (folder / "b.txt").write_text("\n\n".join(f"Văn bản {i}. {SENTENCES[i % 8]}" for i in range(60)))
    return folder


OPTIONS: dict[str, Any] = {"piece_bytes": 2000, "val_fraction": 0.2}


@pytest.fixture(scope="module")
def undisturbed(source: Path, tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    pack(source, out, tokenizer, **OPTIONS)
    assert len(TokenSet(out / "train").meta.shards) > 5 and TokenSet(out / "val").num_documents > 5
    return out


def test_composed_and_decomposed_vietnamese_give_the_same_bytes(tokenizer: Path, tmp_path: Path) -> None:
    texts = real_texts()[:2000]
    for form in ("NFC", "NFD"):
        records: list[Any] = [{"text": unicodedata.normalize(form, text)} for text in texts]
        records += [json.loads(json.dumps(call(*(each["text"] for each in records[:6]))))]
        (tmp_path / form).mkdir()
        pack(write_lines(tmp_path / form / "a.jsonl", records), tmp_path / f"{form}_out", tokenizer)
    assert (tmp_path / "NFC" / "a.jsonl").read_bytes() != (tmp_path / "NFD" / "a.jsonl").read_bytes()
    one, other = (contents(tmp_path / f"{form}_out" / "train") for form in ("NFC", "NFD"))
    assert {k: v for k, v in one.items() if k != "meta.json"} == {
        k: v for k, v in other.items() if k != "meta.json"
    }
    tokens, decode = TokenSet(tmp_path / "NFD_out" / "train"), DocumentTokenizer(tokenizer).decode
    kept = [text for text in texts if text.strip()]
    assert [decode(tokens.tokens(i)) for i in range(len(kept))] == [f"{text}</s>" for text in kept]


def test_tokens_per_syllable_of_real_text(tokenizer: Path, tmp_path: Path) -> None:
    syllables = sum(len(text.split()) for text in real_texts())
    report = pack(VIETNAMESE, tmp_path / "out", tokenizer)
    assert report.tokens_per_syllable == pytest.approx(report.num_tokens["train"] / syllables)
    assert 1 < report.tokens_per_syllable < 5


@pytest.mark.parametrize("num_processes", [2, 3])
def test_any_number_of_processes_gives_the_same_bytes(
    source: Path, tokenizer: Path, undisturbed: Path, tmp_path: Path, num_processes: int
) -> None:
    pack(source, tmp_path / "out", tokenizer, num_processes=num_processes, **OPTIONS)
    assert contents(tmp_path / "out") == contents(undisturbed)


@pytest.mark.parametrize("victim", ["train-000004.mask", "000006.npz", "documents.npy", "report.json"])
def test_killed_at_any_place_it_goes_on_and_gives_the_same_bytes(
    source: Path,
    tokenizer: Path,
    undisturbed: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    victim: str,
) -> None:
    def dies(path: Path, content: bytes) -> None:
        if path.name == victim:
            path.with_name(f".{path.name}.{os.getpid()}").write_bytes(content[: len(content) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        write_atomically(path, content)

    write_atomically = token_shards.write_atomically
    with monkeypatch.context() as patch:
        for module in (token_shards, prepare_tokens):
            patch.setattr(module, "write_atomically", dies)
        child = multiprocessing.get_context("fork").Process(
            target=pack, args=(source, tmp_path / "out", tokenizer), kwargs=OPTIONS
        )
        child.start()
        child.join(60)
    assert child.exitcode == -signal.SIGKILL
    assert not (tmp_path / "out" / "train" / "meta.json").exists()
    report = pack(source, tmp_path / "out", tokenizer, **OPTIONS)
    assert report.pieces_found >= 4
    assert contents(tmp_path / "out") == contents(undisturbed)


def test_a_killed_process_is_an_error_that_says_how_to_go_on(
    source: Path, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare_tokens, "write_piece", _dies)
    with pytest.raises(DataError, match="was killed"):
        pack(source, tmp_path / "out", tokenizer, num_processes=2)


def _dies(job: PieceJob) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


def _pack_with_little_room(
    rank: int, world: int, source: Path, out: Path, tokenizer: Path, room_bytes: int
) -> str:
    resource.setrlimit(resource.RLIMIT_FSIZE, (room_bytes, room_bytes))
    with pytest.raises(DataError, match="cannot write") as error:
        pack(source, out, tokenizer, num_processes=1 + rank)
    return str(error.value)


def test_a_full_disk_is_a_data_error_and_the_rest_follows_when_there_is_room(
    tokenizer: Path, tmp_path: Path
) -> None:
    source = write_lines(tmp_path / "a.jsonl", [{"text": f"{i} " + " ".join(SENTENCES)} for i in range(300)])
    room_bytes = (tokenizer / "tokenizer.json").stat().st_size
    for room in (room_bytes // 2, room_bytes + 4096):
        for said in run_ranks(1, _pack_with_little_room, source, tmp_path / "out", tokenizer, room):
            assert "File too large" in said and "same command again" in said
    assert pack(source, tmp_path / "out", tokenizer).num_documents == {"train": 300}
    TokenSet(tmp_path / "out" / "train").verify()


def test_what_is_left_out_is_counted_and_listed_with_file_and_line(
    source: Path, tokenizer: Path, undisturbed: Path, tmp_path: Path
) -> None:
    report = pack(source, tmp_path / "out", tokenizer, **OPTIONS)
    assert (report.num_empty, report.num_malformed) == (1, 1)
    listed = (undisturbed / "left_out.txt").read_text().splitlines()
    assert [line.split("\t")[0] for line in listed] == ["a.jsonl:31", "a.jsonl:82"]
    assert listed[0].split("\t")[1].startswith("not JSON") and listed[1].endswith("\tempty")


def test_reasons_hold_none_of_the_words(tokenizer: Path, tmp_path: Path) -> None:
    secret = "0912345678"
    records = [f'{{"text": "{secret}', {"turns": [{"role": "agent", "content": {"a": secret}}]}]
    records += [call(f"<|im_end|>{secret}", "dạ"), {"turns": [{"role": "user", "content": secret}]}]
    write_lines(tmp_path / "a.jsonl", [*records, call("a", "b")])
    pack(tmp_path / "a.jsonl", tmp_path / "out", tokenizer)
    listed = (tmp_path / "out" / "left_out.txt").read_text()
    assert len(listed.splitlines()) == 4 and secret not in listed


def _documents(folder: Path) -> set[bytes]:
    tokens = TokenSet(folder)
    return {tokens.tokens(i).tobytes() for i in range(tokens.num_documents)}


def test_the_split_depends_on_words_and_seed_alone(
    source: Path, tokenizer: Path, undisturbed: Path, tmp_path: Path
) -> None:
    more = write_lines(tmp_path / "a.jsonl", [{"text": f"Thêm {i}"} for i in range(50)])
    more.write_text(more.read_text() + (source / "a.jsonl").read_text() * 2)
    pack(more, tmp_path / "out", tokenizer, val_fraction=0.2)
    train, val = (_documents(tmp_path / "out" / name) for name in ("train", "val"))
    assert not train & val
    assert _documents(undisturbed / "val") - val <= _texts_of(source, tokenizer)
    assert not _documents(undisturbed / "val") & train
    pack(source, tmp_path / "other", tokenizer, seed=1, **OPTIONS)
    assert _documents(tmp_path / "other" / "val") != _documents(undisturbed / "val")


def _texts_of(source: Path, tokenizer: Path) -> set[bytes]:
    """What b.txt becomes; the larger source of the test above does not have it."""
    opened = DocumentTokenizer(tokenizer)
    texts = (source / "b.txt").read_text().split("\n\n")
    return {opened.encode(text, "all").ids.tobytes() for text in texts}


def test_the_share_of_val_is_about_what_was_asked(tokenizer: Path, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "a.jsonl", [{"text": f"câu {i}"} for i in range(4000)])
    report = pack(source, tmp_path / "out", tokenizer, val_fraction=0.1)
    # Binomial: 400 ± 19; five deviations.
    assert 305 < report.num_documents["val"] < 495
    assert sum(report.num_documents.values()) == 4000


def test_learning_all_learns_every_token_but_the_first(source: Path, tokenizer: Path, tmp_path: Path) -> None:
    report = pack(source / "a.jsonl", tmp_path / "out", tokenizer, learn="all")
    assert report.num_learnt["train"] == report.num_tokens["train"] - report.num_documents["train"]


def test_other_options_another_tokenizer_or_another_source_are_refused(
    source: Path, tokenizer: Path, tmp_path: Path
) -> None:
    copy = write_lines(tmp_path / "a.jsonl", [{"text": "một"}])
    pack(copy, tmp_path / "out", tokenizer)
    for wrong in ({"learn": "all"}, {"tokenizer": make_tokenizer(tmp_path / "other", vocab_size=300)}):
        options = {"tokenizer": tokenizer, **wrong}
        with pytest.raises(ConfigError, match=next(iter(wrong))) as error:
            pack(copy, tmp_path / "out", **options)
        assert error.value.exit_code == 2
    write_lines(copy, [{"text": "hai"}])
    with pytest.raises(ConfigError, match="source_sha256"):
        pack(copy, tmp_path / "out", tokenizer)


def test_the_same_command_on_a_complete_folder_checks_it(
    source: Path, tokenizer: Path, tmp_path: Path
) -> None:
    first = pack(source, tmp_path / "out", tokenizer, **OPTIONS)
    before = contents(tmp_path / "out")
    again = pack(source, tmp_path / "out", tokenizer, **OPTIONS)
    assert contents(tmp_path / "out") == before
    assert again.num_tokens == first.num_tokens and again.pieces_found > 5
    path = next((tmp_path / "out" / "val").glob("*.tokens"))
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])
    with pytest.raises(DataError, match="is damaged"):
        pack(source, tmp_path / "out", tokenizer, **OPTIONS)


def test_a_source_without_one_document_is_an_error_that_names_the_first_reason(
    tokenizer: Path, tmp_path: Path
) -> None:
    source = write_lines(tmp_path / "a.jsonl", ["", {"turns": [{"role": "nv", "content": "a"}]}])
    with pytest.raises(DataError, match=r"a\.jsonl:2: turn 1 has role 'nv'"):
        pack(source, tmp_path / "out", tokenizer)


def test_wrong_options_and_places_are_refused(source: Path, tokenizer: Path, tmp_path: Path) -> None:
    wrong: tuple[dict[str, Any], ...] = ({"learn": "none"}, {"val_fraction": 1.0}, {"num_processes": 0})
    for options in wrong:
        with pytest.raises(ConfigError, match="out of range"):
            pack(source, tmp_path / "out", tokenizer, **options)
    with pytest.raises(ConfigError, match="lies within it"):
        pack(source, source / "out", tokenizer)
    (tmp_path / "thesis.md").write_text("")
    with pytest.raises(ConfigError, match="something else"):
        pack(source, tmp_path, tokenizer)


def test_the_command_says_what_it_packed(
    source: Path, tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(source), str(tmp_path / "out"), "--tokenizer", str(tokenizer), "--val-fraction", "0"]
    assert cli(["data", "tokens", *arguments]) == 0
    printed = capsys.readouterr().out
    assert "train: 140 documents" in printed and "left out: 1 empty, 1 malformed" in printed
    assert "tokens per syllable: " in printed and "val:" not in printed
    assert main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_documents"] == {"train": 140}
    assert cli(["data", "tokens", str(source), str(tmp_path / "no"), "--tokenizer", str(tmp_path)]) == 2
    assert "tokenizer.json" in capsys.readouterr().err


def test_a_piece_is_a_function_of_its_job(source: Path, tokenizer: Path, tmp_path: Path) -> None:
    from hpctrain.data.documents import cut_pieces

    piece = cut_pieces(source, ["a.jsonl"], 1 << 20)[0]
    for name in ("one", "other"):
        (tmp_path / name / ".parts").mkdir(parents=True)
        job = PieceJob(source, tmp_path / name, 0, piece, tokenizer, "agent", 0.5, 0)
        assert write_piece(job) == piece.size_bytes
    assert contents(tmp_path / "one") == contents(tmp_path / "other")
