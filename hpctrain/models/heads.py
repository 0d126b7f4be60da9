"""Heads and their losses: margin softmax for identities, multi-label classification for behaviours.

Both return sums over samples. A sample without a label gets weight 0 instead of being left out: no host
synchronisation, the same shapes on all ranks, and every parameter is always in the graph.
Both compute in fp32 even under bf16 autocast: a cosine near 1 has a bf16 step of 2⁻⁸ to 2⁻⁹, which the scale
(s = 64) turns into a quarter of a logit: more than the margin's effect on an easy sample.
Shapes: B samples, N samples of all ranks, D embedding, C identities, S those of them that are in the softmax,
K behaviours.
"""

from __future__ import annotations

import math
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpctrain.config.schema import Margin

_BLOCK_ROWS = 1024  # rows that are drawn together


def take_margin(cos_B: Tensor, margin: Margin, margin_rad: float) -> Tensor:
    """Return the cosines between samples and their own identities with the margin m taken; any shape.

    ArcFace (Deng et al. 2019, eq. 3) turns cos θ into cos(θ + m). Beyond θ + m = π that would rise again, so
    the line cos θ - m·sin m takes over there, as in the authors' code. CosFace (Wang et al. 2018, eq. 4)
    turns cos θ into cos θ - m.

    Args:
        cos_B: cosines.
        margin: which of the two.
        margin_rad: m; radians for ArcFace, cosine units for CosFace.
    """
    if margin is Margin.cosface:
        return cos_B - margin_rad
    # The derivative of sqrt(1 - cos²) is infinite at cos = ±1; one step of rounding away it is not.
    limit = 1.0 - torch.finfo(cos_B.dtype).eps
    sin_B = torch.sqrt(1.0 - cos_B.clamp(-limit, limit) ** 2)
    shifted_B = cos_B * math.cos(margin_rad) - sin_B * math.sin(margin_rad)
    line_B = cos_B - margin_rad * math.sin(margin_rad)
    return torch.where(cos_B > -math.cos(margin_rad), shifted_B, line_B)


def make_margin_logits(
    cos_BC: Tensor, label_B: Tensor, margin: Margin, margin_rad: float, scale: float
) -> Tensor:
    """Return the scaled logits s·cos θ, with the margin m taken from each sample's own identity.

    Args:
        cos_BC: cosines between embeddings and identity centres.
        label_B: own identity of each sample, int64, in [0, C).
        margin: as for `take_margin`, and so `margin_rad`.
        scale: s.
    """
    label_B1 = label_B[:, None]
    own_B1 = take_margin(cos_BC.gather(1, label_B1), margin, margin_rad)
    return scale * cos_BC.scatter(1, label_B1, own_B1)


class ClassShard(Protocol):
    """This rank's place among ranks that hold a part of the identities each, and how it talks to them.

    All four methods are collective. Every rank has the same number of samples.
    """

    start: int  #: this rank's first identity
    rank: int
    num_ranks: int

    def gather(self, value: Tensor) -> Tensor:
        """Return the B rows of every rank below each other, in rank order, shape (N, …)."""

    def scatter_sum(self, value: Tensor) -> Tensor:
        """Return this rank's B rows of the sum over ranks of a value of shape (N, …)."""

    def max_(self, value: Tensor) -> None:
        """Take the maximum over ranks, in place."""

    def sum_(self, value: Tensor) -> None:
        """Take the sum over ranks, in place."""


