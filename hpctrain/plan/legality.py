"""What may be combined. Each choice is proven by a test or refused here, with the reason."""

from __future__ import annotations

from hpctrain.config.hardware import find_hardware
from hpctrain.config.schema import (
    Checkpointing,
    ClusterKind,
    Config,
    DecoderConfig,
    Device,
    GpuRequest,
    GradientCompression,
    ImageDataConfig,
    Precision,
    TokenDataConfig,
    VisionConfig,
)
from hpctrain.errors import ConfigError
from hpctrain.plan.decoder_legality import (
    choice_findings,
    decoder_layout_findings,
    model_findings,
    size_findings,
)
from hpctrain.plan.durations import parse_duration_s
from hpctrain.plan.layout import Layout

DATA_OF = {"vision": "images", "decoder": "tokens"}  # kind of model: kind of data that it reads


def layout_findings(config: Config, layout: Layout) -> list[str]:
    """What this model and these choices cannot do in this layout."""
    if isinstance(config.model, DecoderConfig):
        return decoder_layout_findings(config, config.model, layout)
    found = [
        f"parallelism.{axis}={degree}: a {config.model.kind} model is trained with dp_replicate only"
        for axis in ("pp", "dp_shard", "tp")
        if (degree := getattr(layout, axis)) > 1
    ]
    if layout.dp == 1 and config.optim.gradient_compression is not GradientCompression.none:
        found.append(
            f"optim.gradient_compression={config.optim.gradient_compression.name}: with one data-parallel "
            "rank no gradient crosses the network; use none"
        )
    return found


def combination_findings(config: Config) -> list[str]:
    """Choices that exclude each other, whatever the layout."""
    found = []
    model, cluster = config.model, config.cluster
    on_cpu = cluster.device is Device.cpu
    if isinstance(model, VisionConfig):
        found += _vision_findings(config, model)
    if isinstance(model, DecoderConfig):
        found += size_findings(model) or model_findings(model) + choice_findings(config, model)
    if (fitting := DATA_OF.get(model.kind)) and config.data.kind != fitting:
        found.append(f"data.kind={config.data.kind} with model.kind={model.kind}: it reads {fitting}")
    if config.optim.fp16_accumulation and config.optim.precision is not Precision.fp16:
        found.append(
            f"optim.fp16_accumulation=true with optim.precision={config.optim.precision.name}: "
            "only sums of fp16 products can be in fp16; use precision fp16, or false"
        )
    if on_cpu and config.optim.precision is Precision.bf16:
        found.append("optim.precision=bf16 on the CPU would be slower than fp32 and prove nothing; use fp32")
    try:
        find_hardware(cluster.hardware, cluster.figures)
    except ConfigError as error:
        found.append(f"{error.asked}: {error.found}")
    if cluster.kind is ClusterKind.local and cluster.num_nodes != 1:
        found.append(
            f"cluster.num_nodes={cluster.num_nodes} with cluster.kind=local: this machine is one node; use 1"
        )
    asks_for_gpus = cluster.gpu_request is not GpuRequest.none or cluster.exclusive
    if cluster.kind is ClusterKind.slurm and not on_cpu and not asks_for_gpus:
        found.append(
            "cluster.device=cuda with cluster.gpu_request=none: the GPUs would be other people's; "
            "use gres or gpus_per_node, or cluster.exclusive=true where Slurm knows of no GPUs"
        )
    limit_min, lead_s = cluster.time_limit_min, cluster.signal_lead_s
    if limit_min is not None and limit_min * 60 <= lead_s:
        found.append(
            f"cluster.signal_lead_s={lead_s} is not shorter than cluster.time_limit_min={limit_min}: "
            "the run would be told to stop as it starts"
        )
    return found


def _vision_findings(config: Config, model: VisionConfig) -> list[str]:
    found = []
    if len(model.image_size) != 2 or min(model.image_size) < 1:
        found.append(f"model.image_size={model.image_size}: two positive numbers, height and width")
    if model.identity_weight <= 0 and model.behaviour_weight <= 0:
        found.append("model.identity_weight and model.behaviour_weight are both 0: nothing would be learnt")
    if not 0 < model.sample_rate <= 1:
        found.append(f"model.sample_rate={model.sample_rate}: above 0, at most 1")
    elif model.sample_rate < 1 and not model.class_parallel:
        found.append(
            f"model.sample_rate={model.sample_rate} with model.class_parallel=false: a whole head takes all "
            "identities; use 1.0, or class_parallel=true"
        )
    if config.optim.precision is Precision.fp16:
        found.append("optim.precision=fp16: loss scaling is there for decoders only; use bf16")
    parallelism = config.parallelism
    decoders_only = {
        "sequence_parallel": parallelism.sequence_parallel,
        "stages_per_rank": parallelism.stages_per_rank if parallelism.stages_per_rank != 1 else None,
        "layers_per_stage": parallelism.layers_per_stage,
        "checkpointing": parallelism.checkpointing is not Checkpointing.none
        and parallelism.checkpointing.name,
        "offload_optimizer": parallelism.offload_optimizer,
    }
    found += [
        f"parallelism.{key}={value}: for decoders only" for key, value in decoders_only.items() if value
    ]
    return found


