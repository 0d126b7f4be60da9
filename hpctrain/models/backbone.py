"""Backbones: timm models without their classifier."""

from __future__ import annotations

import difflib
import sys
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from hpctrain.config.schema import VisionConfig
from hpctrain.errors import ConfigError


def get_timm_config(backbone: nn.Module) -> dict[str, Any]:
    """Return timm's data config of a backbone: `mean`, `std` (of images in 0 … 1), `interpolation`, …"""
    pretrained_cfg: Any = backbone.pretrained_cfg
    return dict(pretrained_cfg)


def make_backbone_args(config: VisionConfig) -> dict[str, Any]:
    """Return the arguments with which `timm.create_model` gives the backbone of this config."""
    args: dict[str, Any] = {"model_name": config.backbone, "num_classes": 0}
    pretrained_cfg = timm.get_pretrained_cfg(config.backbone)
    if pretrained_cfg is not None and pretrained_cfg.fixed_input_size:
        args["img_size"] = tuple(config.image_size)
    if config.drop_path_rate:
        args["drop_path_rate"] = config.drop_path_rate
    return args


def build_backbone(config: VisionConfig) -> nn.Module:
    """Build the backbone without a classifier, with random weights.

    Raises:
        ConfigError: timm does not know the name or refuses an argument.
    """
    name = config.backbone.partition(".")[0]  # behind the point: a tag, which says what weights are published
    if not timm.is_model(name):
        close = difflib.get_close_matches(name, timm.list_models(), n=5, cutoff=0.5)
        raise ConfigError(
            f"model.backbone={config.backbone} is not a timm model",
            found=f"timm {timm.__version__} has similar names: {', '.join(close) or 'none'}",
            change="set model.backbone to a name that timm.list_models() gives",
        )
    try:
        backbone: nn.Module = timm.create_model(**make_backbone_args(config))
    except (TypeError, ValueError, RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"model.backbone={config.backbone} cannot be built for image_size={config.image_size}, "
            f"drop_path_rate={config.drop_path_rate}",
            found=f"timm says: {str(error) or repr(error)}",
            change="change that setting (a backbone without stochastic depth wants drop_path_rate=0)",
        ) from error
    return backbone


def probe_num_features(config: VisionConfig) -> int:
    """Return the width of the pooled features, from a forward pass on the meta device (no memory, no work).

    timm's `num_features` is not it for backbones with layers behind the pooling (MobileNetV3).

    Raises:
        ConfigError: as `build_backbone`, or the backbone cannot take images of this size.
    """
    height, width = config.image_size
    with torch.device("meta"), torch.no_grad():
        backbone = build_backbone(config).eval()
        try:
            feature_BF = backbone(torch.empty(2, 3, height, width))
        except (ValueError, RuntimeError, AssertionError) as error:
            raise ConfigError(
                f"model.backbone={config.backbone} cannot take images of {height}×{width} pixels",
                found=str(error) or repr(error),
                change="set model.image_size=[height,width] to a size that it was made for",
            ) from error
    return int(feature_BF.shape[1])


def load_pretrained(backbone: nn.Module, path: Path) -> None:
    """Load backbone weights from a .safetensors file as timm publishes them; a classifier is left out.

    Position embeddings of another image size are resampled, by timm's own rule for the architecture.

    Raises:
        ConfigError: the file cannot be read, or its tensors are not those of the backbone.
    """
    try:
        state = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"model.pretrained={path} cannot be read",
            found=str(error),
            change="set it to a .safetensors file with the backbone's weights, or to null",
        ) from error
    adapt: Any = getattr(sys.modules[type(backbone).__module__], "checkpoint_filter_fn", None)
    if adapt is not None:
        state = adapt(state, backbone)
    classifiers = get_timm_config(backbone).get("classifier") or ()
    classifiers = (classifiers,) if isinstance(classifiers, str) else classifiers
    state = {k: v for k, v in state.items() if not k.startswith(tuple(f"{name}." for name in classifiers))}
    own = backbone.state_dict()
    findings = {
        "missing": sorted(own.keys() - state.keys()),
        "unexpected": sorted(state.keys() - own.keys()),
        "of another shape": sorted(k for k in own.keys() & state.keys() if own[k].shape != state[k].shape),
    }
    if any(findings.values()):
        raise ConfigError(
            f"model.pretrained={path} does not fit model.backbone",
            found="; ".join(f"{len(v)} {k} ({', '.join(v[:3])}, …)" for k, v in findings.items() if v),
            change="take the weights of the same timm model, or set model.backbone to theirs",
        )
    backbone.load_state_dict(state)