class _ShardedMarginLoss(torch.autograd.Function):
    """Margin softmax cross-entropy of this rank's samples, over the identities of all ranks.

    With p the softmax over all ranks, the loss of sample n changes with its cosine to identity c by
    s · q_nc: q = p for other identities, q = (p - 1) · d(margin)/d(cos) for its own. So q is all that is
    kept: one buffer of N × S, in which cosines, logits and softmax follow each other. Both gradients are
    products with it. That of the embeddings is summed over ranks; that of the centres is whole here, and
    divided by the number of ranks, as data parallelism does with the sum of the ranks' gradients.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_BD: Tensor,
        centre_SD: Tensor,
        column_N: Tensor,
        own_N: Tensor,
        head: IdentityHead,
        shard: ClassShard,
    ) -> Tensor:
        x_ND = shard.gather(x_BD)
        column_N1, own_N1 = column_N[:, None], own_N[:, None]
        work_NS = x_ND @ centre_SD.T
        with torch.enable_grad():
            cos_N1 = work_NS.gather(1, column_N1).requires_grad_()
            shifted_N1 = take_margin(cos_N1, head.margin, head.margin_rad)
            (slope_N1,) = torch.autograd.grad(shifted_N1.sum(), cos_N1)
        cos_N1, shifted_N1 = cos_N1.detach(), shifted_N1.detach()
        work_NS.scatter_(1, column_N1, torch.where(own_N1, shifted_N1, cos_N1)).mul_(head.scale)
        max_N1 = work_NS.amax(1, keepdim=True)
        shard.max_(max_N1)
        work_NS.sub_(max_N1).exp_()
        own_logit_N1 = torch.where(own_N1, head.scale * shifted_N1, 0.0)
        sums_2N1 = torch.stack([work_NS.sum(1, keepdim=True), own_logit_N1])
        shard.sum_(sums_2N1)
        work_NS.div_(sums_2N1[0])
        p_N1 = work_NS.gather(1, column_N1)
        work_NS.scatter_(1, column_N1, torch.where(own_N1, (p_N1 - 1.0) * slope_N1, p_N1))
        ctx.shard, ctx.scale = shard, head.scale
        ctx.save_for_backward(x_ND, centre_SD, work_NS)
        loss_N = (sums_2N1[0].log() + max_N1 - sums_2N1[1]).squeeze(1)
        return loss_N.view(shard.num_ranks, -1)[shard.rank].clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_ND, centre_SD, q_NS = ctx.saved_tensors
        shard: ClassShard = ctx.shard
        scale_N1 = shard.gather(gradients[0])[:, None] * ctx.scale
        x_grad_BD = shard.scatter_sum(scale_N1 * (q_NS @ centre_SD))
        centre_grad_SD = q_NS.T @ (scale_N1 / shard.num_ranks * x_ND)
        return x_grad_BD, centre_grad_SD, None, None, None, None


def sample_classes(label_N: Tensor, num_classes: int, num_sampled: int, generator: torch.Generator) -> Tensor:
    """Return `num_sampled` different classes in ascending order: those of the labels, and others by chance.

    Partial FC (An et al. 2022): all others are equally likely.

    Args:
        label_N: int64; what is not in [0, num_classes) is nobody's. At most `num_sampled` different ones.
        num_classes: how many there are.
        num_sampled: how many are taken.
        generator: on the device of `label_N`.
    """
    score_C1 = torch.rand(
        num_classes + 1, generator=generator, device=label_N.device
    )  # the last one is a bin
    here_N = (label_N >= 0) & (label_N < num_classes)
    score_C1.index_fill_(0, torch.where(here_N, label_N, num_classes), 2.0)  # above all others
    return score_C1[:num_classes].topk(num_sampled).indices.sort().values


class IdentityHead(nn.Module):
    """Margin softmax over identity centres, which are the rows of `weight`, shape (C, D).

    Class parallel: `weight` is built on no device; `core` replaces it by a DTensor of which each rank holds
    rows, made by `make_rows`, sets `shard`, and calls `begin_step` where `sample_rate` is below 1.
    """

    shard: ClassShard | None = None

    def __init__(
        self,
        embedding_dim: int,
        num_identities: int,
        margin: Margin,
        margin_rad: float,
        scale: float,
        *,
        class_parallel: bool = False,
        sample_rate: float = 1.0,
    ) -> None:
        super().__init__()
        self.margin, self.margin_rad, self.scale, self.sample_rate = margin, margin_rad, scale, sample_rate
        self.seed = int(torch.randint(2**62, ()))
        self.step = 0
        if class_parallel:
            self.weight = nn.Parameter(torch.empty(num_identities, embedding_dim, device="meta"))
        else:
            self.weight = nn.Parameter(torch.empty(num_identities, embedding_dim))
            with torch.no_grad():
                self.weight.copy_(self.make_rows(0, num_identities))

    def make_rows(self, start: int, stop: int) -> Tensor:
        """Return the initial centres of identities start … stop - 1, on the CPU, whatever the other rows."""
        blocks = []
        for block in range(start // _BLOCK_ROWS, -(-stop // _BLOCK_ROWS)):
            random = torch.Generator().manual_seed(self.seed + block)
            rows_RD = torch.randn(_BLOCK_ROWS, self.weight.shape[1], generator=random)
            first = block * _BLOCK_ROWS
            blocks.append(0.01 * rows_RD[max(0, start - first) : stop - first])
        return torch.cat(blocks)

    def begin_step(self, step: int) -> None:
        """Draw other negatives from now on: they are a function of the seed, the step and the shard."""
        self.step = step

    def forward(self, embedding_BD: Tensor, identity_B: Tensor, weight_B: Tensor) -> Tensor:
        """Return Σ weight · cross-entropy over the samples with an identity (label ≥ 0).

        Collective over the ranks of `shard`, if there is one, and so is the backward pass.

        Args:
            embedding_BD: embeddings of any length; only their direction counts.
            identity_B: int64; -1 where a sample has no identity.
            weight_B: sample weights.
        """
        with torch.autocast(embedding_BD.device.type, enabled=False):
            x_BD = F.normalize(embedding_BD.to(torch.promote_types(self.weight.dtype, torch.float32)))
            if self.shard is not None:
                loss_B = self._sharded_loss(x_BD, identity_B, self.shard)
            else:
                label_B = identity_B.clamp(min=0)
                cos_BC = x_BD @ F.normalize(self.weight.to(x_BD.dtype)).T
                logits_BC = make_margin_logits(cos_BC, label_B, self.margin, self.margin_rad, self.scale)
                loss_B = F.cross_entropy(logits_BC, label_B, reduction="none")
            return (loss_B * weight_B * (identity_B >= 0)).sum()

    def _sharded_loss(self, x_BD: Tensor, identity_B: Tensor, shard: ClassShard) -> Tensor:
        weight: Any = self.weight
        weight_CD: Tensor = weight.to_local()
        num_classes = weight_CD.shape[0]
        column_N = shard.gather(identity_B) - shard.start
        own_N = (column_N >= 0) & (column_N < num_classes)
        num_sampled = self._num_sampled(num_classes, len(column_N))
        if num_sampled < num_classes:
            index_S = sample_classes(column_N, num_classes, num_sampled, self._generator(shard))
            weight_CD = weight_CD.index_select(0, index_S)
            column_N = torch.searchsorted(index_S, column_N)
        centre_SD = F.normalize(weight_CD.to(x_BD.dtype))
        column_N = column_N.clamp(0, len(centre_SD) - 1)
        apply: Any = _ShardedMarginLoss.apply
        return cast(Tensor, apply(x_BD, centre_SD, column_N, own_N, self, shard))

    def _num_sampled(self, num_classes: int, num_samples: int) -> int:
        """The same in every step, so that shapes are: room for each sample's own identity."""
        return min(num_classes, max(math.ceil(self.sample_rate * num_classes), num_samples))

    def _generator(self, shard: ClassShard) -> torch.Generator:
        key = ((self.seed * 1_000_003 + self.step) * 65_537 + shard.rank) % 2**63
        return torch.Generator(self.weight.device).manual_seed(key)


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
