"""How long an optimizer step takes, and why: what `core` does, on a device with known figures.

Times of the stages come from `compute`, what travels from `collectives`, waiting from `bubble` (or, exactly,
from `schedule.simulate`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpctrain.config.hardware import Hardware, UnknownFigureError
from hpctrain.config.schema import Config, DecoderConfig, OptimConfig, VisionConfig
from hpctrain.plan.batch import BatchPlan
from hpctrain.plan.bubble import pipeline_s
from hpctrain.plan.collectives import boundary_send_s
from hpctrain.plan.compute import COMPILED, EAGER, Kernels
from hpctrain.plan.decoder_time import DecoderCosts, make_decoder_costs
from hpctrain.plan.hardware import none_where_unknown, peak_figure
from hpctrain.plan.layout import Layout
from hpctrain.plan.schedule import make_schedule, simulate
from hpctrain.plan.stages import Stages
from hpctrain.plan.vision_time import vision_parts

PARTS = ("compute", "recompute", "tp", "dp", "classes", "pp", "bubble", "optimizer", "offload")
NEEDED = ("matmul_efficiency", "attention_efficiency", "memory_gbps", "launch_us")  # whatever the layout


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Of one optimizer step."""

    seconds: float
    parts: dict[str, float]  #: seconds by cause (PARTS) at the slowest place; they sum to `seconds`
    forward_s: tuple[
        float, ...
    ]  #: of each stage, for a microbatch, with what it waits for; as `simulate` takes
    backward_s: tuple[float, ...]
    send_s: float  #: of a message between stages


@none_where_unknown
def predict_step(
    config: Config,
    layout: Layout,
    batch: BatchPlan,
    stages: Stages,
    hardware: Hardware,
    *,
    exact: bool = False,
    kernels: Kernels | None = None,
    num_identities: int | None = None,
) -> StepTime | None:
    """The time of a step; None where the figures of the device or the costs of the model are not known.

    Args:
        stages: of a decoder; empty for other models.
        exact: simulate the pipeline's schedule; else a closed form (see `bubble`).
        num_identities: of a vision model's training images; without it their head is left out.
        kernels: what a decoder's implementation moves; None for ours.
    """
    peak = hardware[peak_figure(config.optim)]
    for figure in NEEDED:
        if figure not in hardware:
            raise UnknownFigureError(figure)
    if isinstance(config.model, DecoderConfig):
        kernels = kernels or (COMPILED if config.parallelism.compile else EAGER)
        costs = make_decoder_costs(
            config,
            config.model,
            layout,
            batch,
            hardware,
            product_flops(hardware, config.optim, peak),
            kernels,
        )
        return _decoder_step(config, layout, batch, stages, costs, exact)
    if isinstance(config.model, VisionConfig):
        parts = vision_parts(config, config.model, layout, batch, hardware, peak * 1e12, num_identities)
        return None if parts is None else _undivided(parts, batch.num_microbatches)
    return None


def product_flops(hardware: Hardware, optim: OptimConfig, peak: float) -> float:
    """Operations a second that large products reach, of a peak in TFLOP/s."""
    efficiency = hardware["matmul_efficiency"]
    if optim.fp16_accumulation:
        efficiency = hardware.get("fp16_accumulation_efficiency") or efficiency
    return peak * 1e12 * efficiency


def _undivided(parts: dict[str, float], num_microbatches: int) -> StepTime:
    """Of a model that is not cut into stages."""
    microbatch = parts["compute"] / num_microbatches
    return StepTime(
        seconds=sum(parts.values()),
        parts={part: parts.get(part, 0.0) for part in PARTS},
        forward_s=(microbatch / 3,),
        backward_s=(microbatch * 2 / 3,),
        send_s=0.0,
    )


def _decoder_step(
    config: Config,
    layout: Layout,
    batch: BatchPlan,
    stages: Stages,
    costs: DecoderCosts,
    exact: bool,
) -> StepTime:
    last = len(stages) - 1
    shapes = [(end - first, stage == 0, stage == last) for stage, (first, end) in enumerate(stages)]
    known = {shape: costs.stage(*shape) for shape in set(shapes)}  # most stages are alike
    times = [known[shape] for shape in shapes]
    forward, backward = tuple(time.forward for time in times), tuple(time.backward for time in times)
    count, pp = batch.num_microbatches, layout.pp
    send = boundary_send_s(costs.hidden_bytes, layout, config.cluster, costs.hardware)
    length, unsent = (
        _length_s(config, pp, count, forward, backward, seconds, exact) for seconds in (send, 0.0)
    )
    place = max(range(pp), key=lambda rank: sum(forward[rank::pp]) + sum(backward[rank::pp]))
    parts = dict.fromkeys(PARTS, 0.0)
    for time in times[place::pp]:
        for part, seconds in time.parts.items():
            parts[part] += count * seconds
    parts["bubble"] = max(0.0, unsent - count * (sum(forward[place::pp]) + sum(backward[place::pp])))
    parts["pp"] = length - unsent
    ranks = {
        (sum(end - first for first, end in stages[rank::pp]), rank == 0, rank == pp - 1): backward[rank]
        for rank in range(pp)
    }
    updates = [costs.update(*shape, last_backward) for shape, last_backward in ranks.items()]
    for part, seconds in max(updates, key=lambda update: sum(update.values())).items():
        parts[part] += seconds
    return StepTime(
        seconds=sum(parts.values()), parts=parts, forward_s=forward, backward_s=backward, send_s=send
    )


def _length_s(
    config: Config,
    pp: int,
    count: int,
    forward: Sequence[float],
    backward: Sequence[float],
    send: float,
    exact: bool,
) -> float:
    kind = config.parallelism.schedule
    if not exact or pp == 1:
        return pipeline_s(kind, pp, count, forward, backward, send)
    return simulate(make_schedule(kind, pp, len(forward) // pp, count), forward, backward, send).length_s
