"""A small model with both losses, its batches, and its training step written out in plain PyTorch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpctrain.config.schema import GradientCompression, OptimConfig
from hpctrain.core.data_parallel import apply_data_parallel
from hpctrain.core.optim import Ema, build_optimizer
from hpctrain.core.replicated import Replicated
from hpctrain.core.step import TrainStep
from hpctrain.core.sync_batchnorm import apply_sync_batchnorm
from hpctrain.models.spec import Model, make_parameter_groups

IDENTITIES, BEHAVIOURS, PIXELS, WIDTH = 5, 3, 12, 8
TERM_WEIGHTS = {"identity": 1.0, "behaviour": 0.5}
OPTIM = OptimConfig(lr=0.02, num_epochs=2, warmup_epochs=0.5, clip_norm=0.05, weight_decay=0.1)
STEPS_PER_EPOCH = 4


@dataclass
class ToyBatch:
    image_BCHW: Tensor
    identity_B: Tensor
    behaviour_BK: Tensor
    has_behaviour_B: Tensor
    weight_B: Tensor
    sample_id_B: Tensor
    counts: dict[str, float]
    damaged: list[tuple[int, str]] = field(default_factory=list)

    def cut(self, index: Any) -> ToyBatch:
        """Some of the samples; the counts stay those of the global batch."""
        tensors = {name: value[index] for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **tensors)


class ToyModel(Model):
    """A backbone of pixels, and a linear head a term."""

    def __init__(self, backbone: nn.Module, width: int) -> None:
        super().__init__()
        self.term_weights = dict(TERM_WEIGHTS)
        self.backbone = backbone
        self.identity, self.behaviour = nn.Linear(width, IDENTITIES), nn.Linear(width, BEHAVIOURS)

    def logits(self, image_BCHW: Tensor) -> tuple[Tensor, Tensor]:
        image_BP = image_BCHW.flatten(1).to(self.identity.weight.dtype) / 128 - 1
        feature_BF = self.backbone(image_BP)
        return self.identity(feature_BF), self.behaviour(feature_BF)

    def forward(self, batch: Any) -> dict[str, Tensor]:
        identity_BC, behaviour_BK = self.logits(batch.image_BCHW)
        label_B = batch.identity_B.clamp(min=0)
        loss_B = F.cross_entropy(identity_BC, label_B, reduction="none")
        loss_BK = F.binary_cross_entropy_with_logits(
            behaviour_BK, batch.behaviour_BK.to(behaviour_BK.dtype), reduction="none"
        )
        return {
            "identity": (loss_B * batch.weight_B * (batch.identity_B >= 0)).sum(),
            "behaviour": (loss_BK.mean(1) * batch.weight_B * batch.has_behaviour_B).sum(),
        }

    def eval_outputs(self, batch: Any) -> dict[str, Tensor]:
        identity_BC, _ = self.logits(batch.image_BCHW)
        return {
            "logits_BC": identity_BC,
            "identity_B": batch.identity_B,
            "weight_B": batch.weight_B,
            "sample_id_B": batch.sample_id_B,
        }


def make_batch(step: int, size: int = 24, padding: int = 3) -> ToyBatch:
    """A global batch: some samples without identity, some without behaviours, padding at the end."""
    random = torch.Generator().manual_seed(1000 + step)
    identity_B = torch.randint(0, IDENTITIES, (size,), generator=random)
    identity_B[torch.rand(size, generator=random) < 0.3] = -1
    has_behaviour_B = (torch.rand(size, generator=random) < 0.6).float()
    weight_B = torch.ones(size)
    weight_B[size - padding :] = 0
    real_B = weight_B > 0
    return ToyBatch(
        image_BCHW=torch.randint(0, 256, (size, 3, 2, 2), dtype=torch.uint8, generator=random),
        identity_B=identity_B,
        behaviour_BK=torch.randint(0, 2, (size, BEHAVIOURS), generator=random).float(),
        has_behaviour_B=has_behaviour_B,
        weight_B=weight_B,
        sample_id_B=torch.arange(step * size, (step + 1) * size),
        counts={
            "identity": float((real_B & (identity_B >= 0)).sum()),
            "behaviour": float((real_B & (has_behaviour_B > 0)).sum()),
        },
    )


def microbatches_of(batch: ToyBatch, rank: int, world: int, num_microbatches: int) -> list[ToyBatch]:
    """A rank's share, a contiguous slice of the global batch, in microbatches."""
    share = len(batch.weight_B) // world
    size = share // num_microbatches
    starts = range(rank * share, (rank + 1) * share, size)
    return [batch.cut(slice(start, start + size)) for start in starts]


