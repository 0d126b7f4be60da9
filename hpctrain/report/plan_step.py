"""Pictures of one step of a plan: over time, and what it is made of."""

from __future__ import annotations

from xml.etree import ElementTree as ET

from hpctrain.config.hardware import Hardware
from hpctrain.config.schema import Config
from hpctrain.plan.plan import RunPlan
from hpctrain.report.bars import Bar, Piece, draw_bars
from hpctrain.report.markup import legend, picture, section, table, tag
from hpctrain.report.timeline import (
    PipelineStep,
    draw_replicated,
    draw_timeline,
    make_pipeline_step,
    make_replicated_step,
    windows,
)
from hpctrain.report.words import CAUSES, numbers_text, seconds_text


def timeline_section(config: Config, plan: RunPlan, hardware: Hardware) -> ET.Element | None:
    """One step over time."""
    pipeline = make_pipeline_step(config, plan, hardware)
    if pipeline is not None:
        return _pipeline_section(config, plan, pipeline)
    replicated = make_replicated_step(config, plan, hardware)
    if replicated is None:
        return None
    told = (
        f"{seconds_text(replicated.seconds)} a step. The gradients' reduction takes "
        f"{seconds_text(replicated.hidden_s + replicated.exposed_s)}, of which "
        f"{seconds_text(replicated.hidden_s)} are hidden behind the last backward."
    )
    if replicated.classes_s:
        told += f" Collectives of the class-parallel head take {seconds_text(replicated.classes_s)}."
    entries = [("forward", "forward"), ("backward", "backward"), ("link", "network"), ("update", "optimizer")]
    if replicated.data_s:
        entries.append(("data", "waiting for data"))
    return section(
        "One step of a rank",
        legend([*entries, ("idle", "idle")]),
        picture("step", "One step over time", told, lambda width: draw_replicated(width, replicated)),
        tag("p", told),
    )


def _pipeline_section(config: Config, plan: RunPlan, shown: PipelineStep) -> ET.Element:
    kind, pp = config.parallelism.schedule.name, shown.pp
    busiest = min(range(pp), key=shown.idle_at)
    has_links = any(map(shown.link_s, (action for action, _, _ in shown.timeline.spans[0])))
    update = f", then {seconds_text(shown.update_s)} for the update" if shown.update_s else ""
    told = (
        f"{shown.num_microbatches} microbatches through {pp} places, schedule {kind}: "
        f"{seconds_text(shown.length_s)} until the last backward{update}. Until then "
        f"places are idle {shown.idle:.1%} of the time on average, the busiest, pp {busiest}, "
        f"{shown.idle_at(busiest):.1%}. "
    )
    if pp > 1:
        told += f"A message between stages takes {seconds_text(shown.step.send_s)}. "
    if len(windows(shown)) > 1:
        told += "The beginning and the end are shown. "
    if has_links:
        told += "Collectives are drawn at the end of each pass; they are spread over it."
    entries = [("forward", "forward"), ("backward", "backward, with what is computed again")]
    if has_links:
        entries.append(("link", "collectives of tp and dp that a pass waits for"))
    entries += [("idle", "idle"), ("update", "update")]
    if len(plan.stages) > pp:
        entries += [("forward2", "forward of every second stage"), ("backward2", "its backward")]
    return section(
        "One step over the pipeline",
        legend(entries),
        picture(
            "step",
            "One step over the places of the pipeline",
            told,
            lambda width: draw_timeline(width, shown),
        ),
        tag("p", told),
        tag("details", tag("summary", "in numbers"), _stage_table(plan, shown)),
    )


def _stage_table(plan: RunPlan, shown: PipelineStep) -> ET.Element:
    """Times of the stages, those that are alike in one row."""
    alike: dict[tuple[int, float, float], list[int]] = {}
    step = shown.step
    for stage, (first, end) in enumerate(plan.stages):
        key = end - first, step.forward_s[stage], step.backward_s[stage]
        alike.setdefault(key, []).append(stage)
    rows = []
    for (blocks, forward, backward), stages in alike.items():
        free = shown.unlinked.forward_s[stages[0]] + shown.unlinked.backward_s[stages[0]]
        share = 1 - free / (forward + backward)
        idle = [shown.idle_at(stage % shown.pp) for stage in stages]
        around = f"{min(idle):.1%}" + (f"–{max(idle):.1%}" if max(idle) - min(idle) > 1e-3 else "")
        rows.append(
            [
                numbers_text(stages),
                str(blocks),
                seconds_text(forward),
                seconds_text(backward),
                f"{share:.0%}",
                around,
            ]
        )
    columns = ["stages", "blocks", "forward", "backward", "of it collectives", "idle"]
    return table("a microbatch at each stage", columns, rows, 1, 2, 3, 4, 5)


def parts_section(plan: RunPlan) -> ET.Element | None:
    """What a step is made of."""
    forecast = plan.forecast
    if forecast is None:
        return None
    total = sum(forecast.parts.values())
    bars = [
        Bar(
            name=CAUSES.get(cause, cause),
            pieces=(Piece(class_=cause, value=seconds),),
            note=f"{seconds_text(seconds)}, {seconds / total:.1%}",
        )
        for cause, seconds in sorted(forecast.parts.items(), key=lambda part: -part[1])
        if seconds > 0.0005 * total
    ]
    step = forecast.step_s
    told = f"{seconds_text(step.mid)} a step, likely {seconds_text(step.low)} to {seconds_text(step.high)}."
    moved = [influence.text() for influence in forecast.influences]
    return section(
        "What a step is made of",
        picture(
            "parts",
            "Seconds of a step by cause",
            told,
            lambda width: draw_bars(width, bars, "seconds of a step"),
        ),
        tag("p", told, f" What is uncertain: {'; '.join(moved)}." if moved else ""),
    )
