"""Pictures of a plan: memory by place and kind, data supply, layouts side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from xml.etree import ElementTree as ET

from hpctrain.plan.durations import span_text
from hpctrain.plan.forecast import Forecast
from hpctrain.plan.memory import GIB, RankMemory, fullest
from hpctrain.plan.plan import RunPlan
from hpctrain.plan.sizing import Size
from hpctrain.report.bars import Bar, Limit, Piece, draw_bars
from hpctrain.report.markup import UNKNOWN, Child, legend, picture, section, table, tag
from hpctrain.report.words import CAUSES, gib_text, seconds_text

KINDS = tuple(field.name for field in fields(RankMemory) if field.name != "host")  # on the device
KIND_WORDS = {
    "weights": "weights (shards)",
    "gradients": "gradients (shards)",
    "optimizer": "optimizer states",
    "activations": "activations kept for backward",
    "working": "working memory of a block or the logits",
    "gathered": "gathered weights and gradients",
    "averages": "averaged weights",
    "buffers": "buffers of communication",
    "slack": "the allocator's slack",
}


def memory_section(plan: RunPlan) -> ET.Element | None:
    """Memory of a rank at each place of the pipeline, by kind, against what there is."""
    if not plan.memory:
        return None
    bars = [_memory_bar(place, memory, plan) for place, memory in enumerate(plan.memory)]
    limits = [Limit(value=plan.usable_gib, text=f"usable {plan.usable_gib:g} GiB")] if plan.usable_gib else []
    most = fullest(plan.memory)
    used = [kind for kind in KINDS if any(getattr(memory, kind) for memory in plan.memory)]
    fullest_place = f"The fullest place is pp {most}" if plan.layout.pp > 1 else "Each rank"
    told = f"{fullest_place}: {plan.memory[most].text()} GiB."
    rows = [
        [
            f"pp {place}",
            *(f"{getattr(memory, kind) / GIB:.2f}" for kind in KINDS),
            f"{memory.total / GIB:.2f}",
        ]
        for place, memory in enumerate(plan.memory)
    ]
    return section(
        "Memory of a rank",
        legend((kind, KIND_WORDS.get(kind, kind)) for kind in used),
        picture(
            "memory",
            "Memory of a rank at each place of the pipeline, by kind",
            told,
            lambda width: draw_bars(width, bars, "memory, GiB", limits),
        ),
        tag("p", told, " At the worst moment of a step.", _host_text(plan.memory)),
        tag(
            "details",
            tag("summary", "in numbers"),
            table("GiB at each place", ["place", *KINDS, "total"], rows, *range(1, len(KINDS) + 2)),
        ),
    )


def _host_text(memory: Sequence[RankMemory]) -> str | None:
    most = max(rank.host for rank in memory)
    return f" In the node's memory it has up to {gib_text(most)} more." if most else None


def _gib_number(size: int) -> str:
    return f"{size / GIB:.1f}" if size > GIB else f"{size / GIB:.2g}"


def _sizes(memory: RankMemory) -> list[int]:
    return [getattr(memory, kind) for kind in KINDS]


def _memory_bar(place: int, memory: RankMemory, plan: RunPlan) -> Bar:
    pieces = []
    for kind, size in zip(KINDS, _sizes(memory), strict=True):
        text = f"pp {place}, {kind}: {size / GIB:.2f} GiB"
        pieces.append(Piece(class_=kind, value=size / GIB, text=text, count=size))
    blocks = sum(end - first for first, end in plan.stages[place :: plan.layout.pp])
    name = f"pp {place} ({blocks} blocks)" if plan.layout.pp > 1 else "each rank"
    return Bar(name=name, pieces=tuple(pieces), note=_gib_number(memory.total))


def supply_section(plan: RunPlan) -> ET.Element | None:
    """What the data must, and can, come in."""
    forecast = plan.forecast
    supply = forecast.supply if forecast else None
    if forecast is None or supply is None or supply.rate is None:
        return None
    what = "sequences" if forecast.tokens_per_sample else "images"
    needed = forecast.samples_per_step / sum(
        seconds for cause, seconds in forecast.parts.items() if cause != "data"
    )
    rates = {
        "needed to keep the devices busy": ("needed", needed),
        f"decoded by {supply.num_workers} workers": ("decode", supply.decode),
        "read from storage": ("storage", supply.storage),
    }
    bars = [
        Bar(name=name, pieces=(Piece(class_=class_, value=rate),), note=f"{rate:,.0f}/s")
        for name, (class_, rate) in rates.items()
        if rate is not None
    ]
    verdict = f"{supply.limit} is the limit" if supply.rate < needed else "enough"
    cached = f" {supply.cached:.0%} of the data stay in the nodes' memory." if supply.cached else ""
    told = f"The run needs {needed:,.0f} {what}/s and can have {supply.rate:,.0f}/s: {verdict}.{cached}"
    return section(
        "Data supply",
        picture(
            "supply",
            "Data needed and had",
            told,
            lambda width: draw_bars(width, bars, f"{what} a second"),
        ),
        tag("p", told),
    )


def comparison_section(plan: RunPlan | None, named: Sequence[tuple[str, Size]]) -> ET.Element | None:
    """Layouts side by side, the run's own first."""
    if not named:
        return None
    if plan is not None:
        named = [("this run", Size(num_nodes=plan.num_nodes, plan=plan)), *named]
    known = [(name, size, size.forecast) for name, size in named if size.forecast is not None]
    bars = [_step_bar(f"{name} ({size.layout_text()})", forecast) for name, size, forecast in known]
    used = [cause for cause in CAUSES if any(_matters(forecast, cause) for _, _, forecast in known)]
    told = "; ".join(f"{bar.name}: {bar.note} a step" for bar in bars)
    pictured = [
        legend((cause, CAUSES[cause]) for cause in used),
        picture(
            "named",
            "A step of each layout",
            told,
            lambda width: draw_bars(width, bars, "seconds a step"),
        ),
    ]
    rows = [_named_row(name, size) for name, size in named]
    columns = ["parallelism", "layout", "memory, GiB", "a step", "run", "why refused"]
    return section(
        "Layouts side by side",
        *(pictured if bars else []),
        table("the same run with each parallelism", columns, rows, 2, 3, 4),
    )


def _matters(forecast: Forecast, cause: str) -> bool:
    return forecast.parts.get(cause, 0.0) > 0.002 * sum(forecast.parts.values())


def _step_bar(name: str, forecast: Forecast) -> Bar:
    pieces = tuple(
        Piece(
            class_=cause, value=seconds, text=f"{name}, {CAUSES.get(cause, cause)}: {seconds_text(seconds)}"
        )
        for cause, seconds in forecast.parts.items()
    )
    return Bar(name=name, pieces=pieces, note=seconds_text(forecast.step_s.mid))


def _named_row(name: str, size: Size) -> list[Child]:
    plan, forecast = size.plan, size.forecast
    if plan is None:
        return [name, "refused", UNKNOWN, UNKNOWN, UNKNOWN, size.refusal]
    memory = f"{plan.memory[fullest(plan.memory)].total / GIB:.1f}" if plan.memory else UNKNOWN
    if forecast is None:
        return [name, size.layout_text(), memory, UNKNOWN, UNKNOWN, "no time known"]
    run = span_text(forecast.total_s) if forecast.total_s else UNKNOWN
    return [name, size.layout_text(), memory, f"{forecast.step_s.text()} s", run, ""]
