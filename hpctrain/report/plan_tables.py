"""Tables of a plan for a terminal: other layouts, other numbers of nodes, layouts side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hpctrain.plan.durations import duration_text, span_text
from hpctrain.plan.memory import GIB, fullest
from hpctrain.plan.options import Option
from hpctrain.plan.search import Found
from hpctrain.plan.sizing import Size, fewest_nodes

if TYPE_CHECKING:
    from rich.table import Table

SHOWN = 10  # other layouts
UNKNOWN = "–"


def layout_table(found: Found) -> Table:
    """The best layout, and why the others are not."""
    table = _table(f"{found.num_tried} layouts tried", "layout", "with", "GiB", "s a step", "why not")
    if found.best is not None:
        table.add_row(*_option_cells(found.best), "the fastest that fits", style="bold")
    for option in found.others[:SHOWN]:
        table.add_row(*_option_cells(option), found.reason(option))
    if (left := len(found.others) - SHOWN) > 0:
        table.add_row(f"… {left} more", "", "", "", "")
    return table


def _option_cells(option: Option) -> tuple[str, str, str, str]:
    memory = f"{option.memory_gib:.1f}" if option.memory_gib is not None else UNKNOWN
    return option.name(), option.variant(), memory, f"{option.step.seconds:.3g}"


def size_table(sizes: Sequence[Size], deadline_s: float | None, shown: Sequence[int]) -> Table:
    """What each of these numbers of nodes would take."""
    title = "nodes"
    if deadline_s is not None:
        title = f"nodes for {duration_text(deadline_s)}: {_needed(sizes, deadline_s)}"
    table = _table(title, "nodes", "layout", "time", "cost", "")
    for size in sizes:
        if size.num_nodes not in shown:
            continue
        forecast = size.forecast
        if size.plan is None or forecast is None or forecast.total_s is None:
            table.add_row(str(size.num_nodes), UNKNOWN, UNKNOWN, UNKNOWN, size.refusal or "no time known")
            continue
        cost = f"{forecast.cost.text()} {forecast.currency}" if forecast.cost else UNKNOWN
        table.add_row(
            str(size.num_nodes),
            size.layout_text(),
            span_text(forecast.total_s),
            cost,
            _verdict(size, deadline_s),
        )
    return table


def _needed(sizes: Sequence[Size], deadline_s: float) -> str:
    probably, surely = fewest_nodes(sizes, deadline_s), fewest_nodes(sizes, deadline_s, surely=True)
    if probably is None:
        return f"more than {sizes[-1].num_nodes}"
    looked_at = {size.num_nodes for size in sizes}
    if surely in (None, probably) or not looked_at >= set(range(1, surely or 0)):
        return str(probably)
    return f"{probably} probably, {surely} surely"


def _verdict(size: Size, deadline_s: float | None) -> str:
    total = size.forecast.elapsed_s if size.forecast else None
    if deadline_s is None or total is None:
        return ""
    if total.high <= deadline_s:
        return "in time"
    return "probably in time" if total.mid <= deadline_s else "too late"


def comparison_table(named: Sequence[tuple[str, Size]]) -> Table:
    """Layouts side by side."""
    table = _table("layouts side by side", "parallelism", "layout", "GiB", "s a step", "of a step", "run")
    for name, size in named:
        plan, forecast = size.plan, size.forecast
        if plan is None:
            table.add_row(name, "refused", UNKNOWN, UNKNOWN, size.refusal, UNKNOWN)
            continue
        memory = f"{plan.memory[fullest(plan.memory)].total / GIB:.1f}" if plan.memory else UNKNOWN
        cells = [UNKNOWN] * 3
        if forecast is not None:
            largest = sorted(forecast.parts.items(), key=lambda part: -part[1])[:3]
            total = sum(forecast.parts.values())
            shares = ", ".join(f"{cause} {seconds / total:.0%}" for cause, seconds in largest if seconds)
            run = duration_text(forecast.total_s.mid) if forecast.total_s else UNKNOWN
            cells = [forecast.step_s.text(), shares, run]
        table.add_row(name, size.layout_text(), memory, *cells)
    return table


def print_tables(tables: Sequence[Table]) -> None:
    from rich.console import Console

    console = Console()
    if not console.is_terminal:  # a file or a pipe has no width
        console = Console(width=200, no_color=True)
    for table in tables:
        console.print()
        console.print(table)


def _table(title: str, *columns: str) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for column in columns:
        right = column in ("GiB", "s a step", "nodes")
        table.add_column(column, justify="right" if right else "left", overflow="fold")
    return table
