"""A plan as one page with pictures, which loads nothing from elsewhere: `hpctrain plan --html FILE`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol
from xml.etree import ElementTree as ET

from hpctrain.config.compose import WITHOUT_DATA
from hpctrain.config.schema import Config, DecoderConfig, VisionConfig
from hpctrain.errors import ConfigError
from hpctrain.plan.durations import deadline_s, duration_text, range_text
from hpctrain.plan.forecast import Forecast
from hpctrain.plan.hardware import hardware_of
from hpctrain.plan.layout import axes_text
from hpctrain.plan.memory import GIB, fullest
from hpctrain.plan.plan import RunPlan
from hpctrain.plan.search import Found
from hpctrain.plan.sizing import Size
from hpctrain.report.markup import Child, tag, to_page
from hpctrain.report.plan_page_tables import figure_section, layout_section, size_section
from hpctrain.report.plan_pictures import comparison_section, memory_section, supply_section
from hpctrain.report.plan_step import parts_section, timeline_section
from hpctrain.report.words import count_text, gib_text, seconds_text

GOOD, BAD, OPEN = ("good", "✓ "), ("bad", "✗ "), ("open", "")


class Page(Protocol):
    """What the page is about."""

    @property
    def config(self) -> Config: ...
    @property
    def plan(self) -> RunPlan | None:
        """None where there is none: the run is refused, and `plan.force` would not help."""

    @property
    def found(self) -> Found | None: ...
    @property
    def sizes(self) -> Sequence[Size]: ...
    @property
    def named(self) -> Sequence[tuple[str, Size]]: ...
    @property
    def refusal(self) -> str:
        """Why the run is refused; empty where it is not."""


def write_page(page: Page, path: Path) -> None:
    """Write the page over what is there. Raises ConfigError where it cannot be written."""
    text = make_page(page)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"--html {path}", error.strerror or str(error), "a file in a folder of yours"
        ) from None


def make_page(page: Page) -> str:
    """The page as HTML."""
    config, plan = page.config, page.plan
    hardware = hardware_of(config.cluster)
    sections: list[ET.Element | None] = [
        _refusal(page.refusal),
        tag("div", *_tiles(config, plan), class_="tiles") if plan else None,
        _notes(plan, page.refusal) if plan else None,
    ]
    if plan is not None:
        sections += [
            memory_section(plan),
            timeline_section(config, plan, hardware),
            parts_section(plan),
            supply_section(plan),
        ]
    sections += [
        size_section(
            _with_own(page.sizes, plan),
            deadline_s(config),
            plan.num_nodes if plan else config.cluster.num_nodes,
        ),
        comparison_section(plan, page.named),
        layout_section(plan, page.found),
        figure_section(config, plan, hardware),
    ]
    name = config.name or config.model.kind
    main = tag("main", *(section for section in sections if section is not None))
    return to_page(f"{name}: plan", tag("body", _head(name, config, plan), main, _foot()))


def _with_own(sizes: Sequence[Size], plan: RunPlan | None) -> list[Size]:
    """With the run's own plan at its number of nodes, which may differ from what would be chosen there."""
    if plan is None or not sizes:
        return list(sizes)
    known = {size.num_nodes: size for size in sizes}
    known[plan.num_nodes] = Size(num_nodes=plan.num_nodes, plan=plan)
    return [known[count] for count in sorted(known)]


def _head(name: str, config: Config, plan: RunPlan | None) -> ET.Element:
    cluster = config.cluster
    layout = f"{axes_text(plan.layout)} on " if plan else ""
    nodes = count_text(plan.num_nodes if plan else cluster.num_nodes, "node")
    nodes += f" × {cluster.ranks_per_node} ranks"
    where = f"{layout}{nodes}, with the figures of {cluster.hardware}"
    return tag("header", tag("h1", name), tag("p", _what(config)), tag("p", where))


def _what(config: Config) -> str:
    """Model, precision, batch and data of a run."""
    model, optim = config.model, config.optim
    if isinstance(model, DecoderConfig):
        trained = f"LoRA of rank {model.lora.rank}" if model.lora.rank else "all weights"
        words = f"{model.family.name}, {model.num_hidden_layers} blocks of {model.hidden_size}, {trained}"
    elif isinstance(model, VisionConfig):
        words = f"{model.backbone}, {' × '.join(map(str, model.image_size))} pixels"
    else:
        words = model.kind
    epochs = count_text(optim.num_epochs, "epoch")
    root = Path(config.data.root)
    data = "not given" if root.name == WITHOUT_DATA else str(root)
    return (
        f"{words}; {optim.precision.name}; {epochs} in steps of {optim.global_batch_size:,} samples; "
        f"data: {data}"
    )


