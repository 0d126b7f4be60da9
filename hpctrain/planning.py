"""The verb `plan`: the run as it is, other layouts, other numbers of nodes, and a page or a trace of it."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpctrain.config.compose import WITHOUT_DATA
from hpctrain.config.schema import ClusterKind, Config, VisionConfig
from hpctrain.errors import ConfigError, PlanError
from hpctrain.launch.inputs import check_model, data_lines, find_workload
from hpctrain.launch.submit import checked_plan, planned
from hpctrain.plan.durations import deadline_s
from hpctrain.plan.hardware import hardware_of
from hpctrain.plan.plan import RunPlan
from hpctrain.plan.search import Found
from hpctrain.plan.sizing import Size, fewest_nodes, find_layouts, make_size, make_sizes, sizes_up_to
from hpctrain.plan.supply import Workload
from hpctrain.report.plan_tables import comparison_table, layout_table, print_tables, size_table
from hpctrain.run.exhausted import find_out_of_memory


@dataclass(frozen=True, kw_only=True)
class Planned:
    """All that a plan page shows."""

    config: Config
    plan: RunPlan | None  #: None where the run is refused, and `plan.force` would not help
    found: Found | None  #: other layouts; None where no time can be predicted
    sizes: list[Size]  #: by number of nodes; empty where nothing depends on it
    named: list[tuple[str, Size]]  #: layouts side by side
    refusal: str = ""  #: why the run is refused


def plan_verb(config: Config, flags: Namespace, with_parallelism: Callable[[str], Config]) -> int:
    """Plan and show. Raises PlanError, after the tables that say what would do."""
    if flags.slurm and not flags.trace:
        raise ConfigError("--slurm without --trace", "only a trace is sent as a job", "plan --trace --slurm")
    if isinstance(config.model, VisionConfig):
        check_model(config.model)
    asked = replace(config, parallelism=replace(config.parallelism), cluster=replace(config.cluster))
    try:
        plan = planned(config) if Path(config.data.root).name == WITHOUT_DATA else checked_plan(config)
    except PlanError as refusal:
        found, sizes = _look(asked), _sizes(asked, None, everything=flags.html is not None)
        named = _compare(flags.compare, with_parallelism, max(1, asked.cluster.num_nodes))
        if not flags.json:
            print_tables(_tables(asked, found, sizes, named))
        if flags.html is not None:
            _write_refused(asked, found, sizes, named, str(refusal), Path(flags.html))
        raise
    sizes = _sizes(asked, plan, everything=flags.html is not None)
    named = _compare(flags.compare, with_parallelism, plan.num_nodes)
    asked.cluster.num_nodes = plan.num_nodes
    page = Planned(config=config, plan=plan, found=_look(asked), sizes=sizes, named=named)
    if flags.html is not None:
        from hpctrain.report.plan_page import write_page

        write_page(page, Path(flags.html))
    if flags.json and not flags.trace:  # whose own JSON follows
        print(json.dumps(_to_dict(page), indent=1))
    if not flags.json:
        print("\n".join(plan.lines() + data_lines(config)))
        if Path(config.data.root).name == WITHOUT_DATA:
            print("data    none given: data.root=FOLDER before it is submitted")
        print_tables(_tables(config, page.found, page.sizes, named))
        if flags.html is not None:
            print(f"\npage    {flags.html}")
    if flags.trace:
        from hpctrain.launch.trace import trace_report

        return trace_report(config, plan, as_json=flags.json, on_slurm=flags.slurm)
    return 0


def _write_refused(
    config: Config,
    found: Found | None,
    sizes: list[Size],
    named: list[tuple[str, Size]],
    refusal: str,
    path: Path,
) -> None:
    """The page of a run that is refused: the plan that `plan.force` would make, if any, and what would do."""
    from hpctrain.report.plan_page import write_page

    forced = replace(config, plan=replace(config.plan, force=True))
    plan = None
    with suppress(PlanError):
        plan = planned(forced)
    page = Planned(config=forced, plan=plan, found=found, sizes=sizes, named=named, refusal=refusal)
    write_page(page, path)


def _look(config: Config) -> Found | None:
    if config.cluster.num_nodes < 1 or not _has_figures(config):
        return None
    exhausted = frozenset(find_out_of_memory(Path(config.run_root)))
    found = find_layouts(config, find_workload(config), exhausted)
    return found if found.num_tried > 1 else None


def _has_figures(config: Config) -> bool:
    try:
        return bool(hardware_of(config.cluster).figures)
    except ConfigError:
        return False


def _sizes(config: Config, plan: RunPlan | None, *, everything: bool = False) -> list[Size]:
    """Up to the fewest that meet the deadline, one more, and twice as many; everything: for a curve."""
    wanted, workload, most = deadline_s(config), find_workload(config), config.plan.max_nodes
    is_known = plan.forecast is not None if plan else _has_figures(config)
    if not is_known or config.cluster.kind is ClusterKind.local or (wanted is None and not everything):
        return []
    if everything:
        return _curve(config, workload, plan.num_nodes if plan else max(1, config.cluster.num_nodes))
    assert wanted is not None
    if config.cluster.num_nodes == -1 and plan is not None:
        sizes = make_sizes(config, workload, [max(1, plan.num_nodes // 2), plan.num_nodes])
    else:
        sizes = sizes_up_to(config, workload, wanted, surely=not config.parallelism.auto)
    last = sizes[-1].num_nodes if sizes else 0
    more = {last + 1, 2 * last, config.cluster.num_nodes}
    return sizes + make_sizes(config, workload, sorted(n for n in more if last < n <= most))


def _curve(config: Config, workload: Workload | None, own: int) -> list[Size]:
    """The layout of the config on all numbers of nodes; where it fits hardly any, the best layout of half,
    the same, and twice as many."""
    most, sizes = config.plan.max_nodes, list[Size]()
    if not config.parallelism.auto:
        sizes = make_sizes(config, workload, list(range(1, most + 1)))
        if sum(size.plan is not None for size in sizes) > 2:
            return sizes
    free = replace(config, parallelism=replace(config.parallelism, auto=True))
    around = sorted({max(1, own // 2), own, 2 * own})
    kept = {size.num_nodes: size for size in sizes if size.plan is not None}
    return [
        kept.get(count) or make_size(free, workload, count) for count in around if count <= max(own, most)
    ]


def _compare(
    names: list[str], with_parallelism: Callable[[str], Config], num_nodes: int
) -> list[tuple[str, Size]]:
    configs = [(name, with_parallelism(name)) for name in names]
    return [(name, make_size(config, find_workload(config), num_nodes)) for name, config in configs]


def _tables(
    config: Config, found: Found | None, sizes: list[Size], named: list[tuple[str, Size]]
) -> list[Any]:
    tables = []
    if named:
        tables.append(comparison_table(named))
    if found is not None:
        tables.append(layout_table(found))
    wanted = deadline_s(config)
    if wanted is not None and any(size.plan is not None for size in sizes):
        needed = fewest_nodes(sizes, wanted) or sizes[-1].num_nodes
        surely = fewest_nodes(sizes, wanted, surely=True) or needed
        shown = {max(1, needed // 2), needed, needed + 1, surely, 2 * needed, config.cluster.num_nodes}
        tables.append(size_table(sizes, wanted, sorted(shown)))
    return tables


def _to_dict(page: Planned) -> dict[str, Any]:
    """The plan's own fields, and what was compared with it."""
    assert page.plan is not None
    fields: dict[str, Any] = json.loads(page.plan.to_json())
    fields["sizes"] = [size.to_dict() for size in page.sizes]
    fields["named"] = {name: size.to_dict() for name, size in page.named}
    if page.found is not None:
        fields["layouts"] = [
            {
                "layout": option.name(),
                "with": option.variant(),
                "memory_gib": option.memory_gib,
                "step_s": option.step.seconds,
                "fits": option.fits,
                "why_not": None if option is page.found.best else page.found.reason(option),
            }
            for option in ([page.found.best] if page.found.best else []) + list(page.found.others)
        ]
    return fields
