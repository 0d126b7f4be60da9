"""How long a step of a vision model takes under data parallelism.

DDP reduces gradients in buckets while the backward of the last microbatch goes on; the last bucket has
nothing left to hide behind.
"""

from __future__ import annotations

import math

from hpctrain.config.hardware import Hardware
from hpctrain.config.schema import Config, GradientCompression, VisionConfig
from hpctrain.plan.backbones import backbone_costs
from hpctrain.plan.batch import BatchPlan
from hpctrain.plan.collectives import all_gather_s, all_reduce_s, axis_group, reduce_scatter_s
from hpctrain.plan.compute import update_bytes
from hpctrain.plan.layout import Layout
from hpctrain.plan.supply import known_identities

FP32 = 4  # bytes
OPERATORS = 1000  # that forward and backward of a backbone start, about


def vision_parts(
    config: Config,
    model: VisionConfig,
    layout: Layout,
    batch: BatchPlan,
    hardware: Hardware,
    peak_flops: float,
    num_identities: int | None,
) -> dict[str, float] | None:
    """Seconds of a step by cause; None where the costs of the backbone are not known."""
    costs = backbone_costs(model)
    if costs is None:
        return None
    efficiency = hardware["transformer_efficiency" if costs.is_transformer else "convnet_efficiency"]
    images = batch.microbatch_size
    flops = 3.0 * costs.forward_flops * images
    launch_s = OPERATORS * (hardware.get("launch_us") or 0.0) * 1e-6
    backbone = max(flops / (peak_flops * efficiency), launch_s)
    centres = (known_identities(config.data, num_identities) or 0) * model.embedding_dim
    own_centres = centres / layout.dp if model.class_parallel else centres
    head = _identities_s(model, layout, images, own_centres, hardware)
    parts = {"compute": batch.num_microbatches * (backbone + head)}
    replicated = costs.parameters + (0.0 if model.class_parallel else centres)
    parts["dp"] = _reduction_s(config, layout, replicated, backbone * 2 / 3, hardware)
    if model.class_parallel:
        parts["classes"] = batch.num_microbatches * _class_parallel_s(config, model, layout, images, hardware)
    moved = update_bytes(config.optim, costs.parameters + own_centres)
    parts["optimizer"] = moved / (hardware["memory_gbps"] * 1e9)
    return parts


def _identities_s(
    model: VisionConfig, layout: Layout, images: int, centres: float, hardware: Hardware
) -> float:
    """The margin softmax of a microbatch, forward and backward, in fp32 (models/heads.py): three products,
    and the traffic of logits and of normalised centres. Class-parallel ranks see the samples of all.

    Args:
        centres: numbers of the identity centres of this rank.
    """
    peak, memory = hardware.get("fp32_tflops"), hardware["memory_gbps"] * 1e9
    if not centres or peak is None:
        return 0.0
    samples = images * layout.dp if model.class_parallel else images
    if model.class_parallel:
        centres *= model.sample_rate
    logits = samples * centres / model.embedding_dim
    flops = 2 * samples * centres / (peak * 1e12 * hardware["matmul_efficiency"])
    moved = FP32 * (samples * model.embedding_dim + centres + logits) / memory
    return (
        3 * math.hypot(flops, moved) + ((40 if model.class_parallel else 58) * logits + 32 * centres) / memory
    )


def _reduction_s(
    config: Config, layout: Layout, numbers: float, backward_s: float, hardware: Hardware
) -> float:
    """Seconds of the gradients' all-reduce that backward does not hide."""
    group = axis_group(layout, config.cluster, "dp_replicate")
    if group.size == 1:
        return 0.0
    element = 2 if config.optim.gradient_compression is GradientCompression.bf16 else FP32
    bucket = min(config.parallelism.bucket_mib * 2**20 / FP32, numbers)
    count = numbers / bucket
    whole = count * all_reduce_s(element * bucket, group, hardware)
    hidden = min(hardware["overlap"] * whole * (1 - 1 / max(1.0, count)), backward_s)
    return whole - hidden


def _class_parallel_s(
    config: Config, model: VisionConfig, layout: Layout, images: int, hardware: Hardware
) -> float:
    """Embeddings of all ranks are gathered and their gradients reduced, in fp32 (An et al. 2022); two sums
    and a maximum of a number a sample."""
    group = axis_group(layout, config.cluster, "dp_replicate")
    embeddings = FP32 * images * layout.dp * model.embedding_dim
    sums = 3 * all_reduce_s(FP32 * images * layout.dp, group, hardware)
    return all_gather_s(embeddings, group, hardware) + reduce_scatter_s(embeddings, group, hardware) + sums
