"""What the config.json of a Hugging Face folder means here, and the other way round.

Every field of a config.json is used, known to change nothing in training, or refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from hpctrain.config.rope import ROPE_KEYS, get_rope_type, rope_findings
from hpctrain.config.schema import DecoderConfig, DecoderFamily
from hpctrain.errors import ConfigError

ARCHITECTURES = {
    DecoderFamily.llama: "LlamaForCausalLM",
    DecoderFamily.mistral: "MistralForCausalLM",
    DecoderFamily.qwen2: "Qwen2ForCausalLM",
    DecoderFamily.qwen3: "Qwen3ForCausalLM",
}

# What config.json and DecoderConfig call alike, and what it is where config.json leaves it out.
_SAME: dict[str, Any] = {
    "vocab_size": None,
    "hidden_size": None,
    "intermediate_size": None,
    "num_hidden_layers": None,
    "num_attention_heads": None,
    "max_position_embeddings": None,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
}
_READ = {
    "model_type",
    "architectures",
    "num_key_value_heads",
    "head_dim",
    "attention_bias",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "original_max_position_embeddings",
    "sliding_window",
    "use_sliding_window",
    "max_window_layers",
    "layer_types",
}
_HARMLESS = {
    "_name_or_path",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "torch_dtype",
    "dtype",
    "transformers_version",
    "use_cache",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "return_dict_in_generate",
    "unsloth_version",
    "unsloth_fixed",
}
# Fields that are fine as long as they say this.
_ONLY: dict[str, Any] = {
    "hidden_act": "silu",
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "pretraining_tp": 1,
    "use_mrope": False,
    "partial_rotary_factor": 1.0,
    "rope_interleaved": False,
    "is_encoder_decoder": False,
    "chunk_size_feed_forward": 0,
    "quantization_config": None,
    "auto_map": None,
}
# What a config may set otherwise than the folder says, without computing anything else.
_FREE = {
    "kind",
    "pretrained",
    "max_position_embeddings",
    "initializer_range",
    "residual_dropout",
    "loss_chunk_tokens",
    "lora",
}


def read_config(folder: Path) -> dict[str, Any]:
    """Return a folder's config.json.

    Raises:
        ConfigError: there is none, or it is no JSON object.
    """
    path = folder / "config.json"
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"read {path}", str(error), "name a Hugging Face folder") from error
    if not isinstance(content, dict):
        raise ConfigError(f"read {path}", "it holds no JSON object", "name a Hugging Face folder")
    return content


def parse_config(content: Mapping[str, Any]) -> DecoderConfig:
    """Return what a config.json says, whether written by transformers 4 or 5.

    Raises:
        ConfigError: it asks for something that is not supported here; all such fields are named.
    """
    names = {family.name for family in DecoderFamily}
    if content.get("model_type") not in names:
        raise _refuse([f"model_type={content.get('model_type')} (known: {', '.join(sorted(names))})"])
    family = DecoderFamily[content["model_type"]]
    required = {key for key, default in _SAME.items() if default is None}
    if family is not DecoderFamily.llama:  # the others' defaults are those of one size
        required.add("num_key_value_heads")
    if family is DecoderFamily.qwen3:
        required.add("head_dim")
    problems = [f"{key} is missing" for key in sorted(required) if key not in content]
    problems += [
        f"{key}={value}"
        for key, value in content.items()
        if key not in _SAME.keys() | _READ | _HARMLESS
        and (key not in _ONLY or (value or None) != (_ONLY[key] or None))
    ]
    architectures = content.get("architectures") or [ARCHITECTURES[family]]
    if architectures != [ARCHITECTURES[family]]:
        problems.append(f"architectures={architectures}")
    if family is DecoderFamily.llama and content.get("sliding_window") is not None:
        problems.append(f"sliding_window={content['sliding_window']} in llama")
    if family is DecoderFamily.mistral and content.get("attention_bias"):
        problems.append("attention_bias=True in mistral")
    if problems:
        raise _refuse(problems)
    heads = content["num_attention_heads"]
    config = DecoderConfig(
        family=family,
        **{key: content.get(key, default) for key, default in _SAME.items()},
        num_key_value_heads=content.get("num_key_value_heads") or heads,
        head_dim=content.get("head_dim") or content["hidden_size"] // heads,
        attention_bias=bool(content.get("attention_bias")) or family is DecoderFamily.qwen2,
    )
    _parse_rope(content, config)
    _parse_window(content, config)
    return config


def _refuse(problems: list[str]) -> ConfigError:
    return ConfigError(
        "use this config.json", f"not supported here: {'; '.join(problems)}", "take another model"
    )


def _parse_rope(content: Mapping[str, Any], config: DecoderConfig) -> None:
    """transformers 5 keeps the base and the scaling in `rope_parameters`, 4 in two fields."""
    scaling = dict(content.get("rope_parameters") or content.get("rope_scaling") or {})
    if any(isinstance(value, dict) for value in scaling.values()):
        raise _refuse(["rope_parameters of each kind of layer"])
    config.rope_theta = float(scaling.pop("rope_theta", None) or content.get("rope_theta") or 10000.0)
    if scaling.pop("partial_rotary_factor", 1.0) != 1.0:
        raise _refuse(["partial_rotary_factor"])
    if get_rope_type(scaling) == "default":
        config.rope_scaling = None
        return
    scaling["rope_type"] = get_rope_type(scaling)
    scaling.pop("type", None)
    original = content.get("original_max_position_embeddings")
    if original is not None:
        scaling["original_max_position_embeddings"] = original
    required, optional = ROPE_KEYS.get(scaling["rope_type"], (set(), set()))
    if "original_max_position_embeddings" in required | optional:
        scaling.setdefault("original_max_position_embeddings", config.max_position_embeddings)
    if found := rope_findings(scaling):
        raise _refuse(found)
    config.rope_scaling = scaling


def _parse_window(content: Mapping[str, Any], config: DecoderConfig) -> None:
    """In Qwen a switch turns the window on; all families may list the kind of each layer."""
    window = content.get("sliding_window", 4096 if config.family is DecoderFamily.mistral else None)
    if config.family in (DecoderFamily.qwen2, DecoderFamily.qwen3):
        window = window if content.get("use_sliding_window") else None
        if window is not None:
            config.max_window_layers = content.get("max_window_layers", 28)
    config.sliding_window = window
    first = config.max_window_layers if window is not None else config.num_hidden_layers
    expected = [
        "sliding_attention" if layer >= first else "full_attention"
        for layer in range(config.num_hidden_layers)
    ]
    if content.get("layer_types") not in (None, expected):
        raise _refuse([f"layer_types={content['layer_types']}"])


def check_agreement(config: DecoderConfig, folder: Path) -> None:
    """Refuse a config that is not the model in the folder.

    `max_position_embeddings` may differ: base and instruct versions of one model do.

    Raises:
        ConfigError: as `parse_config`, or a field differs; all of them are named.
    """
    theirs = parse_config(read_config(folder))
    ours = normalise(config)
    differences = [
        f"{each.name}={_show(getattr(ours, each.name))}, there {_show(getattr(theirs, each.name))}"
        for each in fields(DecoderConfig)
        if each.name not in _FREE and getattr(ours, each.name) != getattr(theirs, each.name)
    ]
    if differences:
        raise ConfigError(
            f"model.pretrained={folder} is another model than model",
            "; ".join(differences),
            "set model's fields to what is there, or take the folder of this model",
        )


def normalise(config: DecoderConfig) -> DecoderConfig:
    """Return the config as `parse_config` would give it: defaults filled in, what has no effect left out."""
    return parse_config(make_config_json(config, "float32"))


def make_config_json(config: DecoderConfig, dtype: str) -> dict[str, Any]:
    """Return the config.json of a decoder, in the form that transformers 4 and 5 read.

    Args:
        config: Of the decoder.
        dtype: Of the weights beside it, as torch names it.
    """
    family = config.family
    content: dict[str, Any] = {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family.name,
        "torch_dtype": dtype,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim or config.hidden_size // config.num_attention_heads,
        "rope_theta": config.rope_theta,
        "rope_scaling": None if get_rope_type(config.rope_scaling) == "default" else config.rope_scaling,
        "bos_token_id": None,
        "eos_token_id": None,
        "use_cache": True,
    }
    content |= {key: getattr(config, key) for key in _SAME}
    if family in (DecoderFamily.llama, DecoderFamily.qwen3):
        content["attention_bias"] = config.attention_bias
    if family is not DecoderFamily.llama:
        content["sliding_window"] = config.sliding_window
    if family in (DecoderFamily.qwen2, DecoderFamily.qwen3):
        content["use_sliding_window"] = config.sliding_window is not None
        content["max_window_layers"] = config.max_window_layers
    return content


def _show(value: Any) -> Any:
    return value.name if isinstance(value, DecoderFamily) else value
