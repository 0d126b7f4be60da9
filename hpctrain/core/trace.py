"""A step of the real code on one rank of a cluster that is not there: its memory and its collectives.

Tensors are torch's fakes, which have shapes and no data, and the process group answers at once, so a stage of
a 32B model takes seconds on a login node. Counted are the bytes of what is alive, storage by storage: not the
allocator's rounding, nor what the driver and NCCL take. The kernels are the CPU's, whose RMS norm takes more
than a GPU's.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hpctrain.config.schema import Config, Precision, TokenDataConfig
from hpctrain.core.hybrid import Hybrid
from hpctrain.core.loss_scale import LossScale
from hpctrain.core.optim import build_optimizer
from hpctrain.core.step import TrainStep
from hpctrain.data.token_batch import TokenBatch
from hpctrain.errors import ConfigError
from hpctrain.models.registry import resolve_spec
from hpctrain.models.spec import ReadPiece, StagedModel, make_parameter_groups
from hpctrain.plan.layout import AXES
from hpctrain.plan.memory import most_in_flight
from hpctrain.plan.plan import RunPlan
from hpctrain.plan.schedule import make_schedule

_COUNTED = {
    # operator: kind, which argument is the whole tensor (None: the result), which one the group
    torch.ops.c10d.allreduce_.default: ("all_reduce", 0, 1),
    torch.ops.c10d._allgather_base_.default: ("all_gather", 0, 2),
    torch.ops.c10d._reduce_scatter_base_.default: ("reduce_scatter", 1, 2),
    torch.ops.c10d.send.default: ("send", 0, 1),
    torch.ops.c10d.recv_.default: ("recv", 0, 1),
    torch.ops._c10d_functional.all_reduce.default: ("all_reduce", 0, 2),
    torch.ops._c10d_functional.all_gather_into_tensor.default: ("all_gather", None, 2),
    torch.ops._c10d_functional.reduce_scatter_tensor.default: ("reduce_scatter", 0, 3),
}
_WAIT = torch.ops._c10d_functional.wait_tensor.default
# Fused updates work in place; fakes would take them apart and keep every intermediate result.
_UPDATES = {torch.ops.aten._fused_adamw_.default, torch.ops.aten._fused_sgd_.default}


@dataclass(frozen=True, slots=True)
class Traffic:
    """Collectives of one kind: how many, and the bytes of their whole tensors, which is what an all-gather
    makes and a reduce-scatter takes."""

    count: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """What one step does on a rank."""

    peak_bytes: int
    state_bytes: int  #: alive when it has ended: parameters, gradients, optimizer states
    #: by axis of the mesh (`world` for a group of all ranks) and kind: all_gather, reduce_scatter,
    #: all_reduce, send, recv
    collectives: dict[tuple[str, str], Traffic]


def trace_step(config: Config, plan: RunPlan, pp_rank: int) -> Trace:
    """Trace one step of the first rank at a place of the pipeline.

    A step repeats itself once as many microbatches are in flight as ever will be. So two steps are traced,
    one a little beyond this point and one that goes on a little; from there collectives go on in a straight
    line. Blocks are not compiled. Call it once in a process that has no process group: torch keeps meshes in
    caches beyond their groups.

    Raises:
        ConfigError: the optimizer is offloaded.
    """
    if config.parallelism.offload_optimizer:
        raise ConfigError(
            "a trace with parallelism.offload_optimizer=true",
            "fakes do not tell the host's memory from the device's",
            "trace without it, and take weights, gradients and optimizer states off",
        )
    lengths = _short_lengths(config, plan, pp_rank)
    with _pretended_ranks(pp_rank * plan.world_size // plan.layout.pp, plan.world_size):
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
    config = replace(config, parallelism=replace(config.parallelism, compile=False))
    staged = resolve_spec(config.model.kind).staged
    assert staged is not None
    fakes, tracker = FakeTensorMode(allow_non_fake_inputs=True), Tracker()
    # The mesh and the shards are made outside of the fakes, from which no number could be read.
    hybrid = Hybrid(config, plan, _with_fakes(staged, fakes), torch.device("cpu"))
    axes: dict[str, str] = {hybrid.axes.get_group(axis).group_name: axis for axis in AXES}
    axes[dist.distributed_c10d._get_default_group().group_name] = "world"
    calls = []
    with fakes:
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


@contextmanager
def _pretended_ranks(rank: int, world_size: int) -> Iterator[None]:
    """What is sent arrives at once: fakes never say so, and what is under way stays in memory."""
    send = dist.isend

    def isend(*args: Any, **kwargs: Any) -> _Arrived:
        send(*args, **kwargs)
        return _Arrived()

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        with patch.object(dist, "isend", isend):
            yield
    finally:
        dist.destroy_process_group()


class _Arrived:
    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        pass


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


class Tracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches, below autograd, which storages are alive and which collectives are called."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0  #: bytes
        self.calls: dict[tuple[str, str], Traffic] = {}  #: by group and kind
        self._storages: dict[int, tuple[Any, int]] = {}  # weak reference, bytes when last seen

    def watch(self, tree: Any) -> None:
        """Count what was there before."""
        for tensor in tree_leaves(tree):
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if isinstance(local, FakeTensor) and local.device.type != "meta":
                self._see(local.untyped_storage())

    def alive(self) -> int:
        """Bytes alive. FSDP empties storages and fills them again without an operator: so all are read."""
        for reference, _ in list(self._storages.values()):
            if (storage := reference()) is not None:
                self._see(storage)
        return self.now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes again as what it means on this rank
        result = None if func in _UPDATES else func(*args, **(kwargs or {}))
        if func in _COUNTED:
            self._count(func, args, result)
        else:
            assert func is _WAIT or func.namespace not in ("c10d", "_c10d_functional"), f"{func} is not known"
        self.watch((args, kwargs, result))
        if self.now > self.peak:
            self.peak = max(self.peak, self.alive())
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        reference, before = self._storages.get(key, (None, 0))
        if reference is None:
            reference = weakref.ref(storage, partial(self._forget, key))
        if size != before:
            self.now += size - before
        self._storages[key] = reference, size

    def _forget(self, key: int, reference: Any) -> None:
        self.now -= self._storages.pop(key)[1]

    def _count(self, func: Any, args: Any, result: Any) -> None:
        kind, whole, group = _COUNTED[func]
        name = args[group] if isinstance(args[group], str) else _unbox(args[group]).group_name
        known = self.calls.get((name, kind), Traffic(0, 0))
        size = sum(tensor.nbytes for tensor in tree_leaves(result if whole is None else args[whole]))
        self.calls[name, kind] = Traffic(known.count + 1, known.size_bytes + size)


def _unbox(group: Any) -> dist.ProcessGroup:
    return dist.ProcessGroup.unbox(group)
