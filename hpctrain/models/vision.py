"""Faces and behaviours: a timm backbone, an embedding, an identity head and a behaviour head.

Parameter names: `backbone.*` (timm's), `embedding.linear.*`, `embedding.norm.*`, `identity_head.weight`,
`behaviour_head.linear.*`.
Shapes: B samples, C channels, H height, W width, F backbone features, D embedding, K behaviours, N images.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpctrain.config.schema import ModelConfig, VisionConfig
from hpctrain.errors import ConfigError
from hpctrain.models.backbone import build_backbone, get_timm_config, load_pretrained, probe_num_features
from hpctrain.models.heads import BehaviourHead, IdentityHead
from hpctrain.models.metrics import evaluate_behaviours, evaluate_faces
from hpctrain.models.spec import Batch, DataFacts, Model, ModelSpec


class Embedding(nn.Module):
    """Features → Linear → BatchNorm, the embedding layer of ArcFace (Deng et al. 2019, §3.1)."""

    def __init__(self, num_features: int, embedding_dim: int, drop_rate: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(drop_rate)
        self.linear = nn.Linear(num_features, embedding_dim, bias=False)  # the norm has the bias
        self.norm = nn.BatchNorm1d(embedding_dim)

    def forward(self, feature_BF: Tensor) -> Tensor:
        """Return embeddings, shape (B, D), not normalised to length 1."""
        embedding_BD: Tensor = self.norm(self.linear(self.dropout(feature_BF)))
        return embedding_BD


class VisionModel(Model):
    """See the head of the file. Images come as uint8 and are normalised here, on the device."""

    mean_C11: Tensor
    std_C11: Tensor

    def __init__(self, config: VisionConfig, facts: DataFacts) -> None:
        super().__init__()
        num_features = probe_num_features(config)
        self.backbone = build_backbone(config)
        if config.pretrained is not None:
            load_pretrained(self.backbone, Path(config.pretrained))
        self.embedding = Embedding(num_features, config.embedding_dim, config.drop_rate)
        self.identity_head: IdentityHead | None = None
        self.behaviour_head: BehaviourHead | None = None
        self.term_weights: dict[str, float] = {}
        if facts.num_identities >= 2:
            self.identity_head = IdentityHead(
                config.embedding_dim,
                facts.num_identities,
                config.margin,
                config.margin_rad,
                config.margin_scale,
                class_parallel=config.class_parallel,
                sample_rate=config.sample_rate,
            )
            self.term_weights["identity"] = config.identity_weight
        if facts.behaviours:
            self.behaviour_head = BehaviourHead(config.embedding_dim, len(facts.behaviours))
            self.term_weights["behaviour"] = config.behaviour_weight
        for name, key in (("mean_C11", "mean"), ("std_C11", "std")):
            value_C11 = torch.tensor(get_timm_config(self.backbone)[key])[:, None, None]
            self.register_buffer(name, value_C11 * 255.0, persistent=False)  # images are 0 … 255

    def embed(self, image_BCHW: Tensor) -> Tensor:
        """Return embeddings of uint8 RGB images, shape (B, D), not normalised to length 1."""
        normal_BCHW = (image_BCHW.to(self.mean_C11.dtype) - self.mean_C11) / self.std_C11
        embedding_BD: Tensor = self.embedding(self.backbone(normal_BCHW))
        return embedding_BD

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Return the weighted loss sums `identity` and `behaviour`, as far as the data have them."""
        embedding_BD = self.embed(batch.image_BCHW)
        sums: dict[str, Tensor] = {}
        if self.identity_head is not None:
            sums["identity"] = self.identity_head(embedding_BD, batch.identity_B, batch.weight_B)
        if self.behaviour_head is not None:
            sums["behaviour"] = self.behaviour_head(
                embedding_BD, batch.behaviour_BK, batch.has_behaviour_B, batch.weight_B
            )
        return sums

    def eval_outputs(self, batch: Batch) -> dict[str, Tensor]:
        """Return embeddings of length 1 (at least fp32), behaviour logits, and the labels beside them."""
        embedding_BD = self.embed(batch.image_BCHW)
        wide = torch.promote_types(embedding_BD.dtype, torch.float32)
        outputs = {
            "embedding_BD": F.normalize(embedding_BD.to(wide)),
            "identity_B": batch.identity_B,
            "weight_B": batch.weight_B,
            "sample_id_B": batch.sample_id_B,
        }
        if self.behaviour_head is not None:
            outputs["behaviour_logits_BK"] = self.behaviour_head.logits(embedding_BD)
            outputs["behaviour_BK"] = batch.behaviour_BK
            outputs["has_behaviour_B"] = batch.has_behaviour_B
        return outputs

    def no_decay_names(self) -> set[str]:
        """Return the parameters that the backbone's authors do not decay."""
        get_names: Any = getattr(self.backbone, "no_weight_decay", set)
        return {f"backbone.{name}" for name in get_names()}


def build_vision(config: ModelConfig, facts: DataFacts) -> VisionModel:
    """Build the model with random heads.

    Raises:
        ConfigError: the backbone cannot be built, or the data have nothing to learn.
    """
    assert isinstance(config, VisionConfig)
    if facts.num_identities < 2 and not facts.behaviours:
        raise ConfigError(
            "a vision model learns identities or behaviours",
            found=f"the training data have {facts.num_identities} identities and no behaviours",
            change="pack data with at least two identities, or with behaviours",
        )
    return VisionModel(config, facts)


def evaluate_vision(outputs: dict[str, np.ndarray[Any, Any]]) -> dict[str, float]:
    """Return the metrics of `hpctrain.models.metrics` from gathered `eval_outputs`; padding is left out."""
    kept_N = np.flatnonzero(outputs["weight_B"] > 0)
    kept_N = kept_N[np.argsort(outputs["sample_id_B"][kept_N], kind="stable")]  # whatever the ranks' order
    result = evaluate_faces(outputs["embedding_BD"][kept_N], outputs["identity_B"][kept_N])
    if "behaviour_logits_BK" in outputs:
        labelled_N = kept_N[outputs["has_behaviour_B"][kept_N] > 0]
        logits_NK, label_NK = outputs["behaviour_logits_BK"], outputs["behaviour_BK"]
        result |= evaluate_behaviours(logits_NK[labelled_N], label_NK[labelled_N])
    return result


SPEC = ModelSpec("vision", evaluate_vision, build_vision, compiled_modules=("backbone",))
