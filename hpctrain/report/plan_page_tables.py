"""The tables of a plan page: numbers of nodes, other layouts, the figures behind it."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, Mapping, Sequence
from xml.etree import ElementTree as ET

from hpctrain.config.hardware import FIGURES, Figure, Hardware
from hpctrain.config.schema import Config
from hpctrain.plan.durations import duration_text, span_text
from hpctrain.plan.forecast import Forecast, make_forecast
from hpctrain.plan.layout import axes_text
from hpctrain.plan.options import Option
from hpctrain.plan.plan import RunPlan
from hpctrain.plan.search import Found
from hpctrain.plan.sizing import Size, fewest_nodes
from hpctrain.plan.supply import Workload
from hpctrain.plan.uncertainty import Influence
from hpctrain.report.curve import draw_curve, known_times
from hpctrain.report.markup import UNKNOWN, Child, legend, picture, rectangle, section, table, tag
from hpctrain.report.words import CAUSES, count_text, numbers_text, seconds_text, unit_of

SHOWN_LAYOUTS = 16  # the others are folded away


def size_section(sizes: Sequence[Size], deadline_s: float | None, own_nodes: int) -> ET.Element | None:
    """Time against the number of nodes."""
    known = known_times(sizes)
    if not known:
        return None
    told = "; ".join(f"{nodes} nodes: {span_text(time)}" for nodes, time in known)
    refused = [size for size in sizes if size.plan is None]
    rows = [_size_row(size, deadline_s) for size in sizes if size.forecast is not None]
    columns = ["nodes", "layout", "time", "cost", "in time"]
    entries = [("curve-swatch", "expected"), ("band-swatch", "likely range"), ("own-swatch", "this run")]
    if deadline_s is not None:
        entries.append(("limit-swatch", f"deadline {duration_text(deadline_s)}"))
    if refused:
        entries.append(("refused-swatch", "× refused"))
    pictured = [
        legend(entries),
        picture(
            "nodes",
            "Time of the run against the number of nodes",
            told,
            lambda width: draw_curve(width, sizes, deadline_s, own_nodes),
        ),
    ]
    return section(
        "Time against the number of nodes",
        *(pictured if len(known) > 1 else []),
        tag("p", _needed_text(sizes, deadline_s)) if deadline_s is not None else None,
        table("the run on so many nodes", columns, rows),
        tag(
            "p",
            f"Refused numbers of nodes: {numbers_text([size.num_nodes for size in refused])}. On "
            f"{refused[0].num_nodes}: {refused[0].refusal}.",
        )
        if refused
        else None,
    )


def _size_row(size: Size, deadline_s: float | None) -> list[Child]:
    forecast = size.forecast
    assert forecast is not None
    cost = f"{forecast.cost.text()} {forecast.currency}" if forecast.cost else UNKNOWN
    total, verdict = forecast.elapsed_s, ""
    if total is None:
        return [str(size.num_nodes), size.layout_text(), UNKNOWN, cost, ""]
    if deadline_s is not None:
        verdict = "✗ no"
        if total.mid <= deadline_s:
            verdict = "✓ yes" if total.high <= deadline_s else "✓ probably"
    return [str(size.num_nodes), size.layout_text(), span_text(total), cost, verdict]


def _needed_text(sizes: Sequence[Size], deadline_s: float) -> str:
    wanted = duration_text(deadline_s)
    probably, surely = fewest_nodes(sizes, deadline_s), fewest_nodes(sizes, deadline_s, surely=True)
    if probably is None:
        return f"No number of nodes up to {sizes[-1].num_nodes} (plan.max_nodes) meets {wanted}."
    fewest = f"The fewest that meet {wanted}: {count_text(probably, 'node')}"
    if surely == probably:
        return f"{fewest}, at worst too."
    return f"{fewest} probably, {surely if surely else 'none of these numbers'} at worst too."


def layout_section(plan: RunPlan | None, found: Found | None) -> ET.Element | None:
    """Other layouts, and why they are not taken."""
    if found is None:
        return None
    best, others = ([found.best] if found.best else []), list(found.others)
    columns = ["layout", "with", "memory, GiB", "a step", "where it goes", "why not"]
    used = [cause for cause in CAUSES if any(option.step.parts.get(cause) for option in best + others)]

    def rows(options: list[Option]) -> list[list[Child]]:
        return [_option_row(option, found, plan) for option in options]

    shown = (best + others)[:SHOWN_LAYOUTS]
    folded = (best + others)[SHOWN_LAYOUTS:]
    more = (
        tag(
            "details",
            tag("summary", f"{len(folded)} more"),
            table("slower ones, and those that do not fit", columns, rows(folded), 2, 3),
        )
        if folded
        else None
    )
    return section(
        "Other layouts",
        tag("p", f"{found.num_tried:,} combinations were tried; of each set of degrees the best is listed."),
        legend((cause, CAUSES[cause]) for cause in used),
        table("layouts, fastest first, those that fit before the others", columns, rows(shown), 2, 3),
        more,
    )


def _option_row(option: Option, found: Found, plan: RunPlan | None) -> list[Child]:
    memory = f"{option.memory_gib:.1f}" if option.memory_gib is not None else UNKNOWN
    is_best = option is found.best
    why = "✓ the fastest that fits" if is_best else found.reason(option)
    is_own = plan is not None and axes_text(plan.layout) == option.name()
    own = tag("span", " ● this run", class_="mark") if is_own else None
    name = tag("span", tag("strong" if is_best else "span", option.name()), own)
    return [name, option.variant(), memory, seconds_text(option.step.seconds), _parts_bar(option), why]


def _parts_bar(option: Option) -> ET.Element:
    """The shares of a step by cause, the width of a cell."""
    total, done, shapes = sum(option.step.parts.values()), 0.0, []
    for cause in CAUSES:
        share = 100 * option.step.parts.get(cause, 0.0) / total
        if share > 0:
            shapes.append(rectangle(done, 0, share, 10, cause))
            done += share
    told = ", ".join(
        f"{CAUSES[cause]} {seconds / total:.0%}"
        for cause, seconds in sorted(option.step.parts.items(), key=lambda part: -part[1])
        if seconds > 0.005 * total
    )
    return tag(
        "svg",
        tag("title", told),
        *shapes,
        class_="share",
        role="img",
        viewBox="0 0 100 10",
        preserveAspectRatio="none",
        xmlns="http://www.w3.org/2000/svg",
    )


def figure_section(config: Config, plan: RunPlan | None, hardware: Hardware) -> ET.Element | None:
    """Every figure, with its range, kind and source, those that move the step marked."""
    if not hardware.figures:
        return None
    used = used_figures(config, plan, hardware)
    forecast = plan.forecast if plan else None
    moved = {influence.figure: influence for influence in forecast.influences} if forecast else {}
    columns = ["figure", "value", "likely range", "kind", "source", "what it is"]

    def rows(names: list[str]) -> list[list[Child]]:
        names.sort(key=lambda name: -moved[name].share if name in moved else 0.0)
        return [_figure_row(name, hardware.figures[name], moved.get(name)) for name in names]

    behind = [name for name in hardware.figures if name in used]
    others = [name for name in hardware.figures if name not in used]
    caption = f"figures of {hardware.name} behind this plan"
    return section(
        "The figures behind it",
        tag(
            "p",
            "hpctrain calibrate measures those of your cluster; cluster.figures.NAME=VALUE replaces one. "
            "Those that move the step by their range are marked ▲, most influential first.",
        ),
        table(caption, columns, rows(behind), 1, 2) if behind else None,
        tag(
            "details",
            tag("summary", f"{len(others)} figures that this plan does not use"),
            table(f"other figures of {hardware.name}", columns, rows(others), 1, 2),
        )
        if others
        else None,
    )


def _figure_row(name: str, figure: Figure, influence: Influence | None) -> list[Child]:
    span = f"{figure.low:g}–{figure.high:g}" if figure.low < figure.high else UNKNOWN
    moves = f" ▲ moves the step by {influence.share:.0%}" if influence else None
    shown = tag("span", tag("code", name), tag("strong", moves) if moves else None)
    kind = figure.kind.replace("_", " ")
    return [shown, f"{figure.value:g}{unit_of(name)}", span, kind, figure.source, FIGURES.get(name, "")]


class _Recorder(Mapping[str, Figure]):
    """Figures that remember which of them were asked for."""

    def __init__(self, figures: Mapping[str, Figure]) -> None:
        self.figures, self.asked = figures, set[str]()

    def __getitem__(self, name: str) -> Figure:
        self.asked.add(name)
        return self.figures[name]

    def __contains__(self, name: object) -> bool:
        return name in self.figures

    def __iter__(self) -> Iterator[str]:
        return iter(self.figures)

    def __len__(self) -> int:
        return len(self.figures)

    def items(self) -> ItemsView[str, Figure]:
        return self.figures.items()


def used_figures(config: Config, plan: RunPlan | None, hardware: Hardware) -> set[str]:
    """Names of the figures that a plan's memory limit and times come from."""
    if plan is None:
        return set(hardware.figures)
    # Certain, so that a prediction does not go through their ranges.
    certain = {name: _certain(figure) for name, figure in hardware.figures.items()}
    recorder = _Recorder(certain)
    known: Forecast | None = plan.forecast
    workload = None
    if known and known.supply:
        workload = Workload(num_samples=1, sample_bytes=1.0, num_identities=plan.num_identities)
    make_forecast(config, plan.layout, plan.batch, plan.stages, Hardware(hardware.name, recorder), workload)
    return recorder.asked | ({"usable_gib"} if plan.memory else set())


def _certain(figure: Figure) -> Figure:
    return Figure(
        value=figure.value, low=figure.value, high=figure.value, kind=figure.kind, source=figure.source
    )
