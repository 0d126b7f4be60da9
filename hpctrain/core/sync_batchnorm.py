"""BatchNorm over all data-parallel ranks, on any device: torch's own refuses the CPU.

One collective forward (each rank's mean and variance) and one backward (two sums a channel). It is written in
plain tensor operations: on a GPU torch's fused SyncBatchNorm kernels touch memory less often and are faster;
by how much here has not been measured. What it buys is one path, and one that is tested.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


def apply_sync_batchnorm(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Replace every BatchNorm in `model`, in place; parameters and buffers stay the same objects and names.

    Args:
        group: the data-parallel ranks; None for all.

    Raises:
        TypeError: a BatchNorm with a forward pass that is not known here.
    """
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, _BatchNorm) and not isinstance(child, SyncBatchNorm):
                setattr(parent, name, SyncBatchNorm(child, group))


class SyncBatchNorm(_BatchNorm):
    """A BatchNorm whose training statistics are those of all ranks together.

    Input (B, C, …); every rank gives the same shape. In training the forward pass is collective over
    `group`, and so is the backward pass. timm's `drop` and `act` behind the normalisation are kept.
    """

    def __init__(self, norm: _BatchNorm, group: dist.ProcessGroup | None) -> None:
        # timm's BatchNormAct2d is normalisation, drop, act; another forward would be lost silently.
        followers = [name for name in ("drop", "act") if hasattr(norm, name)]
        if type(norm).__module__ != _BatchNorm.__module__ and len(followers) != 2:
            raise TypeError(f"{type(norm).__name__} has a forward pass of its own: it cannot be synchronised")
        super().__init__(
            norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats, device="meta"
        )
        self.group, self.training = group, norm.training
        self._parameters, self._buffers = norm._parameters, norm._buffers
        self._followers = tuple(followers)
        for name in followers:
            self.add_module(name, getattr(norm, name))

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"BatchNorm wants (batch, channels, …), not {input.dim()} dimensions")

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalised input, same shape and dtype."""
        if self.training and _world_size(self.group) > 1:
            self._check_input_dim(input)
            output = self._synchronised(input)
        else:
            output = super().forward(input)
        for name in self._followers:
            output = self.get_submodule(name)(output)
        return cast(Tensor, output)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _synchronised(self, input: Tensor) -> Tensor:
        normalise: Any = _Normalise.apply
        output, mean_C, variance_C = normalise(input, self.weight, self.bias, self.eps, self.group)
        if self.track_running_stats:
            self._track(mean_C, variance_C, input.numel() // input.shape[1] * _world_size(self.group))
        return cast(Tensor, output)

    def _track(self, mean_C: Tensor, variance_C: Tensor, count: int) -> None:
        assert self.running_mean is not None and self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        share: Any = self.momentum
        if share is None:  # the plain average over all batches
            share = 1.0 / self.num_batches_tracked.to(self.running_mean.dtype)
        unbiased_C = variance_C * (count / max(1, count - 1))
        self.running_mean.lerp_(mean_C.to(self.running_mean.dtype), share)
        self.running_var.lerp_(unbiased_C.to(self.running_var.dtype), share)


class _Normalise(torch.autograd.Function):
    """y = weight · (x - mean) / sqrt(variance + eps) + bias, with mean and variance over all ranks.

    Backward (Ioffe & Szegedy 2015, §3, with the sums over N values a channel of all ranks):
    dx = weight / sqrt(variance + eps) · (dy - Σdy/N - x̂ · Σ(dy · x̂)/N). The gradients of weight and bias stay
    this rank's share: data parallelism adds them up as it does all others.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, group: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        dims = [dim for dim in range(x.dim()) if dim != 1]
        # Means first, then squares around them, then the ranks' means around their mean: sums of squares
        # would lose all digits where the mean is large.
        variance_C, mean_C = torch.var_mean(wide, dims, correction=0)
        # A sum of tensors with one's own rows filled in: a gather by the call that every torch spells alike.
        all_R2C = wide.new_zeros((_world_size(group), 2, wide.shape[1]))
        all_R2C[dist.get_rank(group)] = torch.stack([mean_C, variance_C])
        dist.all_reduce(all_R2C, group=group)
        mean_RC, variance_RC = all_R2C.unbind(1)
        mean_C = mean_RC.mean(0)
        variance_C = (variance_RC + (mean_RC - mean_C).square()).mean(0)
        scale_C = torch.rsqrt(variance_C + eps)
        ctx.group, ctx.dims = group, dims
        ctx.save_for_backward(x, weight, mean_C, scale_C)
        ctx.mark_non_differentiable(mean_C, variance_C)
        y = (wide - _spread(mean_C, x)) * _spread(scale_C if weight is None else scale_C * weight, x)
        if bias is not None:
            y = y + _spread(bias, x)
        return y.to(x.dtype), mean_C, variance_C

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean_C, scale_C = ctx.saved_tensors
        dy = gradients[0].to(mean_C.dtype)
        normal = (x.to(mean_C.dtype) - _spread(mean_C, x)) * _spread(scale_C, x)
        own_2C = torch.stack([dy.sum(ctx.dims), (dy * normal).sum(ctx.dims)])
        has_weight, has_bias = ctx.needs_input_grad[1], ctx.needs_input_grad[2]
        bias_grad_C = own_2C[0].clone() if has_bias else None
        weight_grad_C = own_2C[1].clone() if has_weight else None
        dist.all_reduce(own_2C, group=ctx.group)
        count = x.numel() // x.shape[1] * _world_size(ctx.group)
        mean_dy_C, mean_dy_normal_C = own_2C / count
        dx = dy - _spread(mean_dy_C, x) - normal * _spread(mean_dy_normal_C, x)
        dx = dx * _spread(scale_C if weight is None else scale_C * weight, x)
        return dx.to(x.dtype), weight_grad_C, bias_grad_C, None, None


def _world_size(group: dist.ProcessGroup | None) -> int:
    return dist.get_world_size(group) if dist.is_initialized() else 1


def _spread(value_C: Tensor, like: Tensor) -> Tensor:
    """A value a channel, shaped to broadcast against (B, C, …)."""
    return value_C.view(1, -1, *[1] * (like.dim() - 2))
