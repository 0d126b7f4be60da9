"""How many nodes a deadline takes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from hpctrain.config.schema import Config, VisionConfig
from hpctrain.errors import ConfigError, PlanError
from hpctrain.plan.durations import deadline_s, duration_text
from hpctrain.plan.forecast import Forecast
from hpctrain.plan.hardware import hardware_of
from hpctrain.plan.layout import axes_text
from hpctrain.plan.plan import RunPlan, make_plan
from hpctrain.plan.search import Found, search
from hpctrain.plan.supply import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A run on so many nodes."""

    num_nodes: int
    plan: RunPlan | None  #: None where the plan refuses it
    refusal: str = ""

    @property
    def forecast(self) -> Forecast | None:
        return self.plan.forecast if self.plan else None

    def layout_text(self) -> str:
        return axes_text(self.plan.layout) if self.plan else ""

    def to_dict(self) -> dict[str, Any]:
        plan = json.loads(self.plan.to_json()) if self.plan else None
        return {"num_nodes": self.num_nodes, "refusal": self.refusal, "plan": plan}


def make_sizes(config: Config, workload: Workload | None, nodes: list[int]) -> list[Size]:
    """Plan the run on each of these numbers of nodes, with the layout of the config as far as it goes."""
    return [make_size(config, workload, count) for count in nodes]


def make_size(config: Config, workload: Workload | None, num_nodes: int) -> Size:
    """Plan the run on this number of nodes."""
    cluster = replace(config.cluster, num_nodes=num_nodes)
    # The question is how long it takes, whatever is allowed.
    given = replace(config, cluster=cluster, deadline=None)
    try:
        plan = make_plan(choose_layout(given, workload), workload)
    except PlanError as refusal:
        return Size(num_nodes=num_nodes, plan=None, refusal=_first_line(refusal))
    return Size(num_nodes=num_nodes, plan=plan)


def _first_line(refusal: PlanError) -> str:
    """The first finding, without what would change it."""
    said = str(refusal)
    return (said.partition("\n  - ")[2] or said).partition("\n")[0].partition("; ")[0]


def choose(config: Config, workload: Workload | None, refused: frozenset[str] = frozenset()) -> Config:
    """The config with what the planner was asked to choose: `cluster.num_nodes=-1`, the fewest that meet the
    deadline, and `parallelism.auto`, the fastest layout that fits.

    Raises PlanError: there is none.
    """
    if config.cluster.num_nodes == -1:
        config = replace(config, cluster=replace(config.cluster, num_nodes=_needed_nodes(config, workload)))
    return choose_layout(config, workload, refused)


def _needed_nodes(config: Config, workload: Workload | None) -> int:
    wanted, asked = deadline_s(config), "cluster.num_nodes=-1: the fewest nodes that meet the deadline"
    if wanted is None:
        raise PlanError(f"{asked}, but there is no deadline; add deadline=36h")
    sizes = sizes_up_to(config, workload, wanted)
    nodes = fewest_nodes(sizes, wanted)
    if nodes is None:
        known = [size for size in sizes if size.forecast and size.forecast.total_s]
        if not known:
            reason = sizes[-1].refusal if sizes else f"plan.max_nodes={config.plan.max_nodes}"
            raise PlanError(f"{asked}, but no time can be predicted: {reason or 'no figures'}")
        least = min(known, key=_expected_s)
        raise PlanError(
            f"{asked}, but the fastest of 1 to {config.plan.max_nodes} (plan.max_nodes) takes "
            f"{duration_text(_expected_s(least))} on {least.num_nodes}; a later deadline, or more nodes"
        )
    return nodes


def sizes_up_to(
    config: Config, workload: Workload | None, deadline_s: float, *, surely: bool = False
) -> list[Size]:
    """Plan the run on one node, two, …, until the deadline is met (surely: by the upper end of the range) or
    `plan.max_nodes` is reached."""
    sizes: list[Size] = []
    while len(sizes) < config.plan.max_nodes and fewest_nodes(sizes, deadline_s, surely=surely) is None:
        sizes.append(make_size(config, workload, len(sizes) + 1))
    return sizes


def _expected_s(size: Size) -> float:
    total = size.forecast.elapsed_s if size.forecast else None
    return total.mid if total else float("inf")


def _choose_microbatch(config: Config, workload: Workload | None, refused: frozenset[str]) -> Config:
    """Of a vision model whose microbatch is left open, the fastest that fits, where a rank's whole share does
    not."""
    if not isinstance(config.model, VisionConfig) or config.parallelism.microbatch_size is not None:
        return config
    try:
        plan = make_plan(replace(config, deadline=None, plan=replace(config.plan, force=False)), workload)
    except PlanError:
        plan = None
    if plan is not None and plan.point not in refused:
        return config
    try:
        best = find_layouts(config, workload, refused).best
    except ConfigError:  # no such hardware: the plan will say so
        return config
    return replace(config, parallelism=best.parallelism) if best else config


def find_layouts(config: Config, workload: Workload | None, refused: frozenset[str]) -> Found:
    """Search the layouts of the config's own cluster. Raises ConfigError."""
    num_identities = workload.num_identities if workload else None
    return search(config, hardware_of(config.cluster), refused, num_identities)


def choose_layout(
    config: Config, workload: Workload | None = None, refused: frozenset[str] = frozenset()
) -> Config:
    """The config with the fastest layout that fits where `parallelism.auto` asks for it, and with a smaller
    microbatch of a vision model where a rank's whole share does not fit.

    Raises PlanError: none fits.
    """
    if not config.parallelism.auto:
        return _choose_microbatch(config, workload, refused)
    found = find_layouts(config, workload, refused)
    if not found.num_tried:
        raise PlanError(
            f"parallelism.auto=true: no time can be predicted on {config.cluster.num_nodes} nodes; "
            f"cluster.hardware={config.cluster.hardware} has no figures (`hpctrain calibrate` measures "
            "them), the model's costs are not known (`hpctrain plan --trace` measures them), or "
            "optim.global_batch_size divides by no number of replicas"
        )
    if found.best is None:
        nearest = [f"\n  - {each.name()}: {found.reason(each)}" for each in found.others[:4]]
        raise PlanError(f"no layout of {config.cluster.num_nodes} nodes fits:" + "".join(nearest))
    return replace(config, parallelism=found.best.parallelism)


def fewest_nodes(sizes: Sequence[Size], deadline_s: float, *, surely: bool = False) -> int | None:
    """Smallest cluster whose expected time (or, surely, the upper end of its range) meets a deadline."""
    for size in sizes:
        total = size.forecast.elapsed_s if size.forecast else None
        if total is not None and (total.high if surely else total.mid) <= deadline_s:
            return size.num_nodes
    return None
