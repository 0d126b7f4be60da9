"""The decoder as `core` sees it: its stages, its initial weights, its metrics. Shapes: N sequences."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpctrain.config.schema import DecoderConfig, ModelConfig
from hpctrain.models.decoder import BLOCKS, TP_PLAN, Decoder
from hpctrain.models.huggingface import WeightFiles
from hpctrain.models.init import make_initial
from hpctrain.models.lora import apply_lora
from hpctrain.models.spec import ModelSpec, ReadPiece, StagedModel


def build_stage(config: ModelConfig, layers: range, has_embedding: bool, has_head: bool) -> Decoder:
    """Build a pipeline stage, with adapters where the config asks for them."""
    assert isinstance(config, DecoderConfig)
    stage = Decoder(config, layers, has_embedding, has_head)
    apply_lora(stage, config.lora)
    return stage


def tied_weight(config: ModelConfig) -> str | None:
    """Return the name of the matrix that embedding and head share, if they do."""
    assert isinstance(config, DecoderConfig)
    return "model.embed_tokens.weight" if config.tie_word_embeddings else None


def initial_weights(config: ModelConfig, seed: int) -> ReadPiece:
    """Open the pretrained folder, if there is one; what it does not hold (adapters) is drawn.

    Raises:
        ConfigError: the folder does not hold exactly this decoder.
    """
    assert isinstance(config, DecoderConfig)
    files = None
    if config.pretrained is not None:
        files = WeightFiles(Path(config.pretrained))
        files.check(config)
    given = set(files.names()) if files else set()

    def read(name: str, shape: tuple[int, ...], piece: tuple[slice, ...], dtype: torch.dtype) -> Tensor:
        if files is not None and name in given:
            return files.read(name, piece).to(dtype)
        return make_initial(name, shape, dtype, seed, config)[piece]

    return read


def evaluate_tokens(outputs: dict[str, np.ndarray[Any, Any]]) -> dict[str, float]:
    """Return the mean loss of the tokens that are learnt, and the perplexity, its exponential.

    Args:
        outputs: `nll_N`, each sequence's weighted loss sum, and `weight_N`, its weight.
    """
    loss = float(outputs["nll_N"].sum() / max(1.0, outputs["weight_N"].sum()))
    return {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}


SPEC = ModelSpec(
    "decoder",
    evaluate_tokens,
    staged=StagedModel(
        build_stage,
        blocks=BLOCKS,
        tp_plan=TP_PLAN,
        tied_weight=tied_weight,
        tables=("model.embed_tokens", "lm_head"),
        initial_weights=initial_weights,
    ),
)
