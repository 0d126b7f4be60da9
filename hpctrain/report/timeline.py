"""One step over the places of the pipeline: passes, what of them waits for links, idle time, the update.

The schedule is simulated with the predicted time of every stage. The same step with links that take no time
tells what of a pass is communication.
"""

from __future__ import annotations

from dataclasses import dataclass
from xml.etree import ElementTree as ET

from hpctrain.config.hardware import Hardware
from hpctrain.config.schema import Config
from hpctrain.plan.plan import RunPlan
from hpctrain.plan.schedule import Action, Pass, Timeline, make_schedule, simulate
from hpctrain.plan.steptime import StepTime, predict_step
from hpctrain.report.markup import Drawing, label, line, rectangle, tag, text_px, ticks
from hpctrain.report.words import seconds_text

BANDWIDTHS = ("root_gbps", "node2_gbps", "node4_gbps", "node8_gbps", "network_gbps", "send_gbps")
LATENCIES = ("node_latency_us", "network_latency_us")
AT_ONCE = 600  # passes that one picture shows; of a longer step it shows the beginning and the end
SMALL = 10 / 12  # size of the microbatches' numbers, beside other text
MOST_ROWS = 24  # places; of more every second, third … is shown

Span = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineStep:
    """A step with its schedule."""

    step: StepTime
    unlinked: StepTime  #: with links that take no time
    timeline: Timeline
    length_s: float  #: until the last backward
    pp: int
    num_microbatches: int

    @property
    def update_s(self) -> float:
        """After the last backward."""
        return max(0.0, self.step.seconds - self.length_s)

    @property
    def idle(self) -> float:
        """Share of the places' time until the last backward in which they wait for each other."""
        return self.timeline.bubble

    def link_s(self, action: Action) -> float:
        """What of a pass waits for a link."""
        whole, free = (
            (step.forward_s if action.kind is Pass.forward else step.backward_s)[action.stage]
            for step in (self.step, self.unlinked)
        )
        return max(0.0, whole - free)

    def idle_at(self, place: int) -> float:
        busy = sum(end - begin for _, begin, end in self.timeline.spans[place])
        return 1 - busy / self.length_s


