"""A whole model on every rank: what a step and an evaluation need of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hpctrain.config.schema import OptimConfig, Precision
from hpctrain.core.class_parallel import ClassHead
from hpctrain.core.data_parallel import apply_data_parallel, settle_buckets
from hpctrain.core.flops import count_training_flops
from hpctrain.models.spec import Model


class Replicated:
    """A model and its DDP replica.

    The loss of a term is its sum over the global batch divided by the number of labelled samples in it, so
    it does not depend on how the batch is cut over ranks and microbatches. DDP averages gradients over
    ranks, hence the factor `dp`.
    """

    reads_for_replica, eval_group = True, 1

    def __init__(
        self,
        model: Model,
        optim: OptimConfig,
        rank: int,
        world_size: int,
        device: torch.device,
        bucket_mib: int,
        class_heads: Sequence[ClassHead] = (),
    ) -> None:
        self.model: Model = model
        self.replica: nn.Module = model
        self.optim, self.device, self.bucket_mib = optim, device, bucket_mib
        self.dp_rank, self.dp, self.class_heads = rank, world_size, class_heads

    def start(self, first: Callable[[], Sequence[Any]]) -> None:
        """Make the replica, and settle its buckets. Collective."""
        if self.dp > 1:
            self.replica = apply_data_parallel(
                self.model, bucket_mib=self.bucket_mib, compression=self.optim.gradient_compression
            )
            settle_buckets(self.replica, self.loss, first()[0])

    def counted_parameters(self) -> list[nn.Parameter]:
        """The trained parameters."""
        return [p for p in self.model.parameters() if p.requires_grad]

    def autocast(self) -> torch.autocast:
        """The number format of forward passes, as a context."""
        return torch.autocast(
            self.device.type, torch.bfloat16, enabled=self.optim.precision is Precision.bf16
        )

    def loss(self, model: nn.Module, microbatch: Any) -> Tensor:
        """This microbatch's share of the global loss, times `dp`."""
        with self.autocast():
            sums = model(microbatch)
        shares = [
            sums[term] * (weight / max(1.0, microbatch.counts[term]))
            for term, weight in self.model.term_weights.items()
        ]
        return torch.stack(shares).sum() * self.dp

    def backward(self, microbatches: Sequence[Any], step: int, scale: Tensor | None = None) -> Tensor:
        """Add the gradients of a step; returns this rank's share of the loss, a device scalar. Collective."""
        assert scale is None
        for head in self.class_heads:
            head.begin_step(step)
        losses = []
        for index, microbatch in enumerate(microbatches):
            last = index == len(microbatches) - 1
            accumulates = isinstance(self.replica, DistributedDataParallel) and not last
            with self.replica.no_sync() if accumulates else nullcontext():  # type: ignore[operator]
                loss = self.loss(self.replica, microbatch)
                loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        return torch.stack(losses).sum() / self.dp

    def eval_outputs(self, batches: Sequence[Any]) -> list[dict[str, Tensor]]:
        """What the metrics need of each batch."""
        with torch.inference_mode(), self.autocast():
            return [self.model.eval_outputs(batch) for batch in batches]

    def flops_per_sample(self, first: Callable[[], Sequence[Any]]) -> float:
        """Counted on the first microbatch."""
        return count_training_flops(self.model, first()[0])
