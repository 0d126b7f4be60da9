"""A run's model as safetensors and JSON, for plain timm.

The embedding layer's BatchNorm is folded into its matrix: outside training the two are one affine map.
Shapes: F backbone features, D embedding, C identities, K behaviours.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from hpctrain.export.trained import TrainedModel, load_trained, refuse_existing
from hpctrain.models.backbone import get_timm_config, make_backbone_args
from hpctrain.models.vision import VisionModel


@dataclass(frozen=True)
class ModelReport:
    """What `export_model` wrote."""

    out: str
    step: int
    uses_ema: bool
    num_parameters: int


def export_model(run_dir: Path, out: Path, ema: bool | None = None) -> ModelReport:
    """Write `backbone.safetensors`, `heads.safetensors` and `config.json` into the new folder `out`.

    The backbone's keys are those of `timm.create_model(architecture, num_classes=0)`. The heads are
    `embedding.weight` (D, F) and `embedding.bias`, `identity.weight` (C, D), `behaviour.weight` (K, D) and
    `behaviour.bias`, as far as the run has them. All that preprocessing needs is in `config.json`.

    Raises:
        ConfigError: as `load_trained`, or `out` exists.
        CheckpointError: the run has no sound checkpoint.
    """
    refuse_existing(out)
    trained = load_trained(run_dir, ema)
    partial = out.with_name(f".{out.name}.{os.getpid()}")
    partial.mkdir(parents=True)
    backbone = {k: v.contiguous() for k, v in trained.model.backbone.state_dict().items()}
    save_file(backbone, partial / "backbone.safetensors")
    save_file(make_heads(trained.model), partial / "heads.safetensors")
    text = json.dumps(make_config(trained), ensure_ascii=False, indent=1)
    (partial / "config.json").write_text(text, encoding="utf-8")
    partial.rename(out)
    num_parameters = sum(p.numel() for p in trained.model.parameters())
    return ModelReport(str(out), trained.step, trained.uses_ema, num_parameters)


def make_heads(model: VisionModel) -> dict[str, Tensor]:
    """Return the tensors of `heads.safetensors`, the embedding's BatchNorm folded in (in float64)."""
    norm, linear = model.embedding.norm, model.embedding.linear
    assert norm.running_mean is not None and norm.running_var is not None
    gain_D = norm.weight.double() / torch.sqrt(norm.running_var.double() + norm.eps)
    heads = {
        "embedding.weight": gain_D[:, None] * linear.weight.double(),
        "embedding.bias": norm.bias.double() - gain_D * norm.running_mean.double(),
    }
    if model.identity_head is not None:
        heads["identity.weight"] = model.identity_head.weight
    if model.behaviour_head is not None:
        heads["behaviour.weight"] = model.behaviour_head.linear.weight
        heads["behaviour.bias"] = model.behaviour_head.linear.bias
    return {name: value.detach().float().contiguous() for name, value in heads.items()}


def make_config(trained: TrainedModel) -> dict[str, Any]:
    """Return the content of `config.json`: timm's keys, and ours beside them.

    Evaluation resizes the whole image to the input size, bilinearly: timm's crop mode `squash`.
    """
    config = trained.config
    args = make_backbone_args(replace(config, drop_path_rate=0.0))
    height, width = config.image_size
    kept = ("mean", "std", "first_conv", "classifier", "fixed_input_size", "license")
    timm_config = get_timm_config(trained.model.backbone)
    preprocessing: dict[str, Any] = {"input_size": [3, height, width], "interpolation": "bilinear"}
    preprocessing |= {"crop_pct": 1.0, "crop_mode": "squash"}
    return {
        "architecture": args.pop("model_name"),
        "num_classes": args.pop("num_classes"),
        "model_args": args,
        "pretrained_cfg": {key: timm_config[key] for key in kept if key in timm_config} | preprocessing,
        "image_size": [height, width],
        "embedding_dim": config.embedding_dim,
        "margin": {"kind": config.margin.name, "m": config.margin_rad, "s": config.margin_scale},
        "identities": trained.identities,
        "behaviours": trained.behaviours,
        "step": trained.step,
        "uses_ema": trained.uses_ema,
    }
