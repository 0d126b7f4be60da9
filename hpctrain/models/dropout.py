"""Dropout whose mask is a function of what it drops, not of who computes it.

Whether a feature is dropped follows from (key of the sequence, site in the model, token, feature) alone, by a
hash in integer arithmetic. So the mask is the same on one rank and on many, whatever the layout, and again
when activations are computed a second time for backward.
Shapes: B sequences, L tokens, F features.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

_LOW = 0xFFFFFFFF
_PIECE = 2**22  # numbers that are hashed at once: 32 MiB, which a GPU's cache holds
SITES_PER_LAYER = 16  #: 0 after attention, 1 after the MLP, from 2 on LoRA


def hash32(x: Tensor) -> Tensor:
    """Mix the low 32 bits of int64 numbers in [0, 2³²): xor-shifts and odd multipliers below 2³¹.

    The form is that of MurmurHash3's finaliser (Appleby 2011); with multipliers below 2³¹ no product leaves
    int64, so that every device gives the same. A test measures its bias.
    """
    x = (x ^ (x >> 16)) * 0x21F0AAAD & _LOW
    x = (x ^ (x >> 15)) * 0x735A2D97 & _LOW
    return x ^ (x >> 15)


class KeyedDropout(nn.Module):
    """Drop features with probability p and scale the others by 1 / (1 - p).

    `token_start` and `feature_start` say where in the whole tensor a rank's part begins.
    """

    def __init__(self, p: float, site: int) -> None:
        super().__init__()
        assert 0.0 <= p < 1.0
        self.p, self.site = p, site
        self.token_start = self.feature_start = 0

    def forward(self, x_BLF: Tensor, key_B: Tensor | None) -> Tensor:
        """Return x with features dropped; x itself where there is no key or nothing to drop.

        Args:
            x_BLF: activations.
            key_B: int64, another one for each sequence of each step.
        """
        if key_B is None or self.p == 0.0:
            return x_BLF
        kept_BLF = self.make_mask(key_B, x_BLF.shape[1], x_BLF.shape[2])
        return torch.where(kept_BLF, x_BLF * (1.0 / (1.0 - self.p)), 0.0)

    def make_mask(self, key_B: Tensor, num_tokens: int, num_features: int) -> Tensor:
        """Return what is kept, bool [B, L, F]."""
        device = key_B.device
        token_L = torch.arange(num_tokens, device=device) + self.token_start
        feature_F = torch.arange(num_features, device=device) + self.feature_start
        row_B = hash32((key_B & _LOW) ^ 0x9E3779B9)
        row_B = hash32(row_B ^ ((key_B >> 32) & _LOW))
        row_B = hash32(row_B ^ self.site)
        row_BL = hash32(row_B[:, None] ^ token_L)
        feature_F = hash32(feature_F + 1)
        limit = int(self.p * 2**32)
        # In pieces: a hash makes three int64 tensors, four times as large each as bf16 activations.
        tokens = max(1, _PIECE // max(1, len(key_B) * num_features))
        pieces = [
            hash32(part_BL[..., None] ^ feature_F) >= limit for part_BL in torch.split(row_BL, tokens, dim=1)
        ]
        return torch.cat(pieces, dim=1)
