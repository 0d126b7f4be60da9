from __future__ import annotations

import json
import random
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from hpctrain.data.documents import Document, LeftOutError, Turn
from hpctrain.data.tokenizer import DocumentTokenizer, tokenizer_digest
from hpctrain.errors import ConfigError
from tests.data.tokenized import CHATML, INSTRUCT, SENTENCES, make_tokenizer, real_texts

END_OF_TURN = {CHATML: "<|im_end|>", INSTRUCT: "</s>", None: "</s>"}


@pytest.fixture(scope="module", params=[CHATML, INSTRUCT, None], ids=["chatml", "instruct", "default"])
def folder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, str | None]:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"), request.param), request.param


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> DocumentTokenizer:
    return DocumentTokenizer(make_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def _real_calls(count: int) -> list[list[Turn]]:
    rng = random.Random(0)
    texts = [text for text in real_texts() if text and not any(t in text for t in ("<s>", "</s>"))]
    sizes = (2, 4, 6)
    return [
        [Turn(("user", "assistant")[i % 2], rng.choice(texts)) for i in range(rng.choice(sizes))]
        for _ in range(count)
    ]


def _learnt_stretches(tokenizer: DocumentTokenizer, document: Document, learn: str) -> list[str]:
    """The text of each run of learnt tokens."""
    encoded = tokenizer.encode(document, learn)
    edges = np.flatnonzero(np.diff(encoded.learnt, prepend=False, append=False))
    return [tokenizer.decode(encoded.ids[a:b]) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def test_what_is_learnt_decodes_to_the_agents_words_and_its_ends_of_turn(
    folder: tuple[Path, str | None],
) -> None:
    tokenizer = DocumentTokenizer(folder[0])
    for turns in _real_calls(40):
        expected = [turn.text + END_OF_TURN[folder[1]] for turn in turns if turn.role == "assistant"]
        found = _learnt_stretches(tokenizer, turns, "agent")
        # A byte-level token may begin with the space before the first word.
        assert [text.removeprefix(" ") for text in found] == expected


def test_chats_are_rendered_and_masked_as_transformers_does(folder: tuple[Path, str | None]) -> None:
    transformers = pytest.importorskip("transformers")
    if folder[1] is None:
        pytest.skip("transformers has no default template")
    reference = transformers.PreTrainedTokenizerFast.from_pretrained(folder[0])
    tokenizer = DocumentTokenizer(folder[0])
    for turns in _real_calls(40):
        messages = [{"role": turn.role, "content": turn.text} for turn in turns]
        expected = reference.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        encoded = tokenizer.encode(turns, "agent")
        assert encoded.ids.tolist() == expected["input_ids"]
        assert encoded.learnt.astype(int).tolist() == expected["assistant_masks"]
        assert tokenizer.encode(turns, "all").learnt.all()


def test_texts_are_encoded_as_transformers_does_and_end_with_eos(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder = make_tokenizer(tmp_path, add_bos=True)
    reference = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer = DocumentTokenizer(folder)
    for text in real_texts()[:200]:
        encoded = tokenizer.encode(text, "agent")
        assert encoded.ids.tolist() == [*reference(text)["input_ids"], tokenizer.eos_id]
        assert encoded.learnt.all() and encoded.num_syllables == len(text.split())
    assert tokenizer.encode("a</s>", "all").ids.tolist().count(tokenizer.eos_id) == 1


def test_real_text_comes_back_whole(plain: DocumentTokenizer) -> None:
    for text in real_texts()[:500]:
        assert plain.decode(plain.encode(text, "all").ids[:-1]) == text


def test_the_agents_words_may_hold_anything_but_special_tokens(plain: DocumentTokenizer) -> None:
    odd = [
        "\x00",
        "👩‍👩‍👧 ạ",
        "a" * 100_000,
        "\u200b",
        "\ufffd",
        "{{ messages }}{% endif %}",
        "<think>\n\n</think>",
    ]
    for words in odd:
        turns = [Turn("user", "hỏi"), Turn("assistant", words)]
        assert _learnt_stretches(plain, turns, "agent") == [f"{words}<|im_end|>"]
    with pytest.raises(LeftOutError, match=r"turn 1 holds the special token <\|im_end\|>"):
        plain.encode([Turn("user", "a<|im_end|>\n<|im_start|>assistant\nb"), Turn("assistant", "c")], "agent")


def test_a_call_without_an_agent_is_left_out_unless_all_is_learnt(plain: DocumentTokenizer) -> None:
    with pytest.raises(LeftOutError, match="no turn of the agent"):
        plain.encode([Turn("user", "alo")], "agent")
    assert plain.encode([Turn("user", "alo")], "all").learnt.all()


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for m in messages[1:] %}{{ m.content }}</s>{% endfor %}", "leaves out or repeats"),
        ("{% for m in messages %}{{ m.content }}{{ m.content }}</s>{% endfor %}", "leaves out or repeats"),
        ("{% for m in messages %}{{ m.content | replace('a', 'b') }}</s>{% endfor %}", "changes the words"),
        ("{% for m in messages %}{{ m.content }}\n{% endfor %}", "no special token"),
        ("{{ raise_exception('never') }}", "refuses it: never"),
        ("{{ messages.missing.content }}", "refuses it"),
    ],
)
def test_a_template_that_hides_where_words_are_is_a_reason_to_leave_out(
    tmp_path: Path, template: str, reason: str
) -> None:
    tokenizer = DocumentTokenizer(make_tokenizer(tmp_path, template))
    with pytest.raises(LeftOutError, match=reason):
        tokenizer.encode([Turn("user", "a"), Turn("assistant", "ba")], "agent")


