"""One optimizer step: forward and backward over the microbatches, clip, update. No host synchronisation."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hpctrain.config.schema import OptimConfig, Precision
from hpctrain.core.optim import Ema, clip_gradients, learning_rate

LossFunction = Callable[[nn.Module, Any], Tensor]


class TrainStep:
    """Holds what a step needs, and does it.

    The loss of a term is its sum over the global batch divided by the number of labelled samples in it, so
    it does not depend on how the batch is cut over ranks and microbatches. DDP averages gradients over
    ranks, hence the factor `world_size`.
    """

    def __init__(
        self,
        model: nn.Module,
        replica: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        ema: Ema | None,
        optim: OptimConfig,
        steps_per_epoch: int,
        world_size: int,
        device: torch.device,
    ) -> None:
        self.replica, self.optimizer, self.ema, self.optim = replica, optimizer, ema, optim
        self.steps_per_epoch, self.world_size, self.device = steps_per_epoch, world_size, device
        self.term_weights: dict[str, float] = dict(model.term_weights)  # type: ignore[arg-type]
        self.parameters = [p for p in model.parameters() if p.requires_grad]

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

    def __call__(self, microbatches: list[Any], step: int) -> dict[str, Tensor]:
        """Do step number `step` (from 0). Returns device scalars: `loss` (this rank's share), `grad_norm`."""
        rate = learning_rate(step, optim=self.optim, steps_per_epoch=self.steps_per_epoch)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        # Not kept and zeroed: DDP divides gradients that already lie in its buckets, and multiplies others by
        # 1/world_size, which rounds otherwise; a first step would differ from the same one in mid-run.
        self.optimizer.zero_grad(set_to_none=True)
        losses = []
        for index, microbatch in enumerate(microbatches):
            last = index == len(microbatches) - 1
            accumulates = isinstance(self.replica, DistributedDataParallel) and not last
            with self.replica.no_sync() if accumulates else nullcontext():  # type: ignore[operator]
                loss = self.loss(self.replica, microbatch)
                loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        norm = clip_gradients(self.parameters, self.optim.clip_norm)
        self.optimizer.step()
        if self.ema is not None:
            self.ema.update()
        return {"loss": torch.stack(losses).sum() / self.world_size, "grad_norm": norm}
