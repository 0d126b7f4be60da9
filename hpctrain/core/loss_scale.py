"""Dynamic loss scaling for fp16 (Micikevicius et al. 2018, §3.2), on the device alone.

Gradients below 2⁻²⁴ are zero in fp16, so the loss is multiplied by a power of two before backward. Where one
gradient overflows on any rank, no rank takes the step, and the scale halves.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hpctrain.core.clip import scale_gradients

INITIAL = 2.0**16
GROWTH_STEPS = 2000  # steps without overflow before the scale doubles


class LossScale:
    """The scale, and how many steps it has held. Both are part of a checkpoint."""

    def __init__(self, device: torch.device) -> None:
        self.scale = torch.full((), INITIAL, device=device)
        self.held_steps = torch.zeros((), dtype=torch.int32, device=device)
        self._overflow = torch.zeros((), device=device)

    def unscale(self, parameters: Sequence[nn.Parameter], norm: Tensor) -> Tensor:
        """Divide the gradients by the scale and return the norm of the result. `norm` is of all ranks, so all
        see the same overflow."""
        self._overflow.copy_(~torch.isfinite(norm))
        scale_gradients(parameters, 1.0 / self.scale)
        return norm / self.scale

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Update the parameters unless there was an overflow, then the scale. Needs a fused optimizer, which
        leaves everything alone where `found_inf` is 1."""
        optimizer.found_inf = self._overflow  # type: ignore[attr-defined]
        optimizer.step()
        torch._amp_update_scale_(self.scale, self.held_steps, self._overflow, 2.0, 0.5, GROWTH_STEPS)

    def state_dict(self) -> dict[str, Tensor]:
        return {"scale": self.scale, "held_steps": self.held_steps}
