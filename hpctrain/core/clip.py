"""The gradient norm over all ranks and axes, each parameter counted once."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def gradient_norm(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Return the 2-norm of all gradients, a device scalar of at least fp32.

    Where parameters lie in pieces it is collective over the world. Every rank adds up the squares of what it
    holds, divided by the number of ranks that hold the same.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not any(isinstance(gradient, DTensor) for gradient in gradients):
        return torch.nn.utils.get_total_norm(gradients, foreach=True)
    shares = [_count_holders(gradient) for gradient in gradients]
    norms = torch._foreach_norm([local_part(gradient) for gradient in gradients])
    wide = torch.promote_types(norms[0].dtype, torch.float32)
    squares = torch._foreach_div([n.to(wide).square() for n in norms], shares)
    total = torch.stack(squares).sum()
    dist.all_reduce(total)
    return total.sqrt()


def scale_gradients(parameters: Sequence[nn.Parameter], factor: Tensor) -> None:
    """Multiply all gradients by a device scalar."""
    torch._foreach_mul_([local_part(p.grad) for p in parameters if p.grad is not None], factor)


def local_part(value: Tensor) -> Tensor:
    """What this rank holds of a tensor: one multi-tensor call takes no whole tensors and pieces together."""
    return value.to_local() if isinstance(value, DTensor) else value


def _count_holders(gradient: Tensor) -> int:
    """On how many ranks the same values lie: on all, unless they are a part."""
    if not isinstance(gradient, DTensor):
        return dist.get_world_size()
    mesh = gradient.device_mesh
    assert not any(placement.is_partial() for placement in gradient.placements)
    return math.prod(
        mesh.size(axis) for axis, placement in enumerate(gradient.placements) if placement.is_replicate()
    )
