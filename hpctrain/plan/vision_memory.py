"""Device memory of a rank of a vision run, in closed form: every rank has the whole model.

What the core does is summed here: fp32 parameters, gradients in DDP's buckets, optimizer states, averages;
autocast's copies of weights; a backbone's activations from the table, and those of the identity head, which
many identities make the largest part. `core.trace` runs the real code to check it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hpctrain.config.schema import Config, GradientCompression, Precision, VisionConfig
from hpctrain.plan.backbones import BackboneCosts, backbone_costs
from hpctrain.plan.batch import BatchPlan
from hpctrain.plan.layout import Layout
from hpctrain.plan.memory import FP32, MIB, RankMemory, num_moments, with_overheads


@dataclass(frozen=True, slots=True, kw_only=True)
class IdentityMemory:
    """Of the identity head, bytes."""

    rows: int  #: this rank's centres, fp32
    sampled: int  #: those of them in a step's softmax
    logits: int  #: fp32, of this rank's centres and all samples that they see
    is_shared: bool

    @property
    def largest(self) -> int:
        """All of the head at its largest moment, beyond its states.

        A whole head makes logits, those with the margin, scaled ones and their softmax; one that is shared
        works in one buffer. At the end the gradient goes through the normalisation of the centres, in four
        steps as large as they are, and into a whole one that is added up; where only some were taken, theirs
        become a whole one.
        """
        if not self.is_shared:
            return max(4 * self.logits + self.rows, 5 * self.rows)
        if self.sampled == self.rows:
            return max(self.logits + self.rows, 4 * self.rows)
        return max(self.logits + self.sampled, self.rows + self.sampled, 4 * self.sampled)


def identity_memory(model: VisionConfig, layout: Layout, samples: int, identities: int) -> IdentityMemory:
    """What the identity head takes on a rank.

    Args:
        samples: of a microbatch.
    """
    ranks = layout.dp if model.class_parallel else 1
    own = -(-identities // ranks)
    seen = samples * ranks
    taken = min(own, max(math.ceil(model.sample_rate * own), seen)) if model.class_parallel else own
    return IdentityMemory(
        rows=FP32 * own * model.embedding_dim,
        sampled=FP32 * taken * model.embedding_dim,
        logits=FP32 * taken * seen,
        is_shared=model.class_parallel,
    )


def replicated_memory(
    config: Config, model: VisionConfig, layout: Layout, batch: BatchPlan, num_identities: int | None
) -> RankMemory | None:
    """Memory of each rank; None where nobody measured the backbone.

    Args:
        num_identities: of the training images; None where they are not known: then the head is left out.
    """
    costs = backbone_costs(model)
    if costs is None:
        return None
    bf16, samples = config.optim.precision is Precision.bf16, batch.microbatch_size
    head = identity_memory(model, layout, samples, num_identities or 0)
    embedding = (costs.num_features + 2) * model.embedding_dim
    parameters = FP32 * (costs.parameters + embedding) + head.rows
    # What microbatches add up lies beside DDP's buckets until the last one's backward.
    accumulates = layout.dp > 1 and batch.num_microbatches > 1
    beside = (parameters - head.rows * head.is_shared) * accumulates
    statistics = FP32 * (costs.buffers + 2 * model.embedding_dim)
    kept = samples * (costs.activation_bytes if bf16 else costs.activation_bytes_fp32)
    largest = samples * (costs.largest_bytes if bf16 else costs.largest_bytes_fp32)
    height, width = model.image_size
    images = batch.num_microbatches * samples * 3 * height * width
    memory = RankMemory(
        weights=parameters + statistics,
        gradients=parameters + beside,
        optimizer=num_moments(config.optim) * parameters,
        averages=(parameters + statistics) * (config.optim.ema_decay is not None),
        activations=kept + images + FP32 * samples * (costs.num_features + 3 * model.embedding_dim),
        working=max(largest, head.largest),
        gathered=_copies(config, costs, embedding, parameters, head),
    )
    return with_overheads(memory, config, layout)


def _copies(
    config: Config, costs: BackboneCosts, embedding: int, parameters: int, head: IdentityMemory
) -> int:
    """Autocast's bf16 copies of weights, and a bucket of gradients on its way in bf16."""
    copies = 2 * (costs.cast_parameters + embedding) * (config.optim.precision is Precision.bf16)
    if config.optim.gradient_compression is GradientCompression.none:
        return copies
    bucket = max(config.parallelism.bucket_mib * MIB, 0 if head.is_shared else head.rows)
    return copies + min(bucket, parameters) // 2
