"""A small face model with a margin head, whole or shared out, its step, and its loss in plain PyTorch.

Shapes: B samples, C identities, D embedding.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from hpctrain.config.schema import GradientCompression, Margin
from hpctrain.core.class_parallel import apply_class_parallel
from hpctrain.core.data_parallel import apply_data_parallel, settle_buckets
from hpctrain.models.heads import BehaviourHead, IdentityHead
from hpctrain.models.spec import Model
from tests.core.toy import BEHAVIOURS, PIXELS, ToyBatch, make_batch

C, D, SIZE, SCALE, MARGIN_RAD = 11, 6, 24, 16.0, 0.4
CLIP_NORM = 0.5


class FaceModel(Model):
    """Pixels → Linear → LayerNorm → both heads."""

    def __init__(self, margin: Margin, *, class_parallel: bool, sample_rate: float = 1.0) -> None:
        super().__init__()
        self.term_weights = {"identity": 1.0, "behaviour": 0.5}
        self.backbone = nn.Sequential(nn.Linear(PIXELS, D), nn.LayerNorm(D))
        self.identity_head = IdentityHead(
            D, C, margin, MARGIN_RAD, SCALE, class_parallel=class_parallel, sample_rate=sample_rate
        )
        self.behaviour_head = BehaviourHead(D, BEHAVIOURS)

    def embed(self, image_BCHW: Tensor) -> Tensor:
        embedding_BD: Tensor = self.backbone(image_BCHW.flatten(1).double() / 128 - 1)
        return embedding_BD

    def forward(self, batch: Any) -> dict[str, Tensor]:
        embedding_BD = self.embed(batch.image_BCHW)
        return {
            "identity": self.identity_head(embedding_BD, batch.identity_B, batch.weight_B),
            "behaviour": self.behaviour_head(
                embedding_BD, batch.behaviour_BK, batch.has_behaviour_B, batch.weight_B
            ),
        }

    def eval_outputs(self, batch: Any) -> dict[str, Tensor]:
        raise NotImplementedError


def build_model(margin: Margin = Margin.arcface, **choices: Any) -> FaceModel:
    torch.manual_seed(5)
    return FaceModel(margin, **{"class_parallel": False, **choices}).double()


def build_sharded(margin: Margin = Margin.arcface, sample_rate: float = 1.0) -> FaceModel:
    torch.manual_seed(5)
    model = FaceModel(margin, class_parallel=True, sample_rate=sample_rate)
    apply_class_parallel(model, whole_mesh())
    return model.double()


def whole_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def make_batches(count: int = 3) -> list[ToyBatch]:
    """Samples without identity, padding that has a label, a batch of which one rank owns all identities."""
    batches = [make_batch(step, SIZE) for step in range(count)]
    for step, batch in enumerate(batches):
        random = torch.Generator().manual_seed(step)
        label_B = torch.randint(0, 2 if step == 1 else C, (SIZE,), generator=random)
        batch.identity_B = torch.where(batch.identity_B >= 0, label_B, -1)
        batch.identity_B[-1] = 3
        known_B = (batch.identity_B >= 0) & (batch.weight_B > 0)
        batch.counts["identity"] = float(known_B.sum())
    return batches


class Trainer:
    """The step as `core.step` does it, without its learning rates."""

    def __init__(
        self, model: FaceModel, world: int, compression: GradientCompression = GradientCompression.none
    ) -> None:
        self.model, self.world = model, world
        self.replica: nn.Module = model
        sharded = [p for p in model.parameters() if isinstance(p, DTensor)]
        plain = [p for p in model.parameters() if not isinstance(p, DTensor)]
        groups = [{"params": params} for params in (sharded, plain) if params]  # no fused kernel takes both
        self.optimizer = torch.optim.AdamW(groups, lr=0.02, weight_decay=0.1, fused=True)
        self.compression = compression

    def replicate(self, batch: ToyBatch) -> None:
        if self.world > 1:
            replica = apply_data_parallel(self.model, bucket_mib=1, compression=self.compression)
            settle_buckets(replica, self.loss, batch)
            self.replica = replica

    def loss(self, replica: nn.Module, batch: ToyBatch) -> Tensor:
        sums = replica(batch)
        shares = [sums[term] * (w / batch.counts[term]) for term, w in self.model.term_weights.items()]
        return torch.stack(shares).sum() * self.world

    def backward(self, microbatches: list[ToyBatch]) -> float:
        """Leaves the gradients of the global loss, and returns it."""
        self.optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for index, microbatch in enumerate(microbatches):
            waits = self.world > 1 and index < len(microbatches) - 1
            with self.replica.no_sync() if waits else nullcontext():  # type: ignore[operator]
                loss = self.loss(self.replica, microbatch)
                loss.backward()
            total += loss.detach() / self.world
        dist.all_reduce(total)
        return float(total)

    def update(self) -> float:
        norm = math.sqrt(sum(float(whole(p.grad).square().sum()) for p in self.model.parameters()))
        for parameter in self.model.parameters():
            parameter.grad.mul_(min(1.0, CLIP_NORM / (norm + 1e-6)))  # torch's guard
        self.optimizer.step()
        return norm


def whole(value: Any) -> Tensor:
    full: Tensor = value.full_tensor() if isinstance(value, DTensor) else value
    return full.detach().clone()


def plain_identity_loss(
    x_BD: Tensor, centre_CD: Tensor, label_B: Tensor, margin: Margin, kept_C: Tensor | None = None
) -> Tensor:
    """Sum of losses, with angles, in the softmax over the identities `kept_C` (all by default)."""
    cos_BC = F.cosine_similarity(x_BD[:, None], centre_CD[None], dim=2)
    own_BC = F.one_hot(label_B, len(centre_CD)).bool()
    if margin is Margin.cosface:
        shifted_BC = cos_BC - MARGIN_RAD
    else:
        angle_BC = torch.acos(cos_BC)
        beyond_BC = angle_BC + MARGIN_RAD > math.pi
        line_BC = cos_BC - MARGIN_RAD * math.sin(MARGIN_RAD)
        shifted_BC = torch.where(beyond_BC, line_BC, torch.cos(angle_BC + MARGIN_RAD))
    logits_BC = SCALE * torch.where(own_BC, shifted_BC, cos_BC)
    if kept_C is not None:
        logits_BC = logits_BC.masked_fill(~kept_C, -math.inf)
    return F.cross_entropy(logits_BC, label_B, reduction="sum")


def plain_loss(model: FaceModel, batch: ToyBatch, margin: Margin, kept_C: Tensor | None = None) -> Tensor:
    """Both losses in plain PyTorch."""
    x_BD = model.embed(batch.image_BCHW)
    known_B = (batch.weight_B > 0) & (batch.identity_B >= 0)
    told_B = (batch.weight_B > 0) & (batch.has_behaviour_B > 0)
    identity = plain_identity_loss(
        x_BD[known_B], model.identity_head.weight, batch.identity_B[known_B], margin, kept_C
    )
    linear = model.behaviour_head.linear
    behaviour = F.binary_cross_entropy_with_logits(
        linear(x_BD)[told_B], batch.behaviour_BK[told_B].double(), reduction="sum"
    )
    counts = batch.counts
    return identity / counts["identity"] + 0.5 * behaviour / BEHAVIOURS / counts["behaviour"]


def train_plainly(margin: Margin, num_steps: int = 3) -> list[dict[str, Any]]:
    model = build_model(margin)
    optimizer, told = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1), []
    for batch in make_batches(num_steps):
        loss = plain_loss(model, batch, margin)
        optimizer.zero_grad()
        loss.backward()
        facts: dict[str, Any] = {"loss": float(loss.detach())}
        facts["grads"] = {n: p.grad.clone() for n, p in model.named_parameters()}
        facts["norm"] = float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM))
        optimizer.step()
        facts["values"] = {n: p.detach().clone() for n, p in model.named_parameters()}
        told.append(facts)
    return told
