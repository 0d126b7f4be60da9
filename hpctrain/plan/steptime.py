"""How long an optimizer step takes, and why: what `core` does, on a device with known figures.

Times of the stages come from `compute`, what travels from `collectives`, waiting from `bubble` (or, exactly,
from `schedule.simulate`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpctrain.config.hardware import Hardware
from hpctrain.config.schema import Config, DecoderConfig, TokenDataConfig, VisionConfig
from hpctrain.plan.batch import BatchPlan
from hpctrain.plan.bubble import pipeline_s
from hpctrain.plan.collectives import all_gather_s, all_reduce_s, axis_group, boundary_send_s
from hpctrain.plan.compute import EAGER, Kernels, Passes, Work, block_passes, head_passes, update_bytes
from hpctrain.plan.costs import (
    adapter_parameters,
    block_parameters,
    embedding_parameters,
    stage_parameters,
)
from hpctrain.plan.hardware import peak_tflops
from hpctrain.plan.layout import Layout
from hpctrain.plan.schedule import make_schedule, simulate
from hpctrain.plan.stages import Stages

PARTS = ("compute", "recompute", "tp", "dp", "pp", "bubble", "optimizer", "offload")
NEEDED = (
    "matmul_efficiency",
    "attention_efficiency",
    "memory_gbps",
    "node_latency_us",
    "overlap",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Of one optimizer step."""

    seconds: float
    parts: dict[str, float]  #: seconds by cause (PARTS) at the slowest place; they sum to `seconds`
    forward_s: tuple[float, ...]  #: of each stage, for a microbatch, with what it waits for; as `simulate` takes
    backward_s: tuple[float, ...]
    send_s: float  #: of a message between stages


def predict_step(
    config: Config,
    layout: Layout,
    batch: BatchPlan,
    stages: Stages,
    hardware: Hardware,
    *,
    exact: bool = False,
    kernels: Kernels = EAGER,
) -> StepTime | None:
    """The time of a step; None where the figures of the device or the costs of the model are not known.

    Args:
        stages: of a decoder; empty for other models.
        exact: simulate the pipeline's schedule; else a closed form, within 3 % of it, a hundred times faster.
        kernels: what a decoder's implementation moves; another one's for published measurements.
    """
    peak = peak_tflops(hardware, config.optim)
    if peak is None or any(figure not in hardware for figure in NEEDED):
        return None
    if isinstance(config.model, DecoderConfig):
        return _decoder_step(config, config.model, layout, batch, stages, hardware, peak, exact, kernels)
    if isinstance(config.model, VisionConfig):
        from hpctrain.plan.vision_time import vision_step

        return vision_step(config, config.model, layout, batch, hardware, peak)
    return None
