"""Tokens of documents, and which of them are learnt: a Hugging Face tokenizer folder, without transformers.

A call is rendered with the folder's chat template, as `apply_chat_template` does, and then tokenized as a
whole. To know whose words are where, the template is rendered once more with a mark in place of the words
of each turn.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import numpy.typing as npt
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from hpctrain.data.documents import AGENT, Document, LeftOutError, Turn
from hpctrain.errors import ConfigError

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
)
#: Of a tokenizer folder that has none: a line a turn, each ended by the end-of-sequence token.
DEFAULT_CHAT_TEMPLATE = (
    "{% for turn in messages %}{{ turn.role }}: {{ turn.content }}{{ eos_token }}\n{% endfor %}"
)

_MARK = re.compile("\ue000(\\d+)\ue001")  # private use characters: no text holds them
_GENERATION = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")
_MAX_REASON_CHARS = 100
_SAVE_AGAIN = "save it with transformers: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(NEW)"


@dataclass(frozen=True)
class Encoded:
    """The tokens of one document."""

    ids: npt.NDArray[np.int64]
    learnt: npt.NDArray[np.bool_]  #: whether the model shall learn to say this token
    num_syllables: int  #: of the document's words, as spaces divide them


class DocumentTokenizer:
    """A tokenizer folder, open for reading.

    Raises:
        ConfigError: the folder is no whole fast tokenizer, or its chat template is wrong.
    """

    def __init__(self, folder: Path) -> None:
        self._tokenizer = _load(folder)
        config = _read_json(folder / "tokenizer_config.json")
        self._special = {
            name: _content(value)
            for name, value in {**_read_json(folder / "special_tokens_map.json"), **config}.items()
            if name.endswith("_token") and isinstance(value, str | dict)
        }
        self._check_added(folder, config)
        self.eos_id = self._find_eos(folder)  #: of the token that ends a text
        self.unknown_id = self._id_of("unk_token")  #: of the token for what the vocabulary lacks, or None
        #: Ids are 0 … vocab_size-1.
        self.vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())
        added = self._tokenizer.get_added_tokens_decoder().values()
        names = sorted((each.content for each in added if each.special), key=len, reverse=True)
        self._special_token = re.compile("|".join(map(re.escape, names)) or r"(?!)")
        self._template = _compile(folder, config)

    def encode(self, document: Document, learn: str) -> Encoded:
        """Returns the tokens of a document.

        A text is encoded with what the tokenizer puts around texts, ends with the end-of-sequence token
        and is learnt whole. A call is what the chat template makes of it.

        Args:
            learn: "agent": of calls, the agent's words and what ends its turns. "all": everything.

        Raises:
            LeftOutError: the document cannot be rendered, or holds nothing to learn.
        """
        if isinstance(document, str):
            ids = np.array(self._tokenizer.encode(document).ids, dtype=np.int64)
            if not len(ids):
                raise LeftOutError("the tokenizer finds no token in it")
            if ids[-1] != self.eos_id:
                ids = np.append(ids, self.eos_id)
            return Encoded(ids, np.ones(len(ids), dtype=bool), len(document.split()))
        text, spans = self.render(document, learn)
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        starts, stops = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2).T
        learnt = np.zeros(len(starts), dtype=bool)
        for start, stop in spans:
            learnt |= (stops > start) & (starts < stop)
        syllables = sum(len(turn.text.split()) for turn in document)
        return Encoded(np.array(encoding.ids, dtype=np.int64), learnt, syllables)

    def encode_prompt(self, turns: list[Turn]) -> tuple[npt.NDArray[np.int64], int]:
        """Returns the tokens after which the agent answers, as it has learnt to, and the one that ends it.

        Raises:
            LeftOutError: see `encode`.
        """
        text, spans = self.render([*turns, Turn(AGENT, "…")], "agent")
        start, stop = spans[-1]
        before, answer = (
            self._tokenizer.encode(part, add_special_tokens=False).ids
            for part in (text[:start], text[start:stop])
        )
        return np.array(before, dtype=np.int64), answer[-1]

    def decode(self, ids: npt.ArrayLike, keep_special: bool = True) -> str:
        """Returns the text of tokens, with or without special ones."""
        return str(self._tokenizer.decode(np.asarray(ids).tolist(), skip_special_tokens=not keep_special))

    def render(self, turns: list[Turn], learn: str) -> tuple[str, list[tuple[int, int]]]:
        """Returns what the chat template makes of a call, and the stretches (characters) to be learnt.

        Raises:
            LeftOutError: see `encode`.
        """
        for number, turn in enumerate(turns, start=1):
            if found := self._special_token.search(turn.text):
                raise LeftOutError(f"turn {number} holds the special token {found.group()}")
        if learn == "agent" and not any(turn.role == AGENT for turn in turns):
            raise LeftOutError("no turn of the agent")
        marked = [Turn(turn.role, f"\ue000{i}\ue001") for i, turn in enumerate(turns)]
        pieces = _MARK.split(self._render(marked))  # text, number, text, number, …, text
        numbers = [int(number) for number in pieces[1::2]]
        if sorted(numbers) != list(range(len(turns))):
            raise LeftOutError("the chat template leaves out or repeats a turn")
        text, spans = pieces[0], []
        for number, after in zip(numbers, pieces[2::2], strict=True):
            # The model is asked after a header without the space before the words: it has to say that too.
            start = len(text.rstrip(" "))
            text += turns[number].text
            if learn == "agent" and turns[number].role == AGENT:
                spans.append((start, len(text) + self._end_of_turn(after)))
            text += after
        if text != self._render(turns):
            raise LeftOutError("the chat template changes the words of a turn")
        return text, [(0, len(text))] if learn == "all" else spans

    def _end_of_turn(self, after: str) -> int:
        """Returns how much of what follows an agent's words ends its turn."""
        found = self._special_token.search(after)
        if found is None or after[: found.start()].strip():
            raise LeftOutError("the chat template ends the agent's turn with no special token")
        return found.end()

    def _render(self, turns: list[Turn]) -> str:
        messages = [{"role": turn.role, "content": turn.text} for turn in turns]
        try:
            return self._template.render(messages=messages, add_generation_prompt=False, **self._special)
        except (jinja2.TemplateError, TypeError, ValueError, LookupError) as error:
            reason = " ".join(str(error).split())
            raise LeftOutError(f"the chat template refuses it: {reason:.{_MAX_REASON_CHARS}}") from None

    def _id_of(self, name: str) -> int | None:
        token = self._special.get(name)
        return None if token is None else self._tokenizer.token_to_id(token)

    def _find_eos(self, folder: Path) -> int:
        eos_id = self._id_of("eos_token")
        if eos_id is None:
            raise ConfigError(
                f"tokenizer {folder} needs an end-of-sequence token, which ends texts",
                f"eos_token in tokenizer_config.json: {self._special.get('eos_token')}",
                "set eos_token to a token of the vocabulary",
            )
        return eos_id

    def _check_added(self, folder: Path, config: dict[str, Any]) -> None:
        """Refuses tokens that only tokenizer_config.json knows: they would be cut into pieces silently."""
        for number, token in config.get("added_tokens_decoder", {}).items():
            if self._tokenizer.token_to_id(_content(token)) != int(number):
                raise ConfigError(
                    f"tokenizer {folder}: tokenizer_config.json adds {_content(token)!r} as token {number}",
                    "tokenizer.json does not know it",
                    _SAVE_AGAIN,
                )


