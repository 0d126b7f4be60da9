"""What the tests of tokens share: real Vietnamese text, a small tokenizer, chat templates, packed splits."""

from __future__ import annotations

import functools
import json
import os
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from hpctrain.data.prepare_tokens import TokenReport, pack_tokens

VIETNAMESE = Path(__file__).parents[3] / "shared" / "data" / "vietnamese.jsonl"
SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "[INST]", "[/INST]")

# Written for these tests, in the manner of the families that models come in.
CHATML = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}"
    "{%- if message.role == 'assistant' %}{% generation %}"
    "{{ message.content + '<|im_end|>' }}{% endgeneration %}"
    "{%- else %}{{- message.content + '<|im_end|>' }}{%- endif %}{{- '\\n' }}{%- endfor %}"
)
INSTRUCT = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'user' %}{{ '[INST] ' + message.content + ' [/INST]' }}"
    "{% elif message.role == 'assistant' %}{% generation %}{{ ' ' + message.content + eos_token }}"
    "{% endgeneration %}{% else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}"
)


@functools.cache
def real_texts() -> tuple[str, ...]:
    """Paragraphs of real Vietnamese; skips where the data are absent."""
    if not VIETNAMESE.exists():
        reason = f"real Vietnamese text is not here ({VIETNAMESE})"
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)
    with open(VIETNAMESE, encoding="utf-8") as file:
        return tuple(unicodedata.normalize("NFC", json.loads(line)["text"]).strip() for line in file)


def make_tokenizer(
    folder: Path, template: str | None = CHATML, add_bos: bool = False, vocab_size: int = 800, **config: Any
) -> Path:
    """A byte-level BPE of a few Vietnamese sentences, as a Hugging Face folder."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        **config,
    }
    if template is not None:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


def write_lines(path: Path, records: list[Any]) -> Path:
    """A line of JSON per record."""
    lines = [each if isinstance(each, str) else json.dumps(each, ensure_ascii=False) for each in records]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def pack(source: Path, out: Path, tokenizer: Path, **options: Any) -> TokenReport:
    return pack_tokens(source, out, tokenizer=tokenizer, **{"show": False, "val_fraction": 0, **options})


def call(*words: str) -> dict[str, Any]:
    """A call in which the customer speaks first."""
    roles = ("customer", "agent")
    return {"turns": [{"role": roles[i % 2], "content": text} for i, text in enumerate(words)]}


SENTENCES = (
    "Xin chào, tôi muốn hỏi về lãi suất tiền gửi kỳ hạn sáu tháng.",
    "Dạ, lãi suất kỳ hạn sáu tháng là năm phần trăm một năm ạ.",
    "Thẻ của tôi bị khóa, nhờ em mở lại giúp.",
    "Dạ, em đã mở thẻ cho chị rồi ạ. Chị cần hỗ trợ gì thêm không ạ?",
    "Tôi chuyển khoản nhầm năm triệu đồng, phải làm sao?",
    "Dạ, anh vui lòng ra chi nhánh gần nhất, mang theo căn cước công dân ạ.",
    "Cảm ơn em nhiều nhé.",
    "Dạ không có gì ạ, chúc anh một ngày tốt lành!",
)