def _refusal(refusal: str) -> ET.Element | None:
    if not refusal:
        return None
    first, *findings = refusal.split("\n  - ")
    listed = tag("ul", *(tag("li", finding) for finding in findings)) if findings else None
    return tag("div", tag("strong", f"✗ {first}"), listed, class_="banner", role="note")


def _tiles(config: Config, plan: RunPlan) -> list[ET.Element]:
    tiles, forecast = [_memory_tile(plan)], plan.forecast
    if forecast is None:
        hint = f"cluster.hardware={config.cluster.hardware} has not all figures that a time takes"
        return [*tiles, _tile("time", "not known", f"{hint}; hpctrain calibrate measures them")]
    tiles += [_time_tile(forecast), _deadline_tile(forecast)]
    step, rate = forecast.step_s, forecast.samples_per_s
    unit = "images/s" if not forecast.tokens_per_sample else "tokens/s"
    rate = rate.scaled(forecast.tokens_per_sample or 1)
    speed = f"{rate.text()} {unit}"
    low, high = seconds_text(step.low), seconds_text(step.high)
    alone = f"; {forecast.speed_up:.1f} × one device" if forecast.speed_up else ""
    tiles.append(_tile("step", seconds_text(step.mid), f"{low} to {high}; {speed}{alone}"))
    if forecast.cost is not None:
        priced = f"{config.plan.price_per_gpu_hour:g} {forecast.currency} a GPU-hour"
        tiles.append(_tile("cost", f"{forecast.cost.text()} {forecast.currency}", priced))
    else:
        tiles.append(_tile("cost", "not asked", "plan.price_per_gpu_hour tells it"))
    save, lead = forecast.save_s, forecast.signal_lead_s
    slow = f"; longer than the warning, cluster.signal_lead_s={lead:g}" if save.mid > lead > 0 else ""
    tiles.append(
        _tile(
            "checkpoints",
            f"{forecast.checkpoint_bytes / 1e9:,.1f} GB",
            f"{seconds_text(save.mid)} to save{slow}; {forecast.disk_bytes / 1e9:,.0f} GB of disk in all",
        )
    )
    return tiles


def _memory_tile(plan: RunPlan) -> ET.Element:
    if not plan.memory:
        return _tile("memory", "not known", "there is no closed form for this model's activations")
    place, usable = fullest(plan.memory), plan.usable_gib
    needed, text = plan.memory[place].total / GIB, gib_text(plan.memory[place].total)
    where = f"at pp {place}" if plan.layout.pp > 1 else "on each rank"
    if usable is None:
        return _tile("memory", text, f"{where}; how much there is, is not known")
    told = f"of {usable:g} GiB {where}"
    if needed <= usable:
        return _tile("it fits", text, f"{told}; {usable - needed:.1f} GiB to spare", GOOD)
    return _tile("it does not fit", text, f"{told}; {needed - usable:.1f} GiB too much", BAD)


def _time_tile(forecast: Forecast) -> ET.Element:
    total = forecast.total_s
    if total is None or forecast.num_steps is None:
        return _tile("time", "not known", "data.root of packed data, plan.num_samples or plan.num_tokens")
    assumed = ", of assumed samples" * forecast.is_assumed
    calendar = ""
    if forecast.days is not None and forecast.days.mid * 86_400 > 1.01 * total.mid:
        calendar = f"; {forecast.days.text(2)} days by the calendar"
    middle, around = range_text(total)
    return _tile("time", middle, f"{around}; {forecast.num_steps:,} steps{assumed}{calendar}")


def _deadline_tile(forecast: Forecast) -> ET.Element:
    wanted, total = forecast.deadline_s, forecast.elapsed_s
    if wanted is None:
        return _tile("deadline", "none", "deadline=36h sets one")
    text = duration_text(wanted)
    if total is None:
        return _tile("deadline", text, "the time of the run is not known")
    if total.mid > wanted:
        return _tile("deadline", text, f"missed by {duration_text(total.mid - wanted)}", BAD)
    if total.high > wanted:
        return _tile("deadline", text, f"probably met; at worst {duration_text(total.high)}", OPEN)
    return _tile("deadline", text, "met, at worst too", GOOD)


def _tile(name: str, value: str, more: str, mark: tuple[str, str] = OPEN) -> ET.Element:
    class_, sign = mark
    return tag(
        "div",
        tag("h2", name),
        tag("p", f"{sign}{value}", class_="value"),
        tag("p", more),
        class_=f"tile {class_}",
    )


def _notes(plan: RunPlan, refusal: str) -> ET.Element | None:
    notes: list[Child] = [tag("li", note) for note in plan.places]
    notes += [tag("li", f"forced: {warning}") for warning in plan.warnings if warning not in refusal]
    return tag("ul", *notes, class_="notes") if notes else None


def _foot() -> ET.Element:
    return tag(
        "footer",
        tag("p", "A prediction; hpctrain status compares the run with it."),
    )
