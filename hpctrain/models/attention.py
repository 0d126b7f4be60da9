"""One block of the decoder: norm, attention, norm, gated MLP, each added to the residual stream.

Nothing in here knows how many heads there are: where matrices are cut over ranks, a rank sees its own.
Shapes: B sequences, L tokens, D hidden, H query heads, G key-value heads, K head_dim, M intermediate.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpctrain.config.schema import DecoderConfig, DecoderFamily
from hpctrain.models.dropout import SITES_PER_LAYER, KeyedDropout
from hpctrain.models.lora import apply_linear
from hpctrain.models.rope import rotate


class RmsNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · weight (Zhang & Sennrich 2019, eq. 4), computed in at least fp32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised last dimension, in the dtype of x."""
        dtype = torch.promote_types(x.dtype, self.weight.dtype)  # the kernel itself widens bf16
        return F.rms_norm(x.to(dtype), (x.shape[-1],), self.weight.to(dtype), self.eps).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention (Ainslie et al. 2023) with rotary positions."""

    def __init__(self, config: DecoderConfig, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        inputs, queries = config.hidden_size, config.num_attention_heads * head_dim
        keys = config.num_key_value_heads * head_dim
        has_bias = config.attention_bias or config.family is DecoderFamily.qwen2
        self.q_proj = nn.Linear(inputs, queries, bias=has_bias)
        self.k_proj = nn.Linear(inputs, keys, bias=has_bias)
        self.v_proj = nn.Linear(inputs, keys, bias=has_bias)
        self.o_proj = nn.Linear(queries, inputs, bias=has_bias and config.family is not DecoderFamily.qwen2)
        has_norms = config.family is DecoderFamily.qwen3
        self.q_norm = RmsNorm(head_dim, config.rms_norm_eps) if has_norms else None
        self.k_norm = RmsNorm(head_dim, config.rms_norm_eps) if has_norms else None

    def forward(
        self,
        x_BLD: Tensor,
        cos_B1LK: Tensor,
        sin_B1LK: Tensor,
        mask_B1LL: Tensor | None,
        key_B: Tensor | None,
    ) -> Tensor:
        """Return what attention adds to the residual stream, [B, L, D].

        Args:
            x_BLD: the normalised stream.
            cos_B1LK: of the rotary angles.
            sin_B1LK: of the rotary angles.
            mask_B1LL: bool, what each token may see; None for itself and all before it.
            key_B: of the dropout of adapters.
        """
        q_BLHK = self._split(apply_linear(self.q_proj, x_BLD, key_B))
        k_BLGK = self._split(apply_linear(self.k_proj, x_BLD, key_B))
        v_BLGK = self._split(apply_linear(self.v_proj, x_BLD, key_B))
        if self.q_norm is not None and self.k_norm is not None:
            q_BLHK, k_BLGK = self.q_norm(q_BLHK), self.k_norm(k_BLGK)
        q_BHLK = rotate(q_BLHK.transpose(1, 2), cos_B1LK, sin_B1LK)
        k_BGLK = rotate(k_BLGK.transpose(1, 2), cos_B1LK, sin_B1LK)
        # SDPA's own grouping has one kernel only; the others fall back to written-out attention.
        repeats = q_BHLK.shape[1] // k_BGLK.shape[1]
        k_BHLK = k_BGLK.repeat_interleave(repeats, dim=1)
        v_BHLK = v_BLGK.transpose(1, 2).repeat_interleave(repeats, dim=1)
        o_BHLK = F.scaled_dot_product_attention(
            q_BHLK, k_BHLK, v_BHLK, attn_mask=mask_B1LL, is_causal=mask_B1LL is None
        )
        return apply_linear(self.o_proj, o_BHLK.transpose(1, 2).flatten(2), key_B)

    def _split(self, x_BLF: Tensor) -> Tensor:
        return x_BLF.view(*x_BLF.shape[:2], -1, self.head_dim)


class Mlp(nn.Module):
    """SwiGLU (Shazeer 2020, eq. 6)."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        inputs, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(inputs, inner, bias=False)
        self.up_proj = nn.Linear(inputs, inner, bias=False)
        self.down_proj = nn.Linear(inner, inputs, bias=False)

    def forward(self, x_BLD: Tensor, key_B: Tensor | None) -> Tensor:
        """Return what the MLP adds to the residual stream, [B, L, D]."""
        gate_BLM = F.silu(apply_linear(self.gate_proj, x_BLD, key_B))
        up_BLM = apply_linear(self.up_proj, x_BLD, key_B)
        return apply_linear(self.down_proj, gate_BLM * up_BLM, key_B)


class Block(nn.Module):
    """Layer `index` of the decoder."""

    def __init__(self, config: DecoderConfig, head_dim: int, index: int) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, head_dim)
        self.post_attention_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = Mlp(config)
        site = index * SITES_PER_LAYER
        self.attention_dropout = KeyedDropout(config.residual_dropout, site)
        self.mlp_dropout = KeyedDropout(config.residual_dropout, site + 1)

    def forward(
        self,
        hidden_BLD: Tensor,
        cos_B1LK: Tensor,
        sin_B1LK: Tensor,
        mask_B1LL: Tensor | None,
        dropout_key_B: Tensor | None,
    ) -> Tensor:
        """Return the residual stream behind this layer; the arguments are those of `Attention`."""
        attended_BLD = self.self_attn(
            self.input_layernorm(hidden_BLD), cos_B1LK, sin_B1LK, mask_B1LL, dropout_key_B
        )
        hidden_BLD = hidden_BLD + self.attention_dropout(attended_BLD, dropout_key_B)
        inner_BLD = self.mlp(self.post_attention_layernorm(hidden_BLD), dropout_key_B)
        hidden_BLD = hidden_BLD + self.mlp_dropout(inner_BLD, dropout_key_B)
        return hidden_BLD
