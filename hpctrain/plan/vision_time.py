"""How long a step of a vision model takes under data parallelism.

DDP reduces gradients in buckets while the backward of the last microbatch goes on; the last bucket has
nothing left to hide behind.
"""

from __future__ import annotations

from hpctrain.config.hardware import Hardware
from hpctrain.config.schema import Config, GradientCompression, ImageDataConfig, Precision, VisionConfig
from hpctrain.plan.backbones import backbone_costs
from hpctrain.plan.batch import BatchPlan
from hpctrain.plan.collectives import all_gather_s, all_reduce_s, axis_group, reduce_scatter_s
from hpctrain.plan.compute import update_bytes
from hpctrain.plan.layout import Layout

FP32 = 4  # bytes
OPERATORS = 1000  # that forward and backward of a backbone start, about


def vision_parts(
    config: Config,
    model: VisionConfig,
    layout: Layout,
    batch: BatchPlan,
    hardware: Hardware,
    peak_flops: float,
) -> dict[str, float] | None:
    """Seconds of a step by cause; None where the costs of the backbone are not known."""
    costs = backbone_costs(model)
    efficiency = None
    if costs is not None:
        kind = "transformer" if costs.is_transformer else "convnet"
        efficiency = hardware.get(f"{kind}_efficiency")
    if costs is None or efficiency is None:
        return None
    images = batch.microbatch_size
    flops = 3.0 * costs.forward_flops * images
    launch_s = OPERATORS * (hardware.get("launch_us") or 0.0) * 1e-6
    microbatch = max(flops / (peak_flops * efficiency), launch_s)
    parts = {"compute": batch.num_microbatches * microbatch}
    centres = _num_identities(config) * model.embedding_dim
    own_centres = centres / layout.dp if model.class_parallel else centres
    ddp = costs.parameters + (0.0 if model.class_parallel else centres)
    parts["dp"] = _reduction_s(config, layout, ddp, microbatch * 2 / 3, hardware)
    if model.class_parallel:
        parts["tp"] = batch.num_microbatches * _class_parallel_s(config, model, layout, images, hardware)
    moved = update_bytes(config.optim, costs.parameters + own_centres)
    parts["optimizer"] = moved / (hardware["memory_gbps"] * 1e9)
    return parts


def _num_identities(config: Config) -> int:
    """Known beforehand only of drawn faces; packed data tell it when they are read."""
    return config.data.synthetic_identities if isinstance(config.data, ImageDataConfig) else 0


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
    """Embeddings of all ranks are gathered, their gradients reduced (An et al. 2022); two sums and a maximum
    of a number a sample."""
    group = axis_group(layout, config.cluster, "dp_replicate")
    element = 2 if config.optim.precision is Precision.bf16 else FP32
    embeddings = element * images * layout.dp * model.embedding_dim
    sums = 3 * all_reduce_s(FP32 * images * layout.dp, group, hardware)
    return all_gather_s(embeddings, group, hardware) + reduce_scatter_s(embeddings, group, hardware) + sums
