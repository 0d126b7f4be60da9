"""Cross-entropy over a large vocabulary without its logits in memory.

32B models have 152,064 tokens: the logits of one sequence of 4,096 are 2.5 GB in fp32, and autograd would
keep them twice. Here a chunk of tokens has logits at a time, only log Σ exp is kept for backward, and the
logits are computed again there; without chunks they are kept, once. With the vocabulary cut over ranks, two
small reductions make it whole.
Shapes: T tokens, D hidden, V vocabulary rows of this rank, C tokens of a chunk, B sequences, L tokens of one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


@dataclass(frozen=True)
class VocabShard:
    """A rank's part of the vocabulary, and how the ranks that share it reduce a tensor in place."""

    start: int  #: first vocabulary row of this rank
    max: Callable[[Tensor], None]
    sum: Callable[[Tensor], None]


def token_losses(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    label_T: Tensor,
    chunk_tokens: int = 0,
    shard: VocabShard | None = None,
) -> Tensor:
    """Return -log softmax(W h)[label] of each token, [T], in at least fp32.

    With a shard it is collective over the ranks that share the vocabulary, once in forward (a max and a sum
    of 2 T numbers); the gradient of `hidden_TD` is then this rank's part of a sum over them.

    Args:
        hidden_TD: what the head sees.
        weight_VD: vocabulary rows; those of this rank where there is a shard.
        label_T: int64, in the whole vocabulary. Another number gives a finite value without meaning.
        chunk_tokens: tokens whose logits exist at once. They are computed again in backward, and the gradient
            of W is summed in at least fp32. 0 keeps them all from forward to backward, in at least fp32.
        shard: this rank's part of the vocabulary; None for all of it.
    """
    losses_T: Tensor = _TokenLosses.apply(hidden_TD, weight_VD, label_T, chunk_tokens, shard)
    return losses_T


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        label_T: Tensor,
        chunk_tokens: int,
        shard: VocabShard | None,
    ) -> Tensor:
        wide = torch.promote_types(hidden_TD.dtype, torch.float32)
        row_T = label_T - (shard.start if shard else 0)
        is_own_T = (row_T >= 0) & (row_T < len(weight_VD))
        row_T = row_T.clamp(0, len(weight_VD) - 1)
        max_T = hidden_TD.new_empty(label_T.shape, dtype=wide)
        # Σ exp and the label's own logit, side by side: one reduction for both.
        sums_2T = hidden_TD.new_zeros((2, len(label_T)), dtype=wide)
        kept_TV = None
        for part in _chunks(len(label_T), chunk_tokens):
            logits_CV = (hidden_TD[part] @ weight_VD.T).to(wide)
            max_T[part] = logits_CV.amax(dim=1)
            sums_2T[1, part] = logits_CV.gather(1, row_T[part, None])[:, 0] * is_own_T[part]
            sums_2T[0, part] = logits_CV.sub_(max_T[part, None]).exp_().sum(dim=1)
            kept_TV = None if chunk_tokens else logits_CV
            del logits_CV  # or it would live while the next chunk's are made
        own_max_T = max_T
        if shard is not None:
            own_max_T = max_T.clone()
            shard.max(max_T)
            sums_2T[0] *= torch.exp(own_max_T - max_T)
            shard.sum(sums_2T)
        log_sum_T = max_T + sums_2T[0].log()
        ctx.save_for_backward(hidden_TD, weight_VD, row_T, is_own_T, log_sum_T, own_max_T, kept_TV)
        ctx.chunk_tokens = chunk_tokens
        return log_sum_T - sums_2T[1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_T: Tensor) -> tuple[Tensor | None, ...]:
        hidden_TD, weight_VD, row_T, is_own_T, log_sum_T, own_max_T, kept_TV = ctx.saved_tensors
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        sum_dtype = log_sum_T.dtype if ctx.chunk_tokens else weight_VD.dtype
        grad_hidden_TD = torch.zeros_like(hidden_TD) if needs_hidden else None
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=sum_dtype) if needs_weight else None
        for part in _chunks(len(row_T), ctx.chunk_tokens):
            if kept_TV is not None:  # exp(logit - own max), from forward; used up here
                soft_CV = kept_TV.mul_(torch.exp(own_max_T - log_sum_T)[:, None])
            else:
                logits_CV = (hidden_TD[part] @ weight_VD.T).to(log_sum_T.dtype)
                soft_CV = logits_CV.sub_(log_sum_T[part, None]).exp_()
            soft_CV.scatter_add_(1, row_T[part, None], -is_own_T[part, None].to(soft_CV.dtype))
            grad_CV = soft_CV.mul_(grad_T[part, None]).to(hidden_TD.dtype)
            if grad_hidden_TD is not None:
                torch.mm(grad_CV, weight_VD, out=grad_hidden_TD[part])
            if grad_weight_VD is not None:
                grad_weight_VD += grad_CV.T @ hidden_TD[part]
            logits_CV = soft_CV = grad_CV = None
        if grad_weight_VD is not None:
            grad_weight_VD = grad_weight_VD.to(weight_VD.dtype)
        return grad_hidden_TD, grad_weight_VD, None, None, None


def _chunks(num_tokens: int, chunk_tokens: int) -> list[slice]:
    chunk = chunk_tokens or max(num_tokens, 1)
    return [slice(start, start + chunk) for start in range(0, num_tokens, chunk)]


class LmHead(nn.Module):
    """The matrix from hidden states to the vocabulary, with the loss; tied, it uses the embedding's matrix.

    `shard` is set by whoever cuts the vocabulary over ranks.
    """

    def __init__(
        self, vocab_size: int, hidden_size: int, chunk_tokens: int, tied: nn.Embedding | None
    ) -> None:
        super().__init__()
        self.chunk_tokens = chunk_tokens
        self.shard: VocabShard | None = None
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size)) if tied is None else None
        self._tied = (tied,)  # in a tuple it is no submodule: its parameters keep one name

    @property
    def parameter(self) -> Tensor:
        """The matrix, of its own or the embedding's."""
        tied = self._tied[0]
        parameter = self.weight if tied is None else tied.weight
        assert parameter is not None
        return parameter

    def matrix(self) -> Tensor:
        """Return this rank's rows, [V, D]."""
        weight: Any = self.parameter
        local: Tensor = weight.to_local() if hasattr(weight, "to_local") else weight
        return local

    def logits(self, hidden_BLD: Tensor) -> Tensor:
        """Return the logits of this rank's rows, [B, L, V]."""
        return F.linear(hidden_BLD, self.matrix())

    def forward(self, hidden_BLD: Tensor, label_BL: Tensor, weight_BL: Tensor) -> Tensor:
        """Return Σ_L weight · cross-entropy of each sequence, [B], in at least fp32."""
        hidden_TD = hidden_BLD.flatten(0, 1)
        loss_T = token_losses(hidden_TD, self.matrix(), label_BL.flatten(), self.chunk_tokens, self.shard)
        return (loss_T.view(label_BL.shape) * weight_BL).sum(dim=1)
