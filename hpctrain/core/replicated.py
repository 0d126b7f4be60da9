"""A whole model on every rank: what a step and an evaluation need of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hpctrain.config.schema import OptimConfig, Precision

LossFunction = Callable[[nn.Module, Any], Tensor]


class Replicated:
    """A model and its DDP replica.

    The loss of a term is its sum over the global batch divided by the number of labelled samples in it, so
    it does not depend on how the batch is cut over ranks and microbatches. DDP averages gradients over
    ranks, hence the factor `world_size`.
    """

    def __init__(
        self, model: nn.Module, replica: nn.Module, optim: OptimConfig, world_size: int, device: torch.device
    ) -> None:
        self.model, self.replica, self.optim = model, replica, optim
        self.world_size, self.device = world_size, device
        self.term_weights: dict[str, float] = dict(model.term_weights)  # type: ignore[arg-type]

    def counted_parameters(self) -> list[nn.Parameter]:
        """The trained parameters."""
        return [p for p in self.model.parameters() if p.requires_grad]

    def autocast(self) -> torch.autocast:
        """The number format of forward passes, as a context."""
        return torch.autocast(
            self.device.type, torch.bfloat16, enabled=self.optim.precision is Precision.bf16
        )

    def loss(self, model: nn.Module, microbatch: Any) -> Tensor:
        """This microbatch's share of the global loss, times world_size."""
        with self.autocast():
            sums = model(microbatch)
        shares = [
            sums[term] * (weight / max(1.0, microbatch.counts[term]))
            for term, weight in self.term_weights.items()
        ]
        return torch.stack(shares).sum() * self.world_size

    def backward(self, microbatches: Sequence[Any], step: int, scale: Tensor | None = None) -> Tensor:
        """Add the gradients of a step; returns this rank's share of the loss, a device scalar. Collective."""
        assert scale is None
        losses = []
        for index, microbatch in enumerate(microbatches):
            last = index == len(microbatches) - 1
            accumulates = isinstance(self.replica, DistributedDataParallel) and not last
            with self.replica.no_sync() if accumulates else nullcontext():  # type: ignore[operator]
                loss = self.loss(self.replica, microbatch)
                loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        return torch.stack(losses).sum() / self.world_size
