"""What `hpctrain export sample` says: the words that transformers generates from the exported folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from hpctrain.config.load import save_config
from hpctrain.config.schema import (
    Config,
    DecoderConfig,
    DecoderFamily,
    LoraConfig,
    TokenDataConfig,
    VisionConfig,
)
from hpctrain.data.calls import make_call, make_calls
from hpctrain.errors import ConfigError
from hpctrain.export import main, sample
from hpctrain.export.huggingface import export_huggingface
from hpctrain.export.sample import make_sample
from hpctrain.models.decoder import Decoder
from hpctrain.models.lora import apply_lora
from tests.export.test_huggingface import save_run
from tests.helpers.runs import ROOT

MODEL = DecoderConfig(
    family=DecoderFamily.qwen3,
    vocab_size=512,
    hidden_size=32,
    intermediate_size=44,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=256,
    initializer_range=0.3,
    tie_word_embeddings=True,
)
NUM_CALLS = 100


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with made-up calls in `data`, and beside them two runs on them: whole, and with adapters."""
    folder = tmp_path_factory.mktemp("sampled")
    make_calls(folder / "data", num_documents=NUM_CALLS)
    for name, model in (("run", MODEL), ("adapted", replace(MODEL, lora=LoraConfig(rank=3)))):
        torch.manual_seed(0)
        decoder = Decoder(model)
        apply_lora(decoder, model.lora)
        trained = {name: p for name, p in decoder.named_parameters() if p.requires_grad}
        for parameter in trained.values():
            torch.nn.init.normal_(parameter, std=0.3)
        save_run(folder / name, model, {name: p.detach() for name, p in trained.items()})
    return folder


@pytest.mark.parametrize("run", ["run", "adapted"])
def test_transformers_generates_the_same_words_from_the_same_prompt(
    run: str, folder: Path, tmp_path: Path
) -> None:
    export_huggingface(folder / run, tmp_path / "out", "fp32")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path / "out")
    asked = [{"role": "user", "content": "Thẻ của tôi bị khóa ở Huế."}]
    prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    expected = model.generate(**prompt, max_new_tokens=24, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    made = make_sample(folder / run, asked[0]["content"], num_tokens=24)
    assert made.answer == tokenizer.decode(expected, skip_special_tokens=True).strip()
    assert made.prompt == "user\nThẻ của tôi bị khóa ở Huế.\nassistant"
    assert (made.step, made.recorded) == (4, None)


def test_without_a_prompt_the_agent_answers_the_first_question_of_a_call(folder: Path) -> None:
    calls = [make_call(0, number) for number in range(NUM_CALLS)]  # agent, customer, agent, …
    by_answer = {call[2]["content"]: call for call in calls}
    prompts = set()
    for seed in range(3):
        made = make_sample(folder / "run", num_tokens=1, seed=seed)
        call = by_answer[str(made.recorded)]
        asked = [f"assistant\n{call[0]['content']}", f"user\n{call[1]['content']}", "assistant"]
        assert made.prompt == "\n".join(asked)
        prompts.add(made.prompt)
    assert len(prompts) == 3


def test_it_ends_where_the_agent_would(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    end_of_turn = 2  # of the made-up tokenizer
    logits = torch.zeros(1, 1, 512)
    logits[..., end_of_turn] = 1
    monkeypatch.setattr(Decoder, "logits", lambda self, *inputs: logits)
    assert make_sample(folder / "run").answer == make_sample(folder / "run", "Chào em.").answer == ""


def test_a_temperature_draws_and_a_seed_repeats(folder: Path) -> None:
    words = [make_sample(folder / "run", "Chào em.", 16, 1.5, seed).answer for seed in (0, 0, 1)]
    assert words[0] == words[1] != words[2]


def test_what_cannot_be_sampled_is_said(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = TokenDataConfig(root=str(tmp_path))
    save_config(Config(model=VisionConfig(), data=data), tmp_path / "config.yaml")
    with pytest.raises(ConfigError, match="decoder run"):
        make_sample(tmp_path)
    save_config(Config(model=MODEL, data=data), tmp_path / "config.yaml")
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        make_sample(tmp_path)
    (tmp_path / "tokenizer").symlink_to(folder / "data" / "tokenizer")
    with pytest.raises(ConfigError, match="--prompt"):
        make_sample(tmp_path)
    with pytest.raises(ConfigError, match="special token"):
        make_sample(tmp_path, "<|im_end|>")
    monkeypatch.setattr(sample, "MAX_BYTES", 1000)
    with pytest.raises(ConfigError, match="export hf"):
        make_sample(tmp_path)


def test_the_verb_answers(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sample", str(folder / "run"), "--prompt", "Chào em.", "--tokens", "3", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["prompt"] == "user\nChào em.\nassistant"
    assert main(["sample", str(folder / "run"), "--tokens", "3"]) == 0
    shown = capsys.readouterr().out
    assert "step 4" in shown and "model:" in shown and "recorded: Dạ" in shown


def test_a_run_on_this_machine_ends_with_a_sample(folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hpctrain", "+exp=finance_callbot_laptop"]
    command += [f"data.root={folder / 'data'}", "data.synthetic_documents=0", "data.num_workers=0"]
    command += ["model.num_hidden_layers=2", "cluster.ranks_per_node=1", "parallelism.pp=1"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    said = done.stdout.partition("run finance_callbot_laptop is done")[2]
    assert "sample of" in said and "recorded: Dạ" in said
