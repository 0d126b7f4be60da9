"""What is read from a config.json, and what is refused, against transformers' own configs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from transformers import AutoConfig

from hpctrain.config.compose import register_schemas
from hpctrain.config.huggingface import check_agreement, make_config_json, parse_config, read_config
from hpctrain.config.load import conf_dir, to_config
from hpctrain.config.schema import DecoderConfig, DecoderFamily
from hpctrain.errors import ConfigError
from hpctrain.models.huggingface import make_shapes
from hpctrain.plan.decoder_legality import model_findings

LLAMA_3_1 = {  # as published with Llama 3.1 8B
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0.dev0",
    "use_cache": True,
    "vocab_size": 128256,
}
QWEN_2_5 = {  # as published with Qwen2.5 32B
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "initializer_range": 0.02,
    "intermediate_size": 27648,
    "max_position_embeddings": 131072,
    "max_window_layers": 64,
    "model_type": "qwen2",
    "num_attention_heads": 40,
    "num_hidden_layers": 64,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.1",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 152064,
}


@pytest.fixture
def preset() -> Iterator[Any]:
    register_schemas()

    def load(name: str) -> DecoderConfig:
        with initialize_config_dir(str(conf_dir()), version_base="1.3"):
            model = to_config(compose("config", [f"model={name}", "data.root=data"])).model
        assert isinstance(model, DecoderConfig)
        return model

    yield load
    GlobalHydra.instance().clear()


@pytest.mark.parametrize(
    ("name", "billions"),
    # as published; 32.76 for Qwen3 is "32.8B" there
    [("qwen2_5_32b", 32.76), ("qwen3_32b", 32.76), ("qwen2_5_7b", 7.62), ("llama3_8b", 8.03)],
)
def test_presets_have_the_published_number_of_parameters(preset: Any, name: str, billions: float) -> None:
    config = preset(name)
    assert not model_findings(config)
    num_parameters = 0
    for shape in make_shapes(config).values():
        size = 1
        for length in shape:
            size *= length
        num_parameters += size
    assert round(num_parameters / 1e9, 2) == billions


def test_presets_are_the_published_models(preset: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN_2_5))
    check_agreement(preset("qwen2_5_32b"), tmp_path)
    assert not model_findings(preset("decoder_tiny"))


def test_a_published_config_is_read_field_by_field() -> None:
    config = parse_config(LLAMA_3_1)
    assert config.rope_scaling == LLAMA_3_1["rope_scaling"]
    assert (config.family, config.head_dim, config.rms_norm_eps) == (DecoderFamily.llama, 128, 1e-5)
    assert (config.rope_theta, config.vocab_size, config.num_key_value_heads) == (5e5, 128256, 8)
    assert parse_config(QWEN_2_5).sliding_window is None  # the switch is off


@pytest.mark.parametrize("content", [LLAMA_3_1, QWEN_2_5])
def test_what_transformers_5_makes_of_it_is_read_the_same(content: dict[str, Any]) -> None:
    theirs = json.loads(AutoConfig.for_model(**content).to_json_string(use_diff=False))
    new = {key: theirs[key] for key in theirs if key in content or key in ("rope_parameters", "layer_types")}
    assert "rope_scaling" not in new and new["rope_parameters"]["rope_theta"] == content["rope_theta"]
    assert parse_config(new) == parse_config(content)


@pytest.mark.parametrize("content", [LLAMA_3_1, QWEN_2_5])
def test_what_is_written_is_what_was_read(content: dict[str, Any]) -> None:
    written = make_config_json(parse_config(content), "bfloat16")
    assert parse_config(written) == parse_config(content)
    ids = {"bos_token_id", "eos_token_id"}
    before, after = AutoConfig.for_model(**content).to_dict(), AutoConfig.for_model(**written).to_dict()
    # without an effect: the head's size written out, the window behind a switch that is off
    silent = {"head_dim", "sliding_window", "max_window_layers", "transformers_version", "attention_bias"}
    for key in before.keys() - ids - silent:
        assert after[key] == before[key], key


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "gemma2"}, r"gemma2 \(known: llama, mistral, qwen2, qwen3\)"),
        ({"hidden_act": "gelu"}, "hidden_act=gelu"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"attention_dropout": 0.1}, "attention_dropout=0.1"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"pretraining_tp": 2}, "pretraining_tp=2"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "SequenceClassification"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
        ({"sliding_window": 4096}, "sliding_window=4096 in llama"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0]}}, "longrope"),
        ({"rope_scaling": {"rope_type": "linear"}}, "linear needs factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2, "beta_fast": 3}}, "does not know beta_fast"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "each kind of layer"),
        ({"layer_types": ["sliding_attention"] * 32}, "layer_types"),
        ({"hidden_act": "gelu", "mlp_bias": True}, "hidden_act=gelu; mlp_bias=True"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_config(LLAMA_3_1 | change)


def test_what_is_missing_is_named() -> None:
    content = {
        key: value for key, value in QWEN_2_5.items() if key not in ("vocab_size", "num_key_value_heads")
    }
    with pytest.raises(ConfigError, match="num_key_value_heads is missing; vocab_size is missing"):
        parse_config(content)


@pytest.mark.parametrize("name", ["config.json", "other"])
def test_a_folder_without_a_readable_config_is_said(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("[]" if name == "config.json" else "{}")
    with pytest.raises(ConfigError, match="name a Hugging Face folder"):
        read_config(tmp_path)


@pytest.mark.parametrize("field", [each.name for each in fields(DecoderConfig)])
def test_every_field_that_changes_the_model_must_agree_with_the_folder(field: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN_2_5))
    ours = parse_config(QWEN_2_5)
    ours.pretrained = str(tmp_path)
    check_agreement(ours, tmp_path)
    value = getattr(ours, field)
    others: dict[str, Any] = {
        "family": DecoderFamily.qwen3,
        "head_dim": 64,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        "sliding_window": 64,
        "tie_word_embeddings": True,
    }
    # decoders of the family qwen2 have a bias anyway, and without a window it begins nowhere
    without_effect = {"attention_bias", "max_window_layers", "max_position_embeddings", "initializer_range"}
    ours_only = {"kind", "pretrained", "residual_dropout", "loss_chunk_tokens", "lora"}
    if field in ours_only:
        return
    other = replace(ours, **{field: others[field] if field in others else value * 2})
    if field in without_effect:
        check_agreement(other, tmp_path)
        return
    with pytest.raises(ConfigError, match=f"{field}="):
        check_agreement(other, tmp_path)


@pytest.mark.parametrize(
    ("scaling", "said"),
    [
        ({"rope_type": "longrope", "factor": 2.0}, "default, linear, dynamic, yarn, llama3"),
        ({"type": "linear"}, "linear needs factor"),
        ({"rope_type": "yarn", "factor": 2.0, "short_factor": 3}, "yarn does not know short_factor"),
    ],
)
def test_the_plan_refuses_scaling_that_is_not_computed(scaling: dict[str, Any], said: str) -> None:
    assert any(said in found for found in model_findings(DecoderConfig(rope_scaling=scaling)))


def test_a_preset_of_its_own_family_has_no_findings() -> None:
    assert not model_findings(parse_config(LLAMA_3_1)) and not model_findings(parse_config(QWEN_2_5))
