"""A step of the real code on one rank of a cluster that is not there: its memory and its collectives.

Tensors are torch's fakes, which have shapes and no data, and the process group answers at once, so a stage of
a 32B model takes seconds on a login node. Counted are the bytes of what is alive, storage by storage: not the
allocator's rounding, nor what the driver and NCCL take.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from hpctrain.config.schema import Config, Precision, TokenDataConfig
from hpctrain.core.hybrid import Hybrid
from hpctrain.core.loss_scale import LossScale
from hpctrain.core.optim import build_optimizer
from hpctrain.core.pretend import CudaNorms, pretended_ranks
from hpctrain.core.step import TrainStep
from hpctrain.core.trace_replicated import trace_replicated
from hpctrain.core.tracker import Trace, Tracker, Traffic
from hpctrain.data.token_batch import TokenBatch
from hpctrain.errors import ConfigError
from hpctrain.models.registry import resolve_spec
from hpctrain.models.spec import DataFacts, ReadPiece, StagedModel, make_parameter_groups
from hpctrain.plan.decoder_memory import most_in_flight
from hpctrain.plan.layout import AXES
from hpctrain.plan.plan import RunPlan
from hpctrain.plan.schedule import make_schedule


def trace_step(config: Config, plan: RunPlan, place: int = 0, num_identities: int | None = None) -> Trace:
    """Trace one step of the first rank at a place of the pipeline.

    Blocks are not compiled. Call it once in a process that has no process group: torch keeps meshes in caches
    beyond their groups.

    Args:
        place: in the pipeline; 0 for a model that lies whole on every rank.
        num_identities: of the training images; None leaves the identity head out.

    Raises:
        ConfigError: the optimizer is offloaded, or the model cannot be built.
    """
    if config.parallelism.offload_optimizer:
        raise ConfigError(
            "a trace with parallelism.offload_optimizer=true",
            "fakes do not tell the host's memory from the device's",
            "trace without it, and take weights, gradients and optimizer states off",
        )
    config = replace(config, parallelism=replace(config.parallelism, compile=False))
    if resolve_spec(config.model.kind).staged is None:
        return trace_replicated(config, plan, DataFacts(num_identities or 0, ["behaviour"]))
    return trace_staged(config, plan, place)


def trace_staged(config: Config, plan: RunPlan, pp_rank: int) -> Trace:
    """Trace one step of the first rank at a place of the pipeline.

    A step repeats itself once as many microbatches are in flight as ever will be. So two steps are traced,
    one a little beyond this point and one that goes on a little; from there collectives go on in a straight
    line.
    """
    lengths = _short_lengths(config, plan, pp_rank)
    with pretended_ranks(pp_rank * plan.world_size // plan.layout.pp, plan.world_size):
        calls, peak, state = _trace_steps(config, plan, lengths)
    first, last = calls[0], calls[-1]
    times = (plan.batch.num_microbatches - lengths[-1]) // max(1, lengths[-1] - lengths[0])
    collectives = {key: _extend(first[key], traffic, times) for key, traffic in last.items()}
    return Trace(peak_bytes=peak, state_bytes=state, collectives=collectives)


def _trace_steps(
    config: Config, plan: RunPlan, lengths: Sequence[int]
) -> tuple[list[dict[tuple[str, str], Traffic]], int, int]:
    """Trace a step of each number of microbatches; returns their collectives by axis and kind, the most bytes
    that were alive, and those that still are."""
    staged = resolve_spec(config.model.kind).staged
    assert staged is not None
    fakes, tracker = FakeTensorMode(allow_non_fake_inputs=True), Tracker()
    # The mesh and the shards are made outside of the fakes, from which no number could be read.
    hybrid = Hybrid(config, plan, _with_fakes(staged, fakes), torch.device("cpu"))
    axes: dict[str, str] = {hybrid.axes.get_group(axis).group_name: axis for axis in AXES}
    axes[dist.distributed_c10d._get_default_group().group_name] = "world"
    calls = []
    with fakes, CudaNorms():
        step = _build_step(hybrid, config)
        # The first step makes optimizer states, and DTensor works with whole tensors to learn shapes.
        _run_step(step, hybrid, config, hybrid.pp if config.parallelism.stages_per_rank > 1 else 1)
        tracker.watch([*hybrid.model.parameters(), *step.optimizer.state.values()])
        with tracker:
            for length in lengths:
                tracker.calls = {}
                _run_step(step, hybrid, config, length)
                # The pipeline has groups of its own.
                calls.append({(axes.get(group, "pp"), kind): t for (group, kind), t in tracker.calls.items()})
        return calls, tracker.peak, tracker.alive()


def _extend(first: Traffic, last: Traffic, times: int) -> Traffic:
    return Traffic(
        last.count + times * (last.count - first.count),
        last.size_bytes + times * (last.size_bytes - first.size_bytes),
    )


def _short_lengths(config: Config, plan: RunPlan, pp_rank: int) -> tuple[int, ...]:
    """Numbers of microbatches to trace: two from which the whole step follows, or that of the whole step."""
    pp, per_rank, whole = plan.layout.pp, config.parallelism.stages_per_rank, plan.batch.num_microbatches
    blocks = {stage: end - first for stage, (first, end) in enumerate(plan.stages)}
    group = pp if per_rank > 1 else 1  # interleaved stages take turns group by group

    def in_flight(num_microbatches: int) -> int:
        schedule = make_schedule(config.parallelism.schedule, pp, per_rank, num_microbatches)
        return most_in_flight(schedule[pp_rank], blocks)

    most = in_flight(whole)
    filled = next(length for length in range(group, whole + group, group) if in_flight(length) == most)
    lengths = filled + group, filled + 2 * group  # what the last microbatch leaves behind meets the next one
    return lengths if lengths[1] < whole else (whole,)


def _with_fakes(staged: StagedModel, fakes: FakeTensorMode) -> StagedModel:
    """The kind of model, but for stages that are filled with fakes when they are filled."""

    def build_stage(*args: Any) -> nn.Module:
        stage = staged.build_stage(*args)

        def to_empty(**options: Any) -> nn.Module:
            with fakes:
                return nn.Module.to_empty(stage, **options)

        stage.to_empty = to_empty  # type: ignore[method-assign]
        return stage

    def initial_weights(*args: Any) -> ReadPiece:
        def read(name: str, shape: tuple[int, ...], piece: tuple[slice, ...], dtype: torch.dtype) -> Tensor:
            with fakes:
                return torch.empty([part.stop - part.start for part in piece], dtype=dtype)

        return read

    return replace(staged, build_stage=build_stage, initial_weights=initial_weights)


def _build_step(hybrid: Hybrid, config: Config) -> TrainStep:
    optim = config.optim
    optimizer = build_optimizer(make_parameter_groups(hybrid.model, optim.weight_decay), optim)
    loss_scale = LossScale(torch.device("cpu")) if optim.precision is Precision.fp16 else None
    return TrainStep(hybrid, optimizer, ema=None, optim=optim, steps_per_epoch=1, loss_scale=loss_scale)


def _run_step(step: TrainStep, hybrid: Hybrid, config: Config, length: int) -> None:
    """Do a step of the first microbatches; all of them lie in memory."""
    parallelism, whole = config.parallelism, hybrid.plan.batch.num_microbatches
    hybrid.schedule = make_schedule(parallelism.schedule, hybrid.pp, parallelism.stages_per_rank, length)
    microbatches = [_make_microbatch(config, hybrid.plan) for _ in range(whole)]
    step(microbatches[:length], 0)


def _make_microbatch(config: Config, plan: RunPlan) -> TokenBatch:
    assert isinstance(config.data, TokenDataConfig)
    shape = plan.batch.microbatch_size, config.data.sequence_length
    make = partial(torch.zeros, shape)
    return TokenBatch(
        token_BL=make(dtype=torch.int64),
        label_BL=make(dtype=torch.int64),
        weight_BL=make(dtype=torch.float32),
        position_BL=make(dtype=torch.int64),
        document_BL=make(dtype=torch.int32),
        sample_id_B=torch.zeros(shape[0], dtype=torch.int64),
        epoch=0,
        step=0,
        counts={"nll": 1.0},
    )
