"""What may be combined. Each choice is proven by a test or refused here, with the reason."""

from __future__ import annotations

from hpctrain.config.schema import Config, Device, GradientCompression, Precision, VisionConfig
from hpctrain.plan.layout import Layout


def refusals(config: Config, layout: Layout) -> list[str]:
    """Every illegal combination of this config, as a sentence with its reason."""
    found = []
    for axis in ("pp", "dp_shard", "tp"):
        if getattr(layout, axis) > 1:
            found.append(
                f"parallelism.{axis}={getattr(layout, axis)}: a {config.model.kind} model is trained with dp_replicate only"
            )
    model, optim, on_cpu = config.model, config.optim, config.cluster.device is Device.cpu
    if isinstance(model, VisionConfig):
        if len(model.image_size) != 2 or min(model.image_size) < 1:
            found.append(f"model.image_size={model.image_size}: two positive numbers, height and width")
        if model.identity_weight <= 0 and model.behaviour_weight <= 0:
            found.append(
                "model.identity_weight and model.behaviour_weight are both 0: nothing would be learnt"
            )
    if on_cpu and optim.precision is Precision.bf16:
        found.append(
            "optim.precision=bf16 on the CPU: it would be slower than fp32 and prove nothing; use fp32"
        )
    if layout.dp == 1 and optim.gradient_compression is not GradientCompression.none:
        found.append("optim.gradient_compression needs more than one data-parallel rank")
    return found


def range_findings(config: Config) -> list[str]:
    """Single values that cannot be right."""
    found = []
    positive = {
        "optim.num_epochs": config.optim.num_epochs,
        "optim.lr": config.optim.lr,
        "cluster.num_nodes": config.cluster.num_nodes,
        "cluster.ranks_per_node": config.cluster.ranks_per_node,
        "cluster.cpus_per_rank": config.cluster.cpus_per_rank,
        "checkpoint.keep_last": config.checkpoint.keep_last,
        "log_every_steps": config.log_every_steps,
        "data.block_samples": config.data.block_samples,
        "data.window_blocks": config.data.window_blocks,
        "parallelism.bucket_mib": config.parallelism.bucket_mib,
    }
    found += [f"{key}={value}: must be positive" for key, value in positive.items() if value <= 0]
    not_negative = {
        "data.num_workers": config.data.num_workers,
        "checkpoint.every_steps": config.checkpoint.every_steps,
        "eval_every_epochs": config.eval_every_epochs,
        "optim.warmup_epochs": config.optim.warmup_epochs,
        "cluster.signal_lead_s": config.cluster.signal_lead_s,
    }
    found += [f"{key}={value}: must not be negative" for key, value in not_negative.items() if value < 0]
    limit = config.cluster.time_limit_min
    if limit is not None and limit * 60 <= config.cluster.signal_lead_s:
        found.append(
            f"cluster.signal_lead_s={config.cluster.signal_lead_s} is not shorter than cluster.time_limit_min={limit}: the run would be told to stop as it starts"
        )
    decay = config.optim.ema_decay
    if decay is not None and not 0 < decay < 1:
        found.append(f"optim.ema_decay={decay}: between 0 and 1")
    return found