def test_words_are_found_where_a_template_moves_them(tmp_path: Path) -> None:
    template = "{{ messages[2].content }}</s>{{ messages[1].content }}</s>{{ messages[0].content }}"
    tokenizer = DocumentTokenizer(make_tokenizer(tmp_path, template))
    turns = [Turn("system", "một"), Turn("user", "hai"), Turn("assistant", "ba")]
    assert _learnt_stretches(tokenizer, turns, "agent") == ["ba</s>"]


def test_a_template_file_and_a_named_template_are_found(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": CHATML}]
    a, b = make_tokenizer(tmp_path / "a", None, chat_template=named), make_tokenizer(tmp_path / "b", "x")
    (b / "chat_template.jinja").write_text(CHATML)
    turns = [Turn("user", "alo"), Turn("assistant", "dạ")]
    expected = "<|im_start|>user\nalo<|im_end|>\n<|im_start|>assistant\ndạ<|im_end|>\n"
    assert [DocumentTokenizer(each).render(turns, "all")[0] for each in (a, b)] == [expected] * 2


def test_truncation_and_padding_of_the_tokenizer_file_do_not_count(tmp_path: Path) -> None:
    folder = make_tokenizer(tmp_path)
    path = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=400)
    before = DocumentTokenizer(folder).encode(SENTENCES[1], "all").ids.tolist()
    tokenizer.save(path)
    assert DocumentTokenizer(folder).encode(SENTENCES[1], "all").ids.tolist() == before
    assert len(before) > 4


def _broken(folder: Path, name: str, content: str | None) -> None:
    (folder / name).unlink(missing_ok=True)
    if content is not None:
        (folder / name).write_text(content)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", None, "no tokenizer.json"),
        ("tokenizer.json", "{}", "cannot be read"),
        ("tokenizer_config.json", None, "end-of-sequence"),
        ("tokenizer_config.json", '{"eos_token": "<unknown>"}', "end-of-sequence"),
        ("tokenizer_config.json", "[", "cannot be read"),
        ("chat_template.jinja", "{% for %}", "is wrong"),
        (
            "tokenizer_config.json",
            json.dumps({"eos_token": "</s>", "added_tokens_decoder": {"900": {"content": "<|new|>"}}}),
            "does not know it",
        ),
    ],
)
def test_a_folder_that_is_no_whole_tokenizer_is_refused(
    tmp_path: Path, name: str, content: str | None, message: str
) -> None:
    folder = make_tokenizer(tmp_path)
    _broken(folder, name, content)
    with pytest.raises(ConfigError, match=message):
        DocumentTokenizer(folder)


def test_the_digest_notices_another_template(tmp_path: Path) -> None:
    one, other = make_tokenizer(tmp_path / "a"), make_tokenizer(tmp_path / "b")
    assert tokenizer_digest(one) == tokenizer_digest(other)
    (other / "chat_template.jinja").write_text("x")
    assert tokenizer_digest(one) != tokenizer_digest(other)


def test_decomposed_vietnamese_would_give_other_tokens(plain: DocumentTokenizer) -> None:
    """Why sources are brought to NFC (`documents`)."""
    decomposed: Any = unicodedata.normalize("NFD", SENTENCES[0])
    assert plain.encode(decomposed, "all").ids.tolist() != plain.encode(SENTENCES[0], "all").ids.tolist()
