"""The frozen plan of a run: what the config means in ranks and samples."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from hpctrain.config.schema import Config
from hpctrain.errors import PlanError
from hpctrain.plan.batch import BatchPlan, resolve_batch
from hpctrain.plan.layout import Layout, resolve_layout
from hpctrain.plan.legality import combination_findings, layout_findings, range_findings


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """Decided before submission, read by every rank, never changed."""

    world_size: int
    num_nodes: int
    ranks_per_node: int
    layout: Layout
    batch: BatchPlan

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> RunPlan:
        fields: dict[str, Any] = json.loads(text)
        fields["layout"] = Layout(**fields["layout"])
        fields["batch"] = BatchPlan(**fields["batch"])
        return cls(**fields)

    def lines(self) -> list[str]:
        """The plan for a terminal."""
        layout, batch = self.layout, self.batch
        degrees = " × ".join(
            f"{axis} {getattr(layout, axis)}" for axis in ("pp", "dp_replicate", "dp_shard", "tp")
        )
        filled = f" ({layout.filled} filled in)" if layout.filled else ""
        return [
            f"ranks   {self.num_nodes} nodes × {self.ranks_per_node} ranks a node = {self.world_size}",
            f"layout  {degrees}{filled}",
            f"batch   {batch.global_batch_size} samples a step = {layout.dp} data-parallel ranks × "
            f"{batch.num_microbatches} microbatches × {batch.microbatch_size}",
        ]


def make_plan(config: Config) -> RunPlan:
    """Check everything that can be checked without data; raise PlanError with all findings together."""
    cluster = config.cluster
    findings = range_findings(config) + combination_findings(config)
    layout = batch = None
    if cluster.num_nodes > 0 and cluster.ranks_per_node > 0:
        layout, found = resolve_layout(config.parallelism, cluster.num_nodes, cluster.ranks_per_node)
        findings += found
    if layout:
        findings += layout_findings(config, layout)
        batch, found = resolve_batch(
            config.optim.global_batch_size, config.parallelism.microbatch_size, layout.dp
        )
        findings += found
    if findings:
        raise PlanError("the plan refuses this run:" + "".join(f"\n  - {finding}" for finding in findings))
    assert layout is not None and batch is not None
    return RunPlan(
        world_size=layout.world_size,
        num_nodes=cluster.num_nodes,
        ranks_per_node=cluster.ranks_per_node,
        layout=layout,
        batch=batch,
    )