def build_toy(norm: str, *, width: int = WIDTH, depth: int = 1, drop_rate: float = 0.0) -> ToyModel:
    """Layers of Linear, norm, GELU, dropout. `norm`: layer, batch, sync."""
    torch.manual_seed(7)
    layers: list[nn.Module] = []
    for index in range(depth):
        layers.append(nn.Linear(width if index else PIXELS, width))
        layers.append(nn.LayerNorm(width) if norm == "layer" else nn.BatchNorm1d(width))
        layers += [nn.GELU(), nn.Dropout(drop_rate)]
    model = ToyModel(nn.Sequential(*layers), width)
    if norm == "sync":
        apply_sync_batchnorm(model)
    return model


def build_step(
    model: ToyModel,
    world: int,
    *,
    optim: OptimConfig = OPTIM,
    compression: GradientCompression = GradientCompression.none,
    bucket_mib: int = 25,
    settle_with: ToyBatch | None = None,
) -> TrainStep:
    """The step as `Training` puts it together."""
    optimizer = build_optimizer(make_parameter_groups(model, optim.weight_decay), optim)
    ema = Ema(model, optim.ema_decay) if optim.ema_decay else None
    optim = replace(optim, gradient_compression=compression)
    parallel = Replicated(model, optim, 0, world, torch.device("cpu"), bucket_mib)
    if settle_with is not None:
        parallel.start(lambda: [settle_with])
    elif world > 1:
        parallel.replica = apply_data_parallel(model, bucket_mib=bucket_mib, compression=compression)
    return TrainStep(parallel, optimizer, ema=ema, optim=optim, steps_per_epoch=STEPS_PER_EPOCH)


def train_plainly(model: ToyModel, batches: list[ToyBatch], groups: list[Tensor]) -> list[dict[str, Any]]:
    """AdamW on whole global batches with mean losses, nothing of ours in it.

    Args:
        groups: the samples that go through the model, and so through its BatchNorm, together.
    """
    named = dict(model.named_parameters())
    decayed = [p for n, p in named.items() if p.ndim == 2]
    plain = [p for n, p in named.items() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}], lr=1.0
    )
    # Warm-up over half an epoch of 4 steps, then half a cosine over the other 6 of 8 steps.
    rates = [0.01, 0.02, *(0.02 * (1 + math.cos(math.pi * k / 6)) / 2 for k in range(6))]
    told = []
    for rate, batch in zip(rates, batches, strict=False):
        parts = [model.logits(batch.image_BCHW[group]) for group in groups]
        order = torch.cat(groups)
        identity_BC, behaviour_BK = (torch.cat(each) for each in zip(*parts, strict=True))
        real_B = batch.weight_B[order] > 0
        known_B = real_B & (batch.identity_B[order] >= 0)
        told_B = real_B & (batch.has_behaviour_B[order] > 0)
        identity_loss = F.cross_entropy(identity_BC[known_B], batch.identity_B[order][known_B])
        behaviour_loss = F.binary_cross_entropy_with_logits(
            behaviour_BK[told_B], batch.behaviour_BK[order][told_B].to(behaviour_BK.dtype)
        )
        loss = identity_loss + 0.5 * behaviour_loss
        optimizer.zero_grad()
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = rate
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        told.append(
            {
                "loss": float(loss.detach()),
                "grad_norm": float(norm),
                "grads": {n: p.grad.clone() for n, p in named.items()},
            }
        )
        optimizer.step()
        told[-1]["values"] = {n: v.clone() for n, v in model.state_dict().items()}
    return told