def tokenizer_digest(folder: Path) -> str:
    """Returns a hash of the files of a tokenizer folder."""
    digest = hashlib.sha256()
    for name in TOKENIZER_FILES:
        if (folder / name).is_file():
            digest.update(f"{name}\0".encode() + hashlib.sha256((folder / name).read_bytes()).digest())
    return digest.hexdigest()


def _load(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(
            f"{folder} is no folder of a fast tokenizer",
            "it has no tokenizer.json",
            _SAVE_AGAIN,
        )
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises nothing more special
        raise ConfigError(f"{path} cannot be read", str(error), "copy it again") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{path} cannot be read", str(error), "copy it again") from error


def _content(token: Any) -> str:
    return str(token["content"]) if isinstance(token, dict) else str(token)


def _compile(folder: Path, config: dict[str, Any]) -> jinja2.Template:
    """Returns the chat template, in the environment that Hugging Face documents for them."""
    source = config.get("chat_template") or DEFAULT_CHAT_TEMPLATE
    if isinstance(source, list):  # several, with names
        source = next(
            (each["template"] for each in source if each["name"] == "default"), DEFAULT_CHAT_TEMPLATE
        )
    if (folder / "chat_template.jinja").is_file():
        source = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    # A tag of transformers' own; as a block that is always taken it changes nothing else.
    source = _GENERATION.sub(
        lambda tag: f"{{%{tag[1]} {'endif' if tag[2] else 'if true'} {tag[3]}%}}", source
    )
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    # No strftime_now: what is packed would depend on the day. Templates have a fixed date for that case.
    environment.globals["raise_exception"] = _raise
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise ConfigError(f"the chat template of {folder} is wrong", str(error), "correct it") from error


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
