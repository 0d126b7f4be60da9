"""When a run will be done, what it costs, and what it writes, as far as figures are known."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from hpctrain.config.hardware import Hardware
from hpctrain.config.schema import Config, DecoderConfig, OptimizerKind, TokenDataConfig, VisionConfig
from hpctrain.plan.backbones import backbone_costs
from hpctrain.plan.batch import BatchPlan
from hpctrain.plan.costs import trainable_parameters
from hpctrain.plan.durations import DAY_S, deadline_s
from hpctrain.plan.hardware import none_where_unknown
from hpctrain.plan.layout import Layout
from hpctrain.plan.stages import Stages
from hpctrain.plan.steptime import predict_step
from hpctrain.plan.supply import Supply, Workload, data_supply
from hpctrain.plan.uncertainty import Influence, Interval, propagate

SAVE_MEETING_S = 2.0  # folders, hashes and the ranks' agreement, whatever the size


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """The time side of a plan. Seconds; a total is time in which the nodes are ours."""

    step_s: Interval
    parts: dict[str, float]  #: seconds of a step by cause, of the expected one
    influences: tuple[Influence, ...]  #: figures whose ranges move the step, most influential first
    samples_per_step: int
    tokens_per_sample: int  #: 0 for images
    save_s: Interval
    checkpoint_bytes: int
    disk_bytes: int  #: all checkpoints that are kept, and one that is being written
    supply: Supply | None = None
    num_steps: int | None = None  #: None where nobody knows how many samples there are
    done_steps: int = 0  #: of them, by the last checkpoint
    total_s: Interval | None = None  #: of the steps that are left
    one_device_s: float | None = None  #: the same training on one device, where it fits
    is_assumed: bool = False  #: the number of samples is `plan.num_samples`, not counted in packed data
    deadline_s: float | None = None
    days: Interval | None = None  #: calendar days, with the hours a day that the nodes are ours
    cost: Interval | None = None  #: of all devices, in `currency`
    currency: str = ""
    signal_lead_s: float = 0.0  #: how long before its end a start is warned

    @property
    def samples_per_s(self) -> Interval:
        step = self.step_s
        return Interval(*(self.samples_per_step / seconds for seconds in (step.high, step.mid, step.low)))

    @property
    def elapsed_s(self) -> Interval | None:
        """By the calendar, which is what a deadline counts."""
        return self.days.scaled(DAY_S) if self.days else None

    @property
    def speed_up(self) -> float | None:
        if self.one_device_s is None or self.num_steps is None:
            return None
        return self.one_device_s / (self.num_steps * self.step_s.mid)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Forecast:
        intervals = ("step_s", "save_s", "total_s", "days", "cost")
        fields |= {name: Interval(**fields[name]) for name in intervals if fields[name] is not None}
        fields["influences"] = tuple(Influence(**each) for each in fields["influences"])
        fields["supply"] = Supply(**fields["supply"]) if fields["supply"] is not None else None
        return cls(**fields)


@none_where_unknown
def make_forecast(
    config: Config,
    layout: Layout,
    batch: BatchPlan,
    stages: Stages,
    hardware: Hardware,
    workload: Workload | None,
    done_steps: int = 0,
) -> Forecast | None:
    """Predict a run's time; None where the figures or the model's costs are not known."""
    parts = step_parts(config, layout, batch, stages, hardware, workload)
    if parts is None:
        return None

    def step_s(hardware: Hardware) -> float:
        found = step_parts(config, layout, batch, stages, hardware, workload)
        assert found is not None
        return sum(found.values())

    told, num_steps, total = config.plan, None, None
    size = checkpoint_bytes(config, workload.num_identities if workload else None)
    if workload is not None:
        steps = num_steps = config.optim.num_epochs * -(-workload.num_samples // batch.global_batch_size)
        left = max(0, steps - done_steps)
        total, _ = propagate(lambda figures: total_s(config, figures, size, left, step_s(figures)), hardware)
    step, influences = propagate(step_s, hardware)
    hours = total.scaled(1 / 3600) if total else None
    price = told.price_per_gpu_hour
    return Forecast(
        step_s=step,
        parts=parts,
        influences=influences[:4],
        samples_per_step=batch.global_batch_size,
        tokens_per_sample=config.data.sequence_length if isinstance(config.data, TokenDataConfig) else 0,
        save_s=propagate(lambda figures: save_s(size, figures), hardware)[0],
        checkpoint_bytes=size,
        disk_bytes=size * (_num_kept(config, num_steps) + 1),
        supply=data_supply(config.cluster, config.data, workload, hardware) if workload else None,
        num_steps=num_steps,
        done_steps=done_steps,
        total_s=total,
        one_device_s=_one_device_s(config, batch, hardware, num_steps, workload),
        is_assumed=workload is not None and not workload.is_packed,
        deadline_s=deadline_s(config),
        days=hours.scaled(1 / told.hours_per_day) if hours else None,
        cost=hours.scaled(price * layout.world_size) if hours and price is not None else None,
        currency=told.currency,
        signal_lead_s=config.cluster.signal_lead_s,
    )


def step_parts(
    config: Config,
    layout: Layout,
    batch: BatchPlan,
    stages: Stages,
    hardware: Hardware,
    workload: Workload | None,
) -> dict[str, float] | None:
    """Seconds of a step by cause, waiting for data included."""
    identities = workload.num_identities if workload else None
    step = predict_step(config, layout, batch, stages, hardware, num_identities=identities)
    if step is None:
        return None
    supply = data_supply(config.cluster, config.data, workload, hardware) if workload else None
    waiting = 0.0
    if supply is not None and supply.rate is not None:
        hidden = step.seconds if config.data.num_workers else 0.0
        waiting = max(0.0, batch.global_batch_size / supply.rate - hidden)
    return {**step.parts, "data": waiting}


def checkpoint_bytes(config: Config, num_identities: int | None = None) -> int:
    """Of a checkpoint: what is trained, in fp32, with the optimizer's states and the averaged weights.

    Args:
        num_identities: of training images; without it their head is left out.
    """
    model, states = config.model, 3 if config.optim.kind is OptimizerKind.adamw else 2
    if isinstance(model, DecoderConfig):
        return 4 * states * trainable_parameters(model)
    costs = backbone_costs(model) if isinstance(model, VisionConfig) else None
    if costs is None:
        return 0
    assert isinstance(model, VisionConfig)
    head = (costs.num_features + (num_identities or 0)) * model.embedding_dim
    return 4 * (states + (config.optim.ema_decay is not None)) * (costs.parameters + head)


def save_s(size_bytes: int, hardware: Hardware) -> float:
    """Time of a save; a load takes the same."""
    return SAVE_MEETING_S + size_bytes / (hardware["write_gbps"] * 1e9)


def total_s(config: Config, hardware: Hardware, size_bytes: int, num_steps: int, step_s: float) -> float:
    """Training, saves, and starts after interruptions and time limits; evaluation is left out.

    An interruption costs the way back into the cluster, a load, and a save; where a save takes longer than
    the warning, instead of it the half of a checkpoint interval, which is done again.
    """
    save, every = save_s(size_bytes, hardware), config.checkpoint.every_steps
    limit_min = config.cluster.time_limit_min
    training = num_steps * step_s + (num_steps / every if every else 1) * save
    per_s = config.plan.interruptions_per_day / DAY_S
    if limit_min is not None:
        per_s += 1 / (limit_min * 60)
    again = save if save <= config.cluster.signal_lead_s else every * step_s / 2
    lost = min(0.9, per_s * (hardware["requeue_s"] + save + again))
    return training / (1 - lost)


def _num_kept(config: Config, num_steps: int | None) -> int:
    keep = config.checkpoint
    forever = num_steps // keep.keep_every_steps if num_steps and keep.keep_every_steps else 0
    return keep.keep_last + forever


def _one_device_s(
    config: Config, batch: BatchPlan, hardware: Hardware, num_steps: int | None, workload: Workload | None
) -> float | None:
    """Training time on one device that has its data in time; None for decoders, which do not fit one."""
    if num_steps is None or not isinstance(config.model, VisionConfig):
        return None
    alone = replace(batch, num_microbatches=-(-batch.global_batch_size // batch.microbatch_size))
    layout = Layout(pp=1, dp_replicate=1, dp_shard=1, tp=1)
    identities = workload.num_identities if workload else None
    step = predict_step(config, layout, alone, (), hardware, num_identities=identities)
    return None if step is None else num_steps * step.seconds
