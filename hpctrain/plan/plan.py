"""The frozen plan of a run: what the config means in ranks and samples."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hpctrain.config.schema import Config, DecoderConfig, VisionConfig
from hpctrain.errors import PlanError
from hpctrain.plan.backbones import backbone_costs
from hpctrain.plan.batch import BatchPlan, resolve_batch
from hpctrain.plan.decoder_legality import batch_findings, can_be_cut
from hpctrain.plan.fit import fit
from hpctrain.plan.forecast import Forecast, make_forecast
from hpctrain.plan.forecast_text import forecast_lines, time_findings
from hpctrain.plan.hardware import hardware_of, peak_tflops
from hpctrain.plan.layout import Layout, resolve_layout
from hpctrain.plan.legality import combination_findings, layout_findings, range_findings
from hpctrain.plan.memory import GIB, RankMemory, fullest
from hpctrain.plan.placement import placement_findings, placement_notes
from hpctrain.plan.points import memory_point
from hpctrain.plan.stages import Stages, stage_findings
from hpctrain.plan.supply import Workload, known_identities


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """Decided before submission, read by every rank, never changed."""

    world_size: int
    num_nodes: int
    ranks_per_node: int
    layout: Layout
    batch: BatchPlan
    stages: Stages = ()  #: of a decoder: first block of each stage, and the one after its last
    memory: tuple[RankMemory, ...] = ()  #: what each place of the pipeline needs; empty where nobody knows
    memory_note: str = ""  #: what that leaves out, and why it is empty
    usable_gib: float | None = None  #: memory of a device that a process can use
    peak_tflops: float | None = None  #: of a device at the run's precision
    places: tuple[str, ...] = ()  #: where the ranks of each axis sit, and warnings
    num_identities: int | None = None  #: of a vision model's training images, where it is known
    forecast: Forecast | None = None  #: None where the figures of the hardware are not known
    time_note: str = ""  #: why there is no forecast
    point: str = ""  #: what decides how much memory it takes (`memory_point`)
    warnings: tuple[str, ...] = ()  #: what `plan.force` let pass

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> RunPlan:
        fields: dict[str, Any] = json.loads(text)
        fields["layout"] = Layout(**fields["layout"])
        fields["batch"] = BatchPlan(**fields["batch"])
        fields["stages"] = tuple((first, end) for first, end in fields.get("stages", ()))
        fields["places"] = tuple(fields.get("places", ()))
        fields["memory"] = tuple(RankMemory(**rank) for rank in fields.get("memory", ()))
        fields["warnings"] = tuple(fields.get("warnings", ()))
        if fields.get("forecast") is not None:
            fields["forecast"] = Forecast.from_dict(fields["forecast"])
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
            *(f"{'places' if index == 0 else '':<8}{note}" for index, note in enumerate(self.places)),
            *self._stage_lines(),
            *self._memory_lines(),
            *(forecast_lines(self.forecast) if self.forecast else [f"time    {self.time_note}"]),
            *(f"forced  {warning}" for warning in self.warnings),
        ]

    def _stage_lines(self) -> list[str]:
        if not self.stages:
            return []
        pp, count = self.layout.pp, self.batch.num_microbatches
        bubble = (pp - 1) / (count * len(self.stages) // pp + pp - 1)
        return [
            f"stages  {' '.join(str(end - first) for first, end in self.stages)} blocks, "
            f"bubble {bubble:.1%} of a step"
        ]

    def _memory_lines(self) -> list[str]:
        if not self.memory:
            return [f"memory  unknown: {self.memory_note}"] if self.memory_note else []
        place = fullest(self.memory)
        limit = f" of {self.usable_gib}" if self.usable_gib else ""
        where = f" at pp={place}" if len(self.memory) > 1 else ""
        return [
            f"memory  {self.memory[place].total / GIB:.1f}{limit} GiB{where}: {self.memory[place].text()}",
            *([f"        {self.memory_note}"] if self.memory_note else []),
        ]


def make_plan(
    config: Config,
    workload: Workload | None = None,
    exhausted: Mapping[str, str] | None = None,
    *,
    done_steps: int = 0,
) -> RunPlan:
    """Check everything that can be checked without data; raise PlanError with all findings together.

    Args:
        workload: what an epoch reads; None where nobody knows.
        exhausted: points at which memory ran out before, and in which run.
        done_steps: of the run, which its next start goes on from.
    """
    cluster, model = config.cluster, config.model
    findings = range_findings(config) + combination_findings(config)
    layout = batch = None
    if cluster.num_nodes > 0 and cluster.ranks_per_node > 0:
        layout, found = resolve_layout(config.parallelism, cluster.num_nodes, cluster.ranks_per_node)
        findings += found
    if layout:
        findings += layout_findings(config, layout) + placement_findings(cluster, layout)
        batch, found = resolve_batch(
            config.optim.global_batch_size, config.parallelism.microbatch_size, layout.dp
        )
        findings += found
    if layout and batch and isinstance(model, DecoderConfig) and can_be_cut(config, model):
        findings += batch_findings(config, layout, batch)
        findings += stage_findings(model, config.parallelism, layout.pp)
    if findings:
        raise _refusal(findings)
    assert layout is not None and batch is not None
    num_identities = known_identities(config.data, workload.num_identities if workload else None)
    fitted = fit(config, layout, batch, num_identities)
    stages, doubts = fitted.stages, fitted.findings
    hardware, point = hardware_of(cluster), memory_point(config, layout, batch, num_identities)
    forecast = make_forecast(config, layout, batch, stages, hardware, workload, done_steps)
    if exhausted and point in exhausted:
        doubts.append(_exhausted_finding(config, exhausted[point]))
    doubts += time_findings(config, forecast)
    if doubts and not config.plan.force:
        raise _refusal([*doubts, "plan.force=true submits it all the same"])
    return RunPlan(
        world_size=layout.world_size,
        num_nodes=cluster.num_nodes,
        ranks_per_node=cluster.ranks_per_node,
        layout=layout,
        batch=batch,
        stages=stages,
        memory=fitted.memory,
        memory_note=fitted.note,
        usable_gib=hardware.get("usable_gib"),
        peak_tflops=peak_tflops(hardware, config.optim),
        places=tuple(placement_notes(cluster, layout)),
        num_identities=num_identities,
        forecast=forecast,
        time_note="" if forecast else _time_note(config),
        point=point,
        warnings=tuple(doubts),
    )


def _exhausted_finding(config: Config, run: str) -> str:
    decoder = " parallelism.checkpointing=full," if isinstance(config.model, DecoderConfig) else ""
    return (
        f"memory ran out with this model, layout and microbatch before, in run {run}; a "
        f"smaller parallelism.microbatch_size,{decoder} or more ranks; to try it again, remove its line "
        f"from out_of_memory.jsonl in {config.run_root}"
    )


def _time_note(config: Config) -> str:
    hardware, deadline = config.cluster.hardware, config.deadline
    what = f"cluster.hardware={hardware} lacks figures, which `hpctrain calibrate` measures"
    if isinstance(config.model, VisionConfig) and backbone_costs(config.model) is None:
        what = f"nobody has measured {config.model.backbone}: `hpctrain plan --trace` does"
    return f"not known: {what}" + (f"; deadline={deadline} cannot be judged" if deadline else "")


def _refusal(findings: list[str]) -> PlanError:
    return PlanError("the plan refuses this run:" + "".join(f"\n  - {finding}" for finding in findings))
