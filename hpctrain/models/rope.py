"""Rotary position embedding (Su et al. 2021, §3.4.2) and the ways of stretching it to longer texts.

Nothing is kept as a buffer: the frequencies are a handful of numbers, made on the device where they are used,
so that a model built on the meta device or cut into stages has nothing to restore.
Shapes: B sequences, L tokens, H heads, K head_dim, F = K / 2 frequencies.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from hpctrain.config.rope import get_rope_type
from hpctrain.config.schema import DecoderConfig


def make_frequencies(config: DecoderConfig, head_dim: int, device: torch.device) -> tuple[Tensor, float]:
    """Return the angular frequencies, float64 [F] in rad/token, and the factor on cos and sin.

    `dynamic` (NTK-aware scaling by the length of the text at hand) is the default up to
    `max_position_embeddings`; the decoder refuses longer sequences, since the result would depend on what
    else is in the batch. Others: `linear` (Chen et al. 2023, eq. 4), `yarn` (Peng et al. 2023, §3.2–3.4),
    `llama3` (Llama 3.1's released code).
    """
    scaling = config.rope_scaling or {}
    kind = get_rope_type(scaling)
    exponent_F = torch.arange(0, head_dim, 2, dtype=torch.float64, device=device) / head_dim
    plain_F = float(config.rope_theta) ** -exponent_F
    if kind == "linear":
        return plain_F / scaling["factor"], 1.0
    if kind == "yarn":
        return _make_yarn(config, scaling, plain_F)
    if kind == "llama3":
        return _make_llama3(scaling, plain_F), 1.0
    assert kind in ("default", "dynamic"), kind
    return plain_F, 1.0


def _make_yarn(config: DecoderConfig, scaling: dict[str, Any], plain_F: Tensor) -> tuple[Tensor, float]:
    """Peng et al. 2023: slow frequencies are interpolated, fast ones kept, a ramp between (eq. 19–23)."""
    factor, num_frequencies = float(scaling["factor"]), len(plain_F)
    length = scaling.get("original_max_position_embeddings") or config.max_position_embeddings

    def find_frequency(rotations: float) -> float:  # index of the one that turns so often in `length` tokens
        return num_frequencies * math.log(length / (rotations * 2 * math.pi)) / math.log(config.rope_theta)

    low = find_frequency(scaling.get("beta_fast") or 32)
    high = find_frequency(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * num_frequencies - 1)
    if low == high:
        high += 0.001
    index_F = torch.arange(num_frequencies, dtype=torch.float64, device=plain_F.device)
    slow_F = ((index_F - low) / (high - low)).clamp(0, 1)
    frequency_F = plain_F / factor * slow_F + plain_F * (1 - slow_F)

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    attention_factor = scaling.get("attention_factor")
    if attention_factor is None:
        weight, weight_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
        attention_factor = mscale(weight) / mscale(weight_all) if weight and weight_all else mscale(1.0)
    return frequency_F, float(attention_factor)


def _make_llama3(scaling: dict[str, Any], plain_F: Tensor) -> Tensor:
    """Long waves are stretched by the factor, short ones kept, those between mixed."""
    factor, length = float(scaling["factor"]), float(scaling["original_max_position_embeddings"])
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    turns_F = length * plain_F / (2 * math.pi)
    kept_F = ((turns_F - low) / (high - low)).clamp(0, 1)
    return (1 - kept_F) * plain_F / factor + kept_F * plain_F


def make_rotation(
    position_BL: Tensor, config: DecoderConfig, head_dim: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return cos and sin of the angles, [B, 1, L, K], in at least fp32.

    The angle is a product of up to 10⁵ tokens and a frequency: in fp32 that costs three of seven digits, so
    angles are float64.
    """
    frequency_F, factor = make_frequencies(config, head_dim, position_BL.device)
    angle_BLF = position_BL[..., None].to(torch.float64) * frequency_F
    angle_B1LK = torch.cat((angle_BLF, angle_BLF), dim=-1)[:, None]
    wide = torch.promote_types(dtype, torch.float32)
    return (angle_B1LK.cos() * factor).to(wide), (angle_B1LK.sin() * factor).to(wide)


def rotate(x_BHLK: Tensor, cos_B1LK: Tensor, sin_B1LK: Tensor) -> Tensor:
    """Turn feature k against feature k + K/2, as Hugging Face orders them; the dtype stays."""
    left, right = x_BHLK.chunk(2, dim=-1)
    turned_BHLK = torch.cat((-right, left), dim=-1)
    return (x_BHLK * cos_B1LK + turned_BHLK * sin_B1LK).to(x_BHLK.dtype)
