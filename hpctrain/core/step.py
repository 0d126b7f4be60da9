"""One optimizer step: gradients over the microbatches, clip, update. No host synchronisation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hpctrain.config.schema import OptimConfig
from hpctrain.core.clip import gradient_norm, scale_gradients
from hpctrain.core.loss_scale import LossScale
from hpctrain.core.optim import Ema, learning_rate
from hpctrain.core.parallel import Parallel


class TrainStep:
    """Holds what a step needs, and does it."""

    def __init__(
        self,
        parallel: Parallel,
        optimizer: torch.optim.Optimizer,
        *,
        ema: Ema | None,
        optim: OptimConfig,
        steps_per_epoch: int,
        loss_scale: LossScale | None = None,
    ) -> None:
        self.parallel, self.optimizer, self.ema, self.optim = parallel, optimizer, ema, optim
        self.steps_per_epoch, self.loss_scale = steps_per_epoch, loss_scale
        self.parameters = [p for p in parallel.model.parameters() if p.requires_grad]
        self.counted = parallel.counted_parameters()

    def __call__(self, microbatches: list[Any], step: int) -> dict[str, Tensor]:
        """Do step number `step` (from 0). Returns device scalars: `loss` (this rank's share), `grad_norm`."""
        rate = learning_rate(step, optim=self.optim, steps_per_epoch=self.steps_per_epoch)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        # Not kept and zeroed: DDP divides gradients that already lie in its buckets, and multiplies others by
        # 1/world_size, which rounds otherwise; a first step would differ from the same one in mid-run.
        self.optimizer.zero_grad(set_to_none=True)
        scale = None if self.loss_scale is None else self.loss_scale.scale
        loss = self.parallel.backward(microbatches, step, scale)
        norm = gradient_norm(self.counted)
        if self.loss_scale is not None:
            norm = self.loss_scale.unscale(self.parameters, norm)
        if self.optim.clip_norm is not None:
            scale_gradients(self.parameters, torch.clamp(self.optim.clip_norm / (norm + 1e-6), max=1.0))
        if self.loss_scale is None:
            self.optimizer.step()
        else:
            self.loss_scale.step(self.optimizer)
        if self.ema is not None:
            self.ema.update()
        return {"loss": loss, "grad_norm": norm}
