from __future__ import annotations

import json
import multiprocessing
import re
from pathlib import Path

import numpy as np
import pytest

from hpctrain.config.schema import TokenDataConfig
from hpctrain.data.calls import VOCAB_SIZE, make_call, make_calls
from hpctrain.data.sequences import PackedSequences
from hpctrain.data.tokenizer import DocumentTokenizer
from hpctrain.data.tokens import TokenSet
from hpctrain.errors import ConfigError
from hpctrain.launch.inputs import draw_data
from tests.data.packed import contents


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("calls") / "out"
    make_calls(out, num_documents=600)
    return out


def test_calls_are_packed_with_their_tokenizer(calls: Path) -> None:
    train, val = TokenSet(calls / "train"), TokenSet(calls / "val")
    assert train.num_documents + val.num_documents == 600 and val.num_documents > 30
    assert train.vocab_size == VOCAB_SIZE
    assert (calls / "left_out.txt").read_text() == ""
    text = DocumentTokenizer(train.tokenizer_folder).decode(train.tokens(0))
    assert text.startswith("<|im_start|>assistant\n") and text.endswith("<|im_end|>\n")
    assert 0.3 < train.meta.num_learnt / train.num_tokens < 0.8


def test_a_sequence_of_256_holds_every_call_whole(calls: Path) -> None:
    train = TokenSet(calls / "train")
    assert train.documents["length"].max() <= 256
    packed = PackedSequences(train, 256)
    assert packed.waste < 0.25 and packed.num_samples < train.num_documents


def test_calls_differ_and_answers_follow_from_what_was_said() -> None:
    made = [make_call(0, i) for i in range(2000)]
    assert len({json.dumps(turns) for turns in made}) > 1900
    for turns in made:
        assert [turn["role"] for turn in turns] == ["agent", "customer"] * (len(turns) // 2) + ["agent"]
        asked = re.findall(r"Số cuối là ([\d ]+)\.", " ".join(turn["content"] for turn in turns[1::2]))
        answered = " ".join(turn["content"] for turn in turns[::2])
        assert all(digits in answered for digits in asked)
        assert "{" not in answered


def test_the_seed_decides_the_calls(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        make_calls(tmp_path / name, num_documents=100, seed=seed)
    a, b, c = (contents(tmp_path / name) for name in "abc")
    assert a == b != c


def test_what_is_there_is_left_alone_and_another_version_refused(tmp_path: Path) -> None:
    out = tmp_path / "calls"
    make_calls(out, num_documents=100)
    before = contents(out)
    make_calls(out, num_documents=200)
    assert contents(out) == before
    (out / "calls.json").write_text('{"version": 0}')
    with pytest.raises(ConfigError, match="folder removed"):
        make_calls(out)


def test_two_processes_at_once_leave_one_whole_folder_and_nothing_else(tmp_path: Path) -> None:
    out, context = tmp_path / "calls", multiprocessing.get_context("fork")
    makers = [context.Process(target=make_calls, args=(out,), kwargs={"num_documents": 100}) for _ in "ab"]
    for maker in makers:
        maker.start()
    for maker in makers:
        maker.join(60)
        assert maker.exitcode == 0
    assert [path.name for path in tmp_path.iterdir()] == ["calls"]
    TokenSet(out / "train").verify()


def test_too_few_calls_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="synthetic_documents"):
        make_calls(tmp_path / "calls", num_documents=99)
    assert list(tmp_path.iterdir()) == []


def test_a_run_makes_its_calls_on_first_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = TokenDataConfig(root=str(tmp_path / "calls"), synthetic_documents=100)
    for _ in range(2):
        draw_data(data)
    assert capsys.readouterr().err.count("making synthetic data") == 1
    assert TokenSet(tmp_path / "calls" / "train").num_documents > 80


def test_what_an_answer_depends_on_can_be_learnt() -> None:
    """The rate follows from the term alone: a model that reads the call can know it."""
    rates: dict[str, set[str]] = {}
    for i in range(2000):
        for turn in make_call(0, i):
            found = re.search(r"(\S+(?: \S+)*?) tháng thì lãi suất\D* là (.+) phần trăm", turn["content"])
            if found:
                term = found[1].replace("Dạ, kỳ hạn ", "").split(" trong ")[-1]
                rates.setdefault(term, set()).add(found[2])
    assert len(rates) == 5 and all(len(each) == 1 for each in rates.values())
    assert np.unique([min(each) for each in rates.values()]).size == 5
