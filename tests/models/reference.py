"""Decoders of `transformers`, the reference, small and random; and how to compare with them in float64."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from hpctrain.config.huggingface import parse_config
from hpctrain.models.decoder import Decoder

logging.getLogger("transformers").setLevel(logging.ERROR)

SMALL = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 48,
    "rms_norm_eps": 1e-4,  # large enough to be seen
    "rope_theta": 1234.0,
    "pad_token_id": None,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 12}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 24,
}
CASES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama, one head of keys": {"model_type": "llama", "num_key_value_heads": 1},
    "llama, as many heads of keys": {"model_type": "llama", "num_key_value_heads": 4},
    "llama, tied": {"model_type": "llama", "tie_word_embeddings": True},
    "llama, wide heads": {"model_type": "llama", "head_dim": 12},
    "llama, bias": {"model_type": "llama", "attention_bias": True},
    "llama, linear": {"model_type": "llama", "rope_scaling": {"rope_type": "linear", "factor": 3.0}},
    "llama, dynamic": {"model_type": "llama", "rope_scaling": {"type": "dynamic", "factor": 3.0}},
    "llama, llama3": {"model_type": "llama", "rope_scaling": LLAMA3},
    "mistral": {"model_type": "mistral", "sliding_window": None},
    "mistral, window": {"model_type": "mistral", "sliding_window": 5},
    "qwen2": {"model_type": "qwen2"},
    "qwen2, tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen2, window from layer 1 on": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 4,
        "max_window_layers": 1,
    },
    "qwen2, yarn": {"model_type": "qwen2", "rope_scaling": YARN},
    "qwen2, yarn, not rounded": {"model_type": "qwen2", "rope_scaling": YARN | {"truncate": False}},
    "qwen2, yarn, all frequencies fast": {
        "model_type": "qwen2",
        "rope_scaling": YARN | {"original_max_position_embeddings": 20_000},
    },
    "qwen2, yarn, two scales": {
        "model_type": "qwen2",
        "rope_scaling": YARN | {"mscale": 0.7, "mscale_all_dim": 0.4, "beta_fast": 8, "beta_slow": 2},
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "qwen3, tied": {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True},
    "qwen3, bias": {"model_type": "qwen3", "head_dim": 8, "attention_bias": True},
    "qwen3, window": {
        "model_type": "qwen3",
        "head_dim": 8,
        "use_sliding_window": True,
        "sliding_window": 6,
        "max_window_layers": 2,
    },
    "qwen3, yarn": {"model_type": "qwen3", "head_dim": 8, "rope_scaling": YARN | {"attention_factor": 1.3}},
}


@contextmanager
def widened() -> Iterator[None]:
    """Let `transformers` compute in float64 where it asks for float32: rotary angles, norms, softmax."""
    with (
        mock.patch.object(torch, "float32", torch.float64),
        mock.patch.object(torch, "float", torch.float64),
        mock.patch.object(Tensor, "float", Tensor.double),
    ):
        yield


def make_reference(dtype: torch.dtype = torch.float64, **settings: Any) -> Any:
    """Return a random model of `transformers`; no parameter has a value that could hide a mistake."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(**(SMALL | settings))
    with widened():
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
        model = model.to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if name.endswith("norm.weight") else 0.0, 0.3)
    return model


def content_of(reference: Any) -> dict[str, Any]:
    """Return the config.json that `transformers` would write."""
    content: dict[str, Any] = json.loads(reference.config.to_json_string())
    return content


def make_decoder(reference: Any) -> Decoder:
    """Return our decoder with the reference's weights."""
    decoder = Decoder(parse_config(content_of(reference))).to(next(reference.parameters()).dtype)
    state = dict(reference.named_parameters())  # a tied matrix once
    decoder.load_state_dict(state, strict=True)
    return decoder


def make_tokens(num_sequences: int, num_tokens: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return tokens, positions, labels and weights; some weights are 0, their labels out of range."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_sequences, num_tokens)
    token_BL = torch.randint(SMALL["vocab_size"], shape, generator=generator)
    label_BL = torch.randint(SMALL["vocab_size"], shape, generator=generator)
    weight_BL = torch.rand(shape, generator=generator)
    weight_BL[:, ::3] = 0.0
    label_BL[:, ::3] = -100
    return token_BL, torch.arange(num_tokens).expand(shape), label_BL, weight_BL


def plain_nll(logits_BLV: Tensor, label_BL: Tensor, weight_BL: Tensor) -> Tensor:
    """Return each sequence's weighted loss sum by torch's cross-entropy."""
    loss_BL = F.cross_entropy(logits_BLV.transpose(1, 2), label_BL, reduction="none", ignore_index=-100)
    return (loss_BL * weight_BL).sum(dim=1)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
