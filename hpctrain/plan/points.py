"""What decides how much memory a run takes, as a short name: where memory ran out once, it will again."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from typing import Any

from hpctrain.config.schema import Config, TokenDataConfig
from hpctrain.plan.batch import BatchPlan
from hpctrain.plan.layout import AXES, Layout

_FREE = ("pretrained", "identity_weight", "behaviour_weight", "margin", "margin_rad", "margin_scale")


def memory_point(config: Config, layout: Layout, batch: BatchPlan, num_identities: int | None = None) -> str:
    """Twelve hex digits of the model, the layout and what goes with it, and the device."""
    parallelism, optim = config.parallelism, config.optim
    facts: dict[str, Any] = {
        "model": {key: value for key, value in asdict(config.model).items() if key not in _FREE},
        "layout": [getattr(layout, axis) for axis in AXES],
        "batch": [batch.microbatch_size, min(batch.num_microbatches, 2 * layout.pp)],
        "schedule": [parallelism.schedule, parallelism.stages_per_rank, parallelism.layers_per_stage],
        "switches": [
            parallelism.sequence_parallel,
            parallelism.reshard_after_forward,
            parallelism.checkpointing,
            parallelism.offload_optimizer,
            parallelism.compile,
        ],
        "length": config.data.sequence_length if isinstance(config.data, TokenDataConfig) else 0,
        "optim": [optim.kind, optim.precision, optim.ema_decay is not None, optim.gradient_compression],
        "identities": num_identities,
        "hardware": config.cluster.hardware,
        "allocator": config.cluster.env.get("PYTORCH_ALLOC_CONF"),
    }
    text = json.dumps(facts, sort_keys=True, default=lambda value: getattr(value, "name", str(value)))
    return hashlib.sha256(text.encode()).hexdigest()[:12]
