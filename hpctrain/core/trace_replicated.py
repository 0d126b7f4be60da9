"""A traced step of a model that lies whole on every rank: DDP, shared-out identities, averaged weights."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import distributed

from hpctrain.config.schema import Config, GradientCompression, VisionConfig
from hpctrain.core import data_parallel, replicated
from hpctrain.core.class_parallel import apply_class_parallel
from hpctrain.core.optim import Ema, build_optimizer
from hpctrain.core.pretend import CudaAutocast, OnMeta, fill_with_fakes, pretended_ranks
from hpctrain.core.replicated import Replicated
from hpctrain.core.step import TrainStep
from hpctrain.core.sync_batchnorm import apply_sync_batchnorm
from hpctrain.core.tracker import Trace, Tracker
from hpctrain.data.batch import Batch
from hpctrain.models.registry import resolve_spec
from hpctrain.models.spec import DataFacts, make_parameter_groups
from hpctrain.plan.plan import RunPlan


def trace_replicated(config: Config, plan: RunPlan, facts: DataFacts) -> Trace:
    """Trace one step of rank 0."""
    compression, bucket_mib = config.optim.gradient_compression, config.parallelism.bucket_mib
    with pretended_ranks(0, plan.world_size), _ddp_of_fakes(compression, bucket_mib):
        fakes, tracker = FakeTensorMode(allow_non_fake_inputs=True), Tracker()
        parallel = _build(config, plan, facts, fakes)
        with fakes, CudaAutocast():
            microbatches = [_make_microbatch(config, plan, facts) for _ in range(plan.batch.num_microbatches)]
            step = _build_step(parallel, config)
            parallel.start(lambda: microbatches)
            step(microbatches, 0)  # makes optimizer states
            tracker.watch([*parallel.model.parameters(), *parallel.model.buffers()])
            tracker.watch([*step.optimizer.state.values(), *(step.ema.average.values() if step.ema else ())])
            tracker.watch([p.grad for p in parallel.model.parameters()])
            tracker.watch([vars(microbatch) for microbatch in microbatches])
            with tracker:
                step(microbatches, 1)
            calls = {("dp_replicate", kind): traffic for (_, kind), traffic in tracker.calls.items()}
            return Trace(peak_bytes=tracker.peak, state_bytes=tracker.alive(), collectives=calls)


def _build(config: Config, plan: RunPlan, facts: DataFacts, fakes: FakeTensorMode) -> Replicated:
    """As `core.build` does, but without weights."""
    spec = resolve_spec(config.model.kind)
    assert spec.build is not None
    model_config: Any = config.model
    if isinstance(model_config, VisionConfig):
        model_config = replace(model_config, pretrained=None)
    with OnMeta():
        model = spec.build(model_config, facts)
    ranks = init_device_mesh("cpu", (plan.world_size,))
    is_shared = isinstance(model_config, VisionConfig) and model_config.class_parallel
    with fakes:
        class_heads = apply_class_parallel(model, ranks) if is_shared else []
    fill_with_fakes(model, fakes)
    if isinstance(config.model, VisionConfig) and config.model.sync_batchnorm:
        apply_sync_batchnorm(model)
    device, bucket_mib = torch.device("cpu"), config.parallelism.bucket_mib
    return Replicated(model, config.optim, 0, plan.world_size, device, bucket_mib, class_heads)


def _build_step(parallel: Replicated, config: Config) -> TrainStep:
    optim = config.optim
    optimizer = build_optimizer(make_parameter_groups(parallel.model, optim.weight_decay), optim)
    ema = Ema(parallel.model, optim.ema_decay) if optim.ema_decay is not None else None
    return TrainStep(parallel, optimizer, ema=ema, optim=optim, steps_per_epoch=1)


def _make_microbatch(config: Config, plan: RunPlan, facts: DataFacts) -> Batch:
    assert isinstance(config.model, VisionConfig)
    size, (height, width) = plan.batch.microbatch_size, config.model.image_size
    return Batch(
        image_BCHW=torch.zeros(size, 3, height, width, dtype=torch.uint8),
        identity_B=torch.zeros(size, dtype=torch.int64),
        behaviour_BK=torch.zeros(size, len(facts.behaviours)),
        has_behaviour_B=torch.zeros(size),
        weight_B=torch.zeros(size),
        sample_id_B=torch.zeros(size, dtype=torch.int64),
        epoch=0,
        step=0,
        counts={"identity": 1.0, "behaviour": 1.0},
    )


@contextmanager
def _ddp_of_fakes(compression: GradientCompression, bucket_mib: int) -> Iterator[None]:
    """Let DDP take fakes. It reads numbers where it compares the ranks' parameters and where it orders its
    buckets anew after the first step: it begins with the buckets that it would have then, and keeps them.
    Gradients are added up through Python's process group."""
    apply = data_parallel.apply_data_parallel
    assign = dist._compute_bucket_assignment_by_size  # type: ignore[attr-defined]

    def apply_to_fakes(model: nn.Module, **options: Any) -> nn.Module:
        replica = apply(model, **options)
        if compression is GradientCompression.none:
            replica.register_comm_hook(None, allreduce_hook)
        replica.reducer = _FixedBuckets(replica.reducer)  # type: ignore[assignment]
        return replica

    def assign_as_in_backward(parameters: list[Any], limits: Any, sparse: list[bool]) -> Any:
        last = len(parameters) - 1
        buckets, limits = assign(parameters[::-1], [bucket_mib * 2**20], sparse[::-1])
        return [[last - index for index in bucket] for bucket in buckets[::-1]], limits[::-1]

    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides")
        for name in ("_verify_param_shape_across_processes", "_sync_module_states"):
            stack.enter_context(patch.object(distributed, name, lambda *args, **kwargs: None))
        stack.enter_context(patch.object(dist, "_compute_bucket_assignment_by_size", assign_as_in_backward))
        stack.enter_context(patch.object(replicated, "apply_data_parallel", apply_to_fakes))
        yield


class _FixedBuckets:
    """DDP's reducer, which keeps the buckets of its beginning."""

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def _rebuild_buckets(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)