def make_pipeline_step(config: Config, plan: RunPlan, hardware: Hardware) -> PipelineStep | None:
    """Simulate a decoder's step; None where its time is not known, or where it has no stages."""
    if not plan.stages:
        return None
    step, unlinked = (
        predict_step(config, plan.layout, plan.batch, plan.stages, figures, exact=True)
        for figures in (hardware, without_links(hardware))
    )
    if step is None or unlinked is None:
        return None
    parallelism, pp, count = config.parallelism, plan.layout.pp, plan.batch.num_microbatches
    schedule = make_schedule(parallelism.schedule, pp, len(plan.stages) // pp, count)
    timeline = simulate(schedule, step.forward_s, step.backward_s, step.send_s)
    return PipelineStep(
        step=step,
        unlinked=unlinked,
        timeline=timeline,
        length_s=timeline.length_s,
        pp=pp,
        num_microbatches=count,
    )


def without_links(hardware: Hardware) -> Hardware:
    """The same devices, with links between them that take no time."""
    for names, factor in ((BANDWIDTHS, 1e9), (LATENCIES, 1e-9)):
        for name in names:
            if name in hardware:
                hardware = hardware.with_value(name, hardware[name] * factor)
    return hardware


def windows(shown: PipelineStep) -> list[Span]:
    """Which seconds of the step are drawn: all, or as much at its beginning as at its end."""
    whole, spans = shown.step.seconds, shown.timeline.spans
    if sum(map(len, spans)) <= AT_ONCE:
        return [(0.0, whole)]
    ends = [end for action, _, end in spans[0] if action.kind is Pass.backward]
    stages_per_rank = len(shown.step.forward_s) // shown.pp
    length = ends[min(len(ends), max(5, shown.pp // 2) * stages_per_rank) - 1]
    if 2 * length >= whole:
        return [(0.0, whole)]
    return [(0.0, length), (whole - length, whole)]


def draw_timeline(width: float, shown: PipelineStep) -> Drawing:
    """The places of the pipeline, one below the other, over time."""
    every = -(-shown.pp // MOST_ROWS)
    places = range(0, shown.pp, every)
    thick = 22.0 if len(places) <= 8 else 15.0
    left = text_px(f"pp {shown.pp - 1}") + 8
    shapes: list[ET.Element] = []
    y, cuts = 4.0, windows(shown)
    for index, window in enumerate(cuts):
        if index:
            left_out = window[0] - cuts[index - 1][1]
            shapes.append(
                label(width / 2, y + 16, f"… {seconds_text(left_out)} of the same rhythm …", "middle", "tick")
            )
            y += 30
        axis = _Axis(left, width - 4, *window)
        for place in places:
            shapes.append(_lane(axis, shown, place, y, thick))
            shapes.append(label(left - 8, y + thick / 2 + 4, f"pp {place}", "end"))
            y += thick + 2
        shapes += _seconds(axis, y)
        y += 34
    return y, shapes


@dataclass(frozen=True, slots=True)
class _Axis:
    left: float
    right: float
    begin: float
    end: float

    def x(self, second: float) -> float:
        inside = min(max(second, self.begin), self.end)
        return self.left + (self.right - self.left) * (inside - self.begin) / (self.end - self.begin)


def _seconds(axis: _Axis, y: float) -> list[ET.Element]:
    shapes = [line(axis.left, y, axis.right, y, "axis")]
    for second in ticks(axis.begin, axis.end, int((axis.right - axis.left) / 70)):
        x = axis.x(second)
        shapes.append(line(x, y, x, y + 4, "axis"))
        text = f"{second:,.6g}"
        if axis.left - 1 < x < axis.right - text_px("seconds") - text_px(text) / 2 - 8:
            shapes.append(label(x, y + 15, text, "middle", "tick"))
    shapes.append(label(axis.right, y + 15, "seconds", "end", "tick"))
    return shapes


def _lane(axis: _Axis, shown: PipelineStep, place: int, y: float, thick: float) -> ET.Element:
    """A place: its lane is idle where nothing is drawn on it."""
    paths: dict[str, list[str]] = {}
    numbers = []
    number_px = SMALL * text_px(str(shown.num_microbatches - 1)) + 1
    for action, begin, end in shown.timeline.spans[place]:
        if end <= axis.begin or begin >= axis.end:
            continue
        kind = "forward" if action.kind is Pass.forward else "backward"
        odd = "2" if action.stage // shown.pp % 2 else ""
        x, after = axis.x(begin), axis.x(end)
        waits = axis.x(end - shown.link_s(action))
        _add(paths, f"{kind}{odd}", x, waits, y, thick)
        _add(paths, "link", waits, after, y, thick)
        if waits - x >= number_px:
            middle = (x + waits) / 2
            numbers.append(label(middle, y + thick / 2 + 4, str(action.microbatch), "middle", "in-bar"))
        # A thin line keeps neighbours apart.
        paths.setdefault("edge", []).append(f"M{after:.1f} {y:.1f}v{thick:.0f}")
    _add(paths, "update", axis.x(shown.length_s), axis.x(shown.step.seconds), y, thick)
    idle = rectangle(axis.left, y, axis.right - axis.left, thick, "idle")
    said = tag("title", f"pp {place}: idle {shown.idle_at(place):.1%} of the time until the last backward")
    drawn = [tag("path", d="".join(parts), class_=class_) for class_, parts in paths.items() if parts]
    return tag("g", said, idle, *drawn, *numbers, data_place=str(place))


def _add(paths: dict[str, list[str]], class_: str, x: float, after: float, y: float, thick: float) -> None:
    if after - x > 0.05:
        paths.setdefault(class_, []).append(f"M{x:.1f} {y:.1f}H{after:.1f}v{thick:.0f}H{x:.1f}z")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicatedStep:
    """A step of a model that every rank holds whole: the device, and the network beside it."""

    microbatch_s: float
    num_microbatches: int
    hidden_s: float  #: of the gradients' reduction, behind the last backward
    exposed_s: float
    classes_s: float  #: gathers and reductions of a class-parallel head, of all microbatches
    optimizer_s: float
    data_s: float  #: waiting for data

    @property
    def seconds(self) -> float:
        computing = self.num_microbatches * self.microbatch_s
        return self.data_s + computing + self.classes_s + self.exposed_s + self.optimizer_s


def make_replicated_step(config: Config, plan: RunPlan, hardware: Hardware) -> ReplicatedStep | None:
    """What a rank does in a step; None where its time is not known, or where the model has stages."""
    forecast = plan.forecast
    if plan.stages or forecast is None:
        return None
    # A rank alone may not know what hides: it has nothing to hide.
    open_links = hardware.with_value("overlap", 1e-9) if "overlap" in hardware else hardware
    identities = plan.num_identities
    unhidden = predict_step(config, plan.layout, plan.batch, (), open_links, num_identities=identities)
    parts = forecast.parts
    if unhidden is None:
        return None
    return ReplicatedStep(
        microbatch_s=parts["compute"] / plan.batch.num_microbatches,
        num_microbatches=plan.batch.num_microbatches,
        hidden_s=max(0.0, unhidden.parts["dp"] - parts["dp"]),
        exposed_s=parts["dp"],
        classes_s=parts["classes"],
        optimizer_s=parts["optimizer"],
        data_s=parts.get("data", 0.0),
    )


def draw_replicated(width: float, shown: ReplicatedStep) -> Drawing:
    """Two lanes: what the device does, and what the network does."""
    left, thick = text_px("network") + 8, 26.0
    axis = _Axis(left, width - 4, 0.0, shown.seconds)
    paths: dict[str, list[str]] = {}
    now, y = shown.data_s, 4.0
    _add(paths, "data", axis.x(0.0), axis.x(now), y, thick)
    classes = shown.classes_s / shown.num_microbatches
    for _ in range(shown.num_microbatches):
        forward, backward = shown.microbatch_s / 3, shown.microbatch_s * 2 / 3
        turn = now + forward
        _add(paths, "forward", axis.x(now), axis.x(turn), y, thick)
        _add(paths, "link", axis.x(turn), axis.x(turn + classes), y + thick + 4, thick)
        now = turn + classes + backward
        _add(paths, "backward", axis.x(turn + classes), axis.x(now), y, thick)
        paths.setdefault("edge", []).append(f"M{axis.x(now):.1f} {y:.1f}v{thick:.0f}")
    _add(paths, "link", axis.x(now - shown.hidden_s), axis.x(now + shown.exposed_s), y + thick + 4, thick)
    now += shown.exposed_s
    _add(paths, "update", axis.x(now), axis.x(shown.seconds), y, thick)
    shapes = [rectangle(left, row, axis.right - left, thick, "idle") for row in (y, y + thick + 4)]
    shapes += [tag("path", d="".join(parts), class_=class_) for class_, parts in paths.items()]
    shapes += [
        label(left - 8, row + thick / 2 + 4, name, "end")
        for name, row in (("device", y), ("network", y + thick + 4))
    ]
    bottom = y + 2 * thick + 6
    return bottom + 34, [*shapes, *_seconds(axis, bottom)]
