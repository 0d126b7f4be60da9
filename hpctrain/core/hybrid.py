"""A decoder on the mesh (pp, dp_replicate, dp_shard, tp): what a step and an evaluation need of it.

The loss of a step is Σ weight · nll over the global batch / Σ weight, whatever the layout. FSDP averages
gradients over the data-parallel ranks, hence the factor `dp` on each rank's share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hpctrain.config.schema import Config
from hpctrain.core.fully_shard import COMPUTE_DTYPES
from hpctrain.core.parallelize import assemble, build_stages
from hpctrain.core.pipeline import Pipeline, build_neighbours
from hpctrain.core.rng import dropout_keys
from hpctrain.models.spec import StagedModel
from hpctrain.plan.costs import forward_flops
from hpctrain.plan.layout import AXES
from hpctrain.plan.plan import RunPlan
from hpctrain.plan.schedule import make_forward_schedule, make_schedule

set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout  # torch 2.13


class Hybrid:
    """This rank's stages, and how to run them."""

    def __init__(self, config: Config, plan: RunPlan, kind: StagedModel, device: torch.device) -> None:
        layout, parallelism = plan.layout, config.parallelism
        self.config, self.plan, self.device = config, plan, device
        timeout = timedelta(seconds=config.hang_timeout_s + 60)  # as of the world: longer than a hang
        self.axes = init_device_mesh(
            device.type, tuple(getattr(layout, axis) for axis in AXES), mesh_dim_names=AXES
        )
        for axis in AXES:
            set_timeout(timeout, self.axes[axis].get_group())
        self.num_stages = len(plan.stages)
        position, self.pp = self.axes["pp"].get_local_rank(), layout.pp
        own = {s: plan.stages[s] for s in range(self.num_stages) if s % layout.pp == position}
        layers = {s: range(first, end) for s, (first, end) in own.items()}
        self.stages = build_stages(config, kind, layers, self.num_stages, self.axes, device)
        self.model = assemble(self.stages)
        replica, shard = (self.axes[axis].get_local_rank() for axis in ("dp_replicate", "dp_shard"))
        self.dp_rank, self.dp = replica * layout.dp_shard + shard, layout.dp
        self.reads_for_replica = position == 0 and self.axes["tp"].get_local_rank() == 0
        self.eval_group = 8 * self.pp  # the pipeline runs empty once for so many batches
        self.has_head = self.num_stages - 1 in self.stages
        self._tied = self._find_tied(kind, timeout) if layout.pp > 1 else None
        shape = self._hidden_shape()
        dtype = COMPUTE_DTYPES.get(config.optim.precision) or torch.get_default_dtype()
        self.pipeline = Pipeline(
            self.stages,
            self.num_stages,
            build_neighbours(
                _pipelines(self.axes),
                dist.get_rank(),
                goes_round=parallelism.stages_per_rank > 1,
                timeout=timeout,
            ),
            lambda: torch.empty(shape, dtype=dtype, device=device),
            device,
        )
        self.schedule = make_schedule(
            parallelism.schedule, layout.pp, parallelism.stages_per_rank, plan.batch.num_microbatches
        )

    def start(self, first: Callable[[], Sequence[Any]]) -> None:
        """Open all connections, so that a broken link is found here. Collective over the world."""
        self.pipeline.connect()
        for axis in AXES:
            dist.all_reduce(torch.zeros(1, device=self.device), group=self.axes[axis].get_group())

    def counted_parameters(self) -> list[nn.Parameter]:
        """The trained parameters, a tied matrix only where the embedding is."""
        twice = self._tied[0] if self._tied is not None and self.has_head else None
        return [p for p in self.model.parameters() if p.requires_grad and p is not twice]

    def backward(self, microbatches: Sequence[Any], step: int, scale: Tensor | None = None) -> Tensor:
        """Add the gradients of a step; returns this rank's share of the loss, a device scalar. Collective.

        Args:
            scale: What the loss is multiplied by for backward, and so the gradients are.
        """
        count = max(1.0, microbatches[0].counts["nll"])
        factor: float | Tensor = self.plan.layout.dp / count
        if scale is not None:
            factor = scale * factor
        losses = self.pipeline.run(
            self.schedule,
            microbatches,
            lambda batch: self._inputs(batch, step),
            lambda nll_B: nll_B.sum() * factor,
            self._before_backward,
        )
        self._reduce_tied()
        if not losses:
            return torch.zeros((), device=self.device)
        total: Tensor = torch.stack([nll_B.sum() for nll_B in losses]).sum()
        return total.div(count * self.plan.layout.tp)

    @torch.no_grad()
    def eval_outputs(self, batches: Sequence[Any]) -> list[dict[str, Tensor]]:
        """Each sequence's loss sum and weight, on the ranks with the head, once; no dropout. Collective."""
        schedule = make_forward_schedule(self.pp, self.config.parallelism.stages_per_rank, len(batches))
        losses = self.pipeline.run(schedule, batches, lambda batch: batch.inputs(), lambda nll_B: nll_B)
        adds = bool(losses) and self.axes["tp"].get_local_rank() == 0
        return [
            {
                "nll_N": losses[i].double() if adds else torch.zeros(0, dtype=torch.float64),
                "weight_N": batch.weight_BL.sum(1).double()[: None if adds else 0],
            }
            for i, batch in enumerate(batches)
        ]

    def flops_per_sample(self, first: Callable[[], Sequence[Any]]) -> float:
        """By closed form. Frozen matrices need no gradient of their own: two products instead of three."""
        model: Any = self.config.model
        data: Any = self.config.data
        return (2.0 if model.lora.rank else 3.0) * forward_flops(model, data.sequence_length)

    def _before_backward(self, stage: nn.Module, is_last: bool) -> None:
        """Replicas add up their shards once a step."""
        if self.plan.layout.dp_replicate > 1:
            stage.set_requires_all_reduce(is_last)  # type: ignore[operator]

    def _inputs(self, batch: Any, step: int) -> dict[str, Tensor | None]:
        keys = dropout_keys(self.config.seed, step, batch.sample_id_B)
        return {**batch.inputs(), "dropout_key_B": keys}

    def _hidden_shape(self) -> tuple[int, int, int]:
        data: Any = self.config.data
        model: Any = self.config.model
        parts = self.plan.layout.tp if self.config.parallelism.sequence_parallel else 1
        return self.plan.batch.microbatch_size, data.sequence_length // parts, model.hidden_size

    def _find_tied(self, kind: StagedModel, timeout: timedelta) -> tuple[nn.Parameter | None, Any] | None:
        """The matrix that lies on the first and on the last stage, and the group of the two. Collective."""
        name = kind.tied_weight(self.config.model)
        if name is None:
            return None
        own = None
        for pipeline in _pipelines(self.axes):
            group = dist.new_group([pipeline[0], pipeline[-1]], timeout=timeout)
            own = group if dist.get_rank() in (pipeline[0], pipeline[-1]) else own
        return dict(self.model.named_parameters()).get(name), own

    def _reduce_tied(self) -> None:
        """Each of the two stages has the gradient of its own use of a tied matrix: both need the sum."""
        if self._tied is not None and self._tied[0] is not None and self._tied[0].grad is not None:
            gradient: Any = self._tied[0].grad
            dist.all_reduce(gradient.to_local(), group=self._tied[1])


def _pipelines(axes: DeviceMesh) -> list[list[int]]:
    """The global ranks of every pipeline, first stage first."""
    ranks: list[list[int]] = axes.mesh.reshape(axes["pp"].size(), -1).T.tolist()
    return ranks
