"""The training step of bench/step.py as others write it: by hand, with Lightning Fabric, with Accelerate.

Each follows its documentation, with the DDP settings, the loss and the schedule of ours.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import accelerate
import lightning
import torch
from accelerate.utils import DataLoaderConfiguration, DistributedDataParallelKwargs
from lightning.fabric.strategies import DDPStrategy
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

WORLD = 2
LR, WEIGHT_DECAY, CLIP_NORM, EPOCHS, WARMUP_EPOCHS = 1e-3, 0.05, 5.0, 100, 1
DDP_SETTINGS: dict[str, Any] = {"gradient_as_bucket_view": True, "bucket_cap_mb": 25}
PLAIN, FABRIC, ACCELERATE = "hand-written", "Lightning Fabric", "Accelerate"

Step = Callable[[Any, int], None]  # a batch and the number of the step


def make_schedule(steps_per_epoch: int) -> Callable[[int], float]:
    """Share of the learning rate at a step: linear warm-up, then half a cosine."""
    warmup, total = WARMUP_EPOCHS * steps_per_epoch, EPOCHS * steps_per_epoch

    def share(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / (total - warmup)))

    return share


def global_loss(sums: dict[str, Tensor], batch: Any) -> Tensor:
    """Mean over the global batch; DDP averages over ranks."""
    return WORLD * sum((sums[term] / batch.counts[term] for term in sums), torch.zeros(()))


def build_plain(model: nn.Module, groups: list[dict[str, Any]], share: Callable[[int], float]) -> Step:
    optimizer = torch.optim.AdamW(groups, lr=LR, fused=True)
    replica = DistributedDataParallel(model, **DDP_SETTINGS)
    replica.broadcast_buffers = False

    def step(batch: Any, number: int) -> None:
        for group in optimizer.param_groups:
            group["lr"] = LR * share(number)
        optimizer.zero_grad()
        global_loss(replica(batch), batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()

    return step


def build_fabric(model: nn.Module, groups: list[dict[str, Any]], share: Callable[[int], float]) -> Step:
    strategy = DDPStrategy(process_group_backend="gloo", **DDP_SETTINGS)
    fabric = lightning.Fabric(accelerator="cpu", devices=WORLD, strategy=strategy)
    fabric.launch()
    replica, optimizer = fabric.setup(model, torch.optim.AdamW(groups, lr=LR, fused=True))
    replica._forward_module.broadcast_buffers = False
    scheduler = LambdaLR(optimizer, share)

    def step(batch: Any, number: int) -> None:
        optimizer.zero_grad()
        fabric.backward(global_loss(replica(batch), batch))
        fabric.clip_gradients(replica, optimizer, max_norm=CLIP_NORM)
        optimizer.step()
        scheduler.step()

    return step


def build_accelerate(model: nn.Module, groups: list[dict[str, Any]], share: Callable[[int], float]) -> Step:
    accelerator = accelerate.Accelerator(
        cpu=True,
        kwargs_handlers=[DistributedDataParallelKwargs(**DDP_SETTINGS)],
        dataloader_config=DataLoaderConfiguration(split_batches=True),  # the schedule counts global steps
    )
    plain = torch.optim.AdamW(groups, lr=LR, fused=True)
    replica, optimizer, scheduler = accelerator.prepare(model, plain, LambdaLR(plain, share))
    replica.broadcast_buffers = False

    def step(batch: Any, number: int) -> None:
        optimizer.zero_grad()
        accelerator.backward(global_loss(replica(batch), batch))
        accelerator.clip_grad_norm_(replica.parameters(), CLIP_NORM)
        optimizer.step()
        scheduler.step()

    return step


BUILDERS = {PLAIN: build_plain, FABRIC: build_fabric, ACCELERATE: build_accelerate}
