"""Optimizer, learning rate, averaged weights."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hpctrain.config.schema import OptimConfig, OptimizerKind
from hpctrain.core.clip import local_part


def build_optimizer(groups: list[dict[str, Any]], optim: OptimConfig) -> torch.optim.Optimizer:
    """AdamW or SGD over parameter groups; fused, but for SGD over pieces: torch has no such kernel."""
    # A fused kernel takes whole tensors or pieces, not both.
    groups = [
        {**group, "params": parameters}
        for group in groups
        for is_piece in (False, True)
        if (parameters := [p for p in group["params"] if isinstance(p, DTensor) is is_piece])
    ]
    if optim.kind is OptimizerKind.adamw:
        beta1, beta2 = optim.betas
        return torch.optim.AdamW(groups, lr=optim.lr, betas=(beta1, beta2), fused=True)
    in_pieces = any(isinstance(p, DTensor) for group in groups for p in group["params"])
    return torch.optim.SGD(
        groups,
        lr=optim.lr,
        momentum=optim.momentum,
        nesterov=optim.momentum > 0,
        fused=not in_pieces,
        foreach=in_pieces,
    )


def learning_rate(step: int, *, optim: OptimConfig, steps_per_epoch: int) -> float:
    """Learning rate of the step with this index (from 0): linear warm-up to `lr`, then half a cosine.

    A function of the step alone, so that it needs no state. SGDR's cosine without restarts
    (Loshchilov & Hutter 2017, eq. 5).
    """
    total = optim.num_epochs * steps_per_epoch
    warmup = min(round(optim.warmup_epochs * steps_per_epoch), total)
    if step < warmup:
        return optim.lr * (step + 1) / warmup
    share = (step - warmup) / max(1, total - warmup)
    low = optim.lr * optim.final_lr_ratio
    return low + (optim.lr - low) * 0.5 * (1.0 + math.cos(math.pi * min(1.0, share)))


class Ema:
    """Exponential moving average of the trained parameters and of the floating-point buffers (running
    statistics belong to the weights that made them), beside them in their own precision."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        kept = model.state_dict(keep_vars=True)  # without constants that no checkpoint holds
        self.values = {
            name: value
            for name, value in kept.items()
            if value.is_floating_point() and (value.requires_grad or not isinstance(value, nn.Parameter))
        }
        self.average = {name: value.detach().clone() for name, value in self.values.items()}

    def update(self) -> None:
        """After an optimizer step: average += (1 - decay) · (value - average)."""
        with torch.no_grad():
            averages = [local_part(average) for average in self.average.values()]
            values = [local_part(value) for value in self.values.values()]
            torch._foreach_lerp_(averages, values, 1.0 - self.decay)

    def swap(self) -> None:
        """Exchange averages and values: once before an evaluation, once after it."""
        with torch.no_grad():
            for name, value in self.values.items():
                kept = value.detach().clone()
                value.copy_(self.average[name])
                self.average[name].copy_(kept)
