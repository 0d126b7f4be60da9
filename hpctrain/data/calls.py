"""Made-up calls to a bank, for machines without data: Vietnamese, an agent and a customer, and a tokenizer.

Names, numbers, wishes and wording vary; what the agent answers follows from what the customer said, so a
small decoder has something to learn. Nobody in them exists.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from hpctrain.data.prepare_tokens import pack_tokens
from hpctrain.data.restartable import make_once
from hpctrain.errors import ConfigError

CALLS_VERSION = 1  #: another one where the calls or the tokenizer change
VOCAB_SIZE = 512

_VERSION_NAME = "calls.json"
_VAL_FRACTION = 0.1
_END, _BEGIN_TURN, _END_TURN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_FAMILY = ("Nguyễn", "Trần", "Lê", "Phạm", "Hoàng", "Vũ", "Đặng", "Bùi")
_GIVEN = ("An", "Bình", "Chi", "Dũng", "Giang", "Hà", "Hương", "Khánh", "Linh", "Minh", "Nga", "Phúc", "Thảo")
_ADDRESS = ("anh", "chị")
_AMOUNTS = ("năm trăm nghìn", "hai triệu", "ba triệu", "mười triệu", "năm mươi triệu", "một trăm triệu")
_MONTHS = ("ba", "sáu", "chín", "mười hai", "hai mươi bốn")
_CITIES = ("Hà Nội", "Đà Nẵng", "Huế", "Cần Thơ", "Hải Phòng", "Nha Trang")
_HELLO = ("Ngân hàng xin nghe, em là {agent}.", "Dạ em {agent} xin nghe ạ.", "Xin chào, em là {agent}.")
_THANKS = ("Cảm ơn em.", "Được rồi, cảm ơn em nhé.", "Tốt quá, cảm ơn em.")
_GOODBYE = (
    "Dạ, em cảm ơn {you} {name} đã gọi.",
    "Dạ không có gì ạ, chúc {you} {name} một ngày tốt lành.",
    "Dạ, {you} {name} cần gì cứ gọi lại cho em ạ.",
)
#: What the customer wants, what the agent answers.
_WISHES = (
    (
        "Thẻ của {me} bị khóa ở {city}.",
        "Dạ, em mở lại thẻ có số cuối {digits} cho {you} {name} ngay ạ.",
    ),
    (
        "{me} muốn vay {amount} trong {months} tháng.",
        "Dạ, vay {amount} trong {months} tháng thì lãi suất là {rate} phần trăm một năm ạ.",
    ),
    (
        "{me} gửi tiết kiệm {amount}, kỳ hạn {months} tháng, lãi bao nhiêu?",
        "Dạ, kỳ hạn {months} tháng thì lãi suất tiền gửi là {rate} phần trăm một năm ạ.",
    ),
    (
        "{me} chuyển {amount} mà người nhận ở {city} chưa có tiền.",
        "Dạ, giao dịch {amount} đang được xử lý, hôm nay tiền sẽ đến {city} ạ.",
    ),
    (
        "{me} mất thẻ rồi, khóa giúp {me}.",
        "Dạ, em đã khóa thẻ có số cuối {digits} của {you} {name} ạ.",
    ),
    (
        "Chi nhánh ở {city} mấy giờ mở cửa?",
        "Dạ, chi nhánh ở {city} mở cửa từ tám giờ sáng ạ.",
    ),
)
#: Months of a term decide the rate, so there is something to find out.
_RATES = {"ba": "bốn", "sáu": "năm", "chín": "năm rưỡi", "mười hai": "sáu", "hai mươi bốn": "bảy"}


def make_calls(out: Path, *, num_documents: int = 4000, seed: int = 0) -> None:
    """Writes calls and packs them into `out/train` and `out/val`, learnt on the agent's turns.

    Does nothing where `out` already holds calls of this version. `out` appears whole or not at all, also
    when several processes try at once.

    Raises:
        ConfigError: `out` holds something else, or calls of another version, or there are too few.
    """

    def make(work: Path) -> None:
        if num_documents < 100:
            raise ConfigError(
                f"cannot divide {num_documents} calls into train and val",
                "",
                "set data.synthetic_documents to 100 or more",
            )
        calls = [make_call(seed, number) for number in range(num_documents)]
        lines = (json.dumps({"turns": turns}, ensure_ascii=False) + "\n" for turns in calls)
        (work / "calls.jsonl").write_text("".join(lines), encoding="utf-8")
        _make_tokenizer(work / "tokenizer", (turn["content"] for turns in calls for turn in turns))
        pack_tokens(
            work / "calls.jsonl",
            work / "packed",
            tokenizer=work / "tokenizer",
            val_fraction=_VAL_FRACTION,
            show=False,
        )

    make_once(out, _VERSION_NAME, CALLS_VERSION, "data.synthetic_documents", make)


def make_call(seed: int, number: int) -> list[dict[str, str]]:
    """Returns the turns of a call, a pure function of the arguments."""
    rng = random.Random(f"{seed} {number}")
    me = rng.choice(_ADDRESS)
    months = rng.choice(_MONTHS)
    words = {
        "agent": rng.choice(_GIVEN),
        "name": rng.choice(_GIVEN),
        "family": rng.choice(_FAMILY),
        "you": me,
        "city": rng.choice(_CITIES),
        "amount": rng.choice(_AMOUNTS),
        "months": months,
        "rate": _RATES[months],
        "digits": " ".join(rng.choice("0123456789") for _ in range(4)),
    }
    turns, introduction = [("agent", rng.choice(_HELLO))], "{me} là {family} {name}. "
    for wish, answer in rng.sample(_WISHES, rng.choice((1, 1, 1, 2))):
        if "{digits}" in answer:
            wish += " Số cuối là {digits}."
        turns += [("customer", introduction + wish), ("agent", answer)]
        introduction = ""
    turns += [("customer", rng.choice(_THANKS)), ("agent", rng.choice(_GOODBYE))]
    return [{"role": role, "content": _sentence(text, me, words)} for role, text in turns]


def _sentence(text: str, me: str, words: dict[str, str]) -> str:
    spoken = text.format(me=me, **words).split(". ")
    return ". ".join(part[0].upper() + part[1:] for part in spoken)


def _make_tokenizer(folder: Path, texts: Iterator[str]) -> None:
    """Trains a byte-level BPE and writes it as a Hugging Face folder."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[_END, _BEGIN_TURN, _END_TURN],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": _END_TURN,
        "pad_token": _END,
        "chat_template": _CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
