"""Data parallelism with torch's DDP, set up so that a resumed run repeats the undisturbed one bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from hpctrain.config.schema import GradientCompression

if TYPE_CHECKING:
    from hpctrain.core.optim import Ema

LossFunction = Callable[[nn.Module, Any], Tensor]


def apply_data_parallel(
    model: nn.Module, *, bucket_mib: int, compression: GradientCompression
) -> DistributedDataParallel:
    """Replicate over all ranks; gradients are averaged in buckets while backward still runs.

    Buffers are not broadcast each step: rank 0's running statistics are the model's, and `sync_buffers`
    hands them to the others where they matter (evaluation, checkpoint).
    """
    replica = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=bucket_mib)
    replica.broadcast_buffers = False  # the argument of that name is deprecated from torch 2.14 on
    if compression is GradientCompression.bf16:
        replica.register_comm_hook(None, bf16_compress_hook)
    return replica


def settle_buckets(replica: nn.Module, loss: LossFunction, microbatch: Any) -> None:
    """One backward pass that is thrown away, at every start.

    DDP orders its buckets anew after its first backward pass, so the first step after a resume would sum in
    another order than the same step of a run that went on (seen with 3 and 4 ranks). Buffers and the random
    stream are put back; nothing else has changed.
    """
    buffers = [buffer.detach().clone() for buffer in replica.buffers()]
    rng = torch.get_rng_state()
    cuda_rng = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    loss(replica, microbatch).backward()  # type: ignore[no-untyped-call]
    for parameter in replica.parameters():
        parameter.grad = None
    with torch.no_grad():
        for buffer, kept in zip(replica.buffers(), buffers, strict=True):
            buffer.copy_(kept)
    torch.set_rng_state(rng)
    if cuda_rng is not None:
        torch.cuda.set_rng_state(cuda_rng)


def sync_buffers(model: nn.Module, ema: Ema | None) -> None:
    """Give every rank rank 0's buffers, and the averages of them. Collective."""
    buffers = dict(model.named_buffers())
    averages = {} if ema is None else ema.average
    for value in [*buffers.values(), *(averages[name] for name in buffers if name in averages)]:
        dist.broadcast(value, src=0)