def range_findings(config: Config) -> list[str]:
    """Single values that cannot be right."""
    positive = {
        "optim.num_epochs": config.optim.num_epochs,
        "optim.lr": config.optim.lr,
        "cluster.num_nodes": config.cluster.num_nodes,
        "cluster.ranks_per_node": config.cluster.ranks_per_node,
        "cluster.cpus_per_rank": config.cluster.cpus_per_rank,
        "checkpoint.keep_last": config.checkpoint.keep_last,
        "checkpoint.timeout_s": config.checkpoint.timeout_s,
        "log_every_steps": config.log_every_steps,
        "hang_timeout_s": config.hang_timeout_s,
        "data.block_samples": config.data.block_samples,
        "data.window_blocks": config.data.window_blocks,
        "data.prefetch": config.data.prefetch,
        "parallelism.bucket_mib": config.parallelism.bucket_mib,
        "budget.no_progress": config.budget.no_progress,
        "plan.hours_per_day": config.plan.hours_per_day,
        "plan.max_nodes": config.plan.max_nodes,
        "plan.image_megapixels": config.plan.image_megapixels,
    }
    not_negative = {
        "data.num_workers": config.data.num_workers,
        "checkpoint.every_steps": config.checkpoint.every_steps,
        "checkpoint.keep_every_steps": config.checkpoint.keep_every_steps,
        "eval_every_epochs": config.eval_every_epochs,
        "optim.warmup_epochs": config.optim.warmup_epochs,
        "optim.weight_decay": config.optim.weight_decay,
        "cluster.signal_lead_s": config.cluster.signal_lead_s,
        "plan.interruptions_per_day": config.plan.interruptions_per_day,
    }
    optional = {
        "optim.clip_norm": config.optim.clip_norm,
        "cluster.time_limit_min": config.cluster.time_limit_min,
        "cluster.mem_gib": config.cluster.mem_gib,
        "cluster.array_parallelism": config.cluster.array_parallelism,
        "plan.price_per_gpu_hour": config.plan.price_per_gpu_hour,
        "plan.num_samples": config.plan.num_samples,
        "plan.num_identities": config.plan.num_identities,
        "plan.num_tokens": config.plan.num_tokens,
        "plan.image_bytes": config.plan.image_bytes,
    }
    if isinstance(config.data, TokenDataConfig):
        positive["data.sequence_length"] = config.data.sequence_length
        not_negative["data.synthetic_documents"] = config.data.synthetic_documents
    positive |= {key: value for key, value in optional.items() if value is not None}
    found = [f"{key}={value}: must be positive" for key, value in positive.items() if value <= 0]
    found += [f"{key}={value}: must not be negative" for key, value in not_negative.items() if value < 0]
    steps = config.profile.steps
    if steps and not (len(steps) == 2 and 0 <= steps[0] < steps[1]):
        found.append(
            f"profile.steps={steps}: how many steps are done when recording begins and ends, such as [10,13]"
        )
    if config.deadline is not None and not parse_duration_s(config.deadline):
        found.append(f"deadline={config.deadline}: write 36h, 5d or 1d12h")
    if config.plan.hours_per_day > 24:
        found.append(f"plan.hours_per_day={config.plan.hours_per_day}: a day has 24")
    decay = config.optim.ema_decay
    if decay is not None and not 0 < decay < 1:
        found.append(f"optim.ema_decay={decay}: between 0 and 1")
    if isinstance(config.data, ImageDataConfig):
        scale = config.data.random_crop_min_scale
        if not 0 < scale <= 1:
            found.append(f"data.random_crop_min_scale={scale}: above 0, at most 1")
        if config.data.synthetic_identities < 0:
            found.append(
                f"data.synthetic_identities={config.data.synthetic_identities}: must not be negative"
            )
    return found
