"""Heads and their losses: margin softmax for identities, multi-label classification for behaviours.

Both return sums over samples. A sample without a label gets weight 0 instead of being left out: no host
synchronisation, the same shapes on all ranks, and every parameter is always in the graph.
Both compute in fp32 even under bf16 autocast: a cosine near 1 has a bf16 step of 2⁻⁸ to 2⁻⁹, which the scale
(s = 64) turns into a quarter of a logit: more than the margin's effect on an easy sample.
Shapes: B samples, D embedding, C identities, K behaviours.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpctrain.config.schema import Margin


def make_margin_logits(
    cos_BC: Tensor, label_B: Tensor, margin: Margin, margin_rad: float, scale: float
) -> Tensor:
    """Return the scaled logits s·cos θ, with the margin m taken from each sample's own identity.

    ArcFace (Deng et al. 2019, eq. 3) turns cos θ into cos(θ + m). Beyond θ + m = π that would rise again, so
    the line cos θ - m·sin m takes over there, as in the authors' code. CosFace (Wang et al. 2018, eq. 4)
    turns cos θ into cos θ - m.

    Args:
        cos_BC: cosines between embeddings and identity centres.
        label_B: own identity of each sample, int64, in [0, C).
        margin: which of the two.
        margin_rad: m; radians for ArcFace, cosine units for CosFace.
        scale: s.
    """
    label_B1 = label_B[:, None]
    cos_B1 = cos_BC.gather(1, label_B1)
    if margin is Margin.cosface:
        own_B1 = cos_B1 - margin_rad
    else:
        # The derivative of sqrt(1 - cos²) is infinite at cos = ±1; one step of rounding away it is not.
        limit = 1.0 - torch.finfo(cos_BC.dtype).eps
        sin_B1 = torch.sqrt(1.0 - cos_B1.clamp(-limit, limit) ** 2)
        shifted_B1 = cos_B1 * math.cos(margin_rad) - sin_B1 * math.sin(margin_rad)
        line_B1 = cos_B1 - margin_rad * math.sin(margin_rad)
        own_B1 = torch.where(cos_B1 > -math.cos(margin_rad), shifted_B1, line_B1)
    return scale * cos_BC.scatter(1, label_B1, own_B1)


class IdentityHead(nn.Module):
    """Margin softmax over identity centres, which are the rows of `weight`, shape (C, D)."""

    def __init__(
        self, embedding_dim: int, num_identities: int, margin: Margin, margin_rad: float, scale: float
    ) -> None:
        super().__init__()
        self.margin, self.margin_rad, self.scale = margin, margin_rad, scale
        self.weight = nn.Parameter(torch.empty(num_identities, embedding_dim))
        nn.init.normal_(self.weight, std=0.01)

    def forward(self, embedding_BD: Tensor, identity_B: Tensor, weight_B: Tensor) -> Tensor:
        """Return Σ weight · cross-entropy over the samples with an identity (label ≥ 0).

        Args:
            embedding_BD: embeddings of any length; only their direction counts.
            identity_B: int64; -1 where a sample has no identity.
            weight_B: sample weights.
        """
        with torch.autocast(embedding_BD.device.type, enabled=False):
            dtype = torch.promote_types(self.weight.dtype, torch.float32)
            centre_CD = F.normalize(self.weight.to(dtype))
            cos_BC = F.normalize(embedding_BD.to(dtype)) @ centre_CD.T
            label_B = identity_B.clamp(min=0)
            logits_BC = make_margin_logits(cos_BC, label_B, self.margin, self.margin_rad, self.scale)
            loss_B = F.cross_entropy(logits_BC, label_B, reduction="none")
            return (loss_B * weight_B * (identity_B >= 0)).sum()


class BehaviourHead(nn.Module):
    """One yes-or-no question per behaviour, asked of the embedding."""

    def __init__(self, embedding_dim: int, num_behaviours: int) -> None:
        super().__init__()
        self.linear = nn.Linear(embedding_dim, num_behaviours)

    def logits(self, embedding_BD: Tensor) -> Tensor:
        """Return the logits, shape (B, K)."""
        with torch.autocast(embedding_BD.device.type, enabled=False):
            dtype = torch.promote_types(self.linear.weight.dtype, torch.float32)
            return F.linear(embedding_BD.to(dtype), self.linear.weight.to(dtype), self.linear.bias.to(dtype))

    def forward(
        self, embedding_BD: Tensor, behaviour_BK: Tensor, has_behaviour_B: Tensor, weight_B: Tensor
    ) -> Tensor:
        """Return Σ weight · mean over K of the binary cross-entropy, over the samples with labels.

        Args:
            embedding_BD: embeddings.
            behaviour_BK: labels, 0 or 1.
            has_behaviour_B: 1 where a sample has labels, else 0.
            weight_B: sample weights.
        """
        logits_BK = self.logits(embedding_BD)
        labels_BK = behaviour_BK.to(logits_BK.dtype)
        loss_BK = F.binary_cross_entropy_with_logits(logits_BK, labels_BK, reduction="none")
        return (loss_BK.mean(dim=1) * has_behaviour_B * weight_B).sum()
