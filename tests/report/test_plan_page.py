"""The page of a plan: it says what the plan says, is well formed, loads nothing, and can be told apart."""

from __future__ import annotations

import re
from argparse import Namespace
from copy import deepcopy
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from hpctrain.cli import compose
from hpctrain.config.hardware import Hardware
from hpctrain.config.schema import Config, Schedule, VisionConfig
from hpctrain.errors import ConfigError, PlanError
from hpctrain.launch.inputs import find_workload
from hpctrain.plan.forecast import make_forecast
from hpctrain.plan.hardware import hardware_of
from hpctrain.plan.plan import RunPlan, make_plan
from hpctrain.plan.schedule import make_schedule, simulate
from hpctrain.plan.search import search
from hpctrain.plan.sizing import make_size, make_sizes
from hpctrain.plan.steptime import StepTime, predict_step
from hpctrain.planning import Planned, _sizes, plan_verb
from hpctrain.report.markup import tag
from hpctrain.report.plan_page import make_page, write_page
from hpctrain.report.plan_page_tables import used_figures
from hpctrain.report.timeline import (
    BANDWIDTHS,
    LATENCIES,
    PipelineStep,
    ReplicatedStep,
    draw_timeline,
    make_pipeline_step,
    make_replicated_step,
)

VOID = ("meta",)
LINKS = (*BANDWIDTHS, *LATENCIES, "overlap")
HOSTILE = "<script>alert(1)</script>&\"'</svg>"


@cache
def composed(*overrides: str) -> Config:
    (point,) = compose(list(overrides))
    return point.resolve(without_data=True)


def configured(*overrides: str) -> Config:
    return deepcopy(composed(*overrides))


def paged(config: Config, **fields: Any) -> Planned:
    plan = make_plan(config, find_workload(config))
    return Planned(config=config, plan=plan, **{"found": None, "sizes": [], "named": [], **fields})


@cache
def finance() -> Planned:
    """The headline run, beside one that is refused and one that is not."""
    config = configured("+exp=finance_callbot")
    named = [
        (name, make_size(configured("+exp=finance_callbot", f"parallelism={name}"), find_workload(config), 4))
        for name in ("pp8", "pp4_tp8")
    ]
    return paged(config, named=named)


@cache
def vision() -> Planned:
    config = configured("+exp=vision_city")
    return paged(
        config,
        sizes=make_sizes(config, find_workload(config), list(range(1, 17))),
        found=search(config, hardware_of(config.cluster)),
    )


@cache
def page_of(name: str) -> str:
    return make_page({"finance": finance, "vision": vision}[name]())


class Reader(HTMLParser):
    """Tags in order, whether they close each other, attributes, and text."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def drawings(page: str, picture: str, kind: str = "wide") -> ET.Element:
    """A picture of the page at one width, read as XML."""
    (found,) = (svg for svg in svgs(page) if str(svg.get("aria-labelledby")).startswith(f"{picture}-{kind}-"))
    return found


def svgs(page: str) -> list[ET.Element]:
    plain = page.replace(' xmlns="http://www.w3.org/2000/svg"', "")
    return [ET.fromstring(text) for text in re.findall(r"<svg.*?</svg>", plain, re.DOTALL)]


def of_class(svg: ET.Element, class_: str) -> list[ET.Element]:
    return [element for element in svg.iter() if class_ in str(element.get("class")).split()]


@pytest.mark.parametrize("name", ["finance", "vision"])
def test_tags_close_each_other_and_pictures_are_xml(name: str) -> None:
    page = page_of(name)
    names = [attributes["id"] for _, attributes in Reader(page).tags if "id" in attributes]
    assert len(names) == len(set(names))
    labelled = [svg for svg in svgs(page) if svg.get("aria-labelledby")]
    assert len(labelled) >= 8
    for svg in labelled:
        known = {element.get("id") for element in svg.iter() if element.text}
        assert set(str(svg.get("aria-labelledby")).split()) <= known


@pytest.mark.parametrize("name", ["finance", "vision"])
def test_nothing_is_loaded_from_elsewhere(name: str) -> None:
    page = page_of(name)
    tags = Reader(page).tags
    assert {kind for kind, _ in tags}.isdisjoint(
        {"script", "link", "img", "iframe", "object", "embed", "base"}
    )
    for element, attributes in tags:
        assert attributes.keys().isdisjoint({"src", "href", "xlink:href", "style", "action"}), element
        assert not any("://" in value for key, value in attributes.items() if key != "xmlns"), attributes
    (style,) = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
    assert "url(" not in style and "@import" not in style


@pytest.mark.parametrize("kind", ["wide", "narrow"])
def test_bars_of_memory_add_up_to_the_plans_bytes(kind: str) -> None:
    plan = finance().plan
    assert plan is not None and len(plan.memory) == 16
    bars = drawings(page_of("finance"), "memory", kind).findall(".//g[@data-bar]")
    sums = [sum(int(piece.get("data-bytes", 0)) for piece in bar.iter("rect")) for bar in bars]
    assert sums == [memory.total for memory in plan.memory]


def test_bars_are_as_long_as_their_bytes_and_the_limit_is_where_memory_ends() -> None:
    plan, svg = finance().plan, drawings(page_of("finance"), "memory")
    assert plan is not None and plan.usable_gib is not None
    pieces = [piece for piece in svg.iter("rect") if piece.get("data-bytes")]
    px_per_gib = [float(p.get("width", 0)) / (int(p.get("data-bytes", 0)) / 2**30) for p in pieces]
    # The page writes hundredths of a pixel.
    wide = [px for px, piece in zip(px_per_gib, pieces, strict=True) if float(piece.get("width", 0)) > 5]
    assert max(wide) - min(wide) < 0.01 / 5 * max(wide)
    for bar in svg.findall(".//g[@data-bar]"):
        row = [(float(p.get("x", 0)), float(p.get("width", 0))) for p in bar.iter("rect")]
        ends = [x + width for x, width in row]
        assert [x for x, _ in row[1:]] == pytest.approx(ends[:-1], abs=0.02)  # end to end
    (limit,) = of_class(svg, "limit")
    left = min(float(piece.get("x", 0)) for piece in pieces)
    assert float(limit.get("x1", 0)) - left == pytest.approx(plan.usable_gib * wide[0], rel=0.002)


def test_passes_of_the_timeline_are_as_long_as_predicted() -> None:
    page = finance()
    config, plan = page.config, page.plan
    assert plan is not None
    hardware = hardware_of(config.cluster)
    step = predict_step(config, plan.layout, plan.batch, plan.stages, hardware, exact=True)
    assert step is not None
    lanes = drawings(page_of("finance"), "step").findall(".//g[@data-place]")
    assert [lane.get("data-place") for lane in lanes] == [str(place) for place in range(16)] * 2

    def runs(lane: ET.Element, class_: str) -> list[tuple[float, float]]:
        path = " ".join(str(each.get("d")) for each in of_class(lane, class_))
        return [(float(x), float(end)) for x, end in re.findall(r"M([\d.]+) [\d.]+H([\d.]+)", path)]

    first, second = (runs(lanes[place], "forward")[0] for place in (0, 1))
    links = runs(lanes[0], "link")[0]
    scale = (second[0] - first[0]) / (step.forward_s[0] + step.send_s)  # stage 1 begins with what 0 sends
    assert (links[1] - first[0]) / scale == pytest.approx(step.forward_s[0], abs=0.2 / scale)
    for name, factor in (("node2_gbps", 1e9), ("node_latency_us", 1e-9)):  # pairs of tp are in a node
        hardware = hardware.with_value(name, hardware[name] * factor)
    free = predict_step(config, plan.layout, plan.batch, plan.stages, hardware, exact=True)
    assert free is not None and free.forward_s[0] < step.forward_s[0]
    assert (first[1] - first[0]) / scale == pytest.approx(free.forward_s[0], abs=0.2 / scale)
    backward = runs(lanes[0], "backward")[0][0]
    last = runs(lanes[0], "link")
    end = next(end for begin, end in last if begin > backward)
    assert (end - backward) / scale == pytest.approx(step.backward_s[0], abs=1.0 / scale)


def test_what_waits_for_links_is_what_faster_links_would_save() -> None:
    page = finance()
    assert page.plan is not None
    shown = make_pipeline_step(page.config, page.plan, hardware_of(page.config.cluster))
    assert shown is not None
    # Pairs of tp in a node: twice the bandwidth and half the latency, half the wait.
    hardware = hardware_of(page.config.cluster)
    for name, factor in (("node2_gbps", 2.0), ("node_latency_us", 0.5)):
        hardware = hardware.with_value(name, hardware[name] * factor)
    faster = make_pipeline_step(page.config, page.plan, hardware)
    assert faster is not None
    action = shown.timeline.spans[0][0][0]
    assert faster.link_s(action) == pytest.approx(shown.link_s(action) / 2, rel=1e-3)


def test_a_pipeline_of_equal_stages_is_idle_as_long_as_its_bubble() -> None:
    """(p - 1) / (m + p - 1), Narayanan et al. 2021, §2.2."""
    step = StepTime(seconds=45.0, parts={}, forward_s=(1.0,) * 4, backward_s=(2.0,) * 4, send_s=0.0)
    timeline = simulate(make_schedule(Schedule["1f1b"], 4, 1, 12), step.forward_s, step.backward_s)
    shown = PipelineStep(
        step=step,
        unlinked=step,
        timeline=timeline,
        length_s=timeline.length_s,
        pp=4,
        num_microbatches=12,
    )
    assert [shown.idle, *map(shown.idle_at, range(4))] == pytest.approx([3 / 15] * 5)
    assert shown.update_s == 0.0
    _, shapes = draw_timeline(880.0, shown)
    drawn = tag("svg", *shapes)
    edges = " ".join(str(path.get("d")) for path in of_class(drawn, "edge"))
    assert edges.count("M") == 4 * 24  # each pass ends once
    assert of_class(drawn, "link") == of_class(drawn, "update") == []


def test_the_network_works_beside_the_last_backward_and_ends_with_the_reduction() -> None:
    page = vision()
    assert page.plan is not None and page.plan.forecast is not None
    shown = make_replicated_step(page.config, page.plan, hardware_of(page.config.cluster))
    assert shown is not None
    assert shown.seconds == pytest.approx(page.plan.forecast.step_s.mid)
    # `overlap` is 0.8 and the last bucket has nothing to hide behind.
    whole = shown.hidden_s + shown.exposed_s
    assert 0.7 * whole < shown.hidden_s < 0.8 * whole
    assert shown.hidden_s < shown.microbatch_s * 2 / 3


def replicated(class_parallel: bool, num_identities: int = 100_000) -> tuple[ReplicatedStep, float]:
    """The headline run with a head of its own, over links without latency; and bytes a second of a ring."""
    config = configured(
        "+exp=vision_city",
        f"model.class_parallel={class_parallel}",
        f"plan.num_identities={num_identities}",
        "deadline=null",
        *(f"+cluster.figures.{figure}=1e-9" for figure in ("node_latency_us", "network_latency_us")),
    )
    plan, hardware = make_plan(config, find_workload(config)), hardware_of(config.cluster)
    shown = make_replicated_step(config, plan, hardware)
    assert shown is not None and plan.forecast is not None
    assert shown.seconds == pytest.approx(plan.forecast.step_s.mid)
    return shown, min(hardware["network_gbps"], hardware["node8_gbps"]) * 1e9


def test_the_reduction_over_time_is_that_of_the_backbone_and_of_a_whole_head() -> None:
    """2 bytes (bf16) of 87.6 M weights and 512 numbers of each identity, twice around a ring of 32."""
    shown, bytes_s = replicated(class_parallel=False)
    expected = 2 * 31 / 32 * 2 * (87.6e6 + 512 * 100_000) / bytes_s
    assert shown.hidden_s + shown.exposed_s == pytest.approx(expected, rel=0.01)
    assert shown.classes_s == 0


def test_a_class_parallel_head_has_collectives_of_its_own_over_time() -> None:
    """512 numbers of fp32 for each of 4,096 images gathered, their gradients reduced, three sums of one
    number each; the centres are not reduced."""
    shown, bytes_s = replicated(class_parallel=True)
    sent = 2 * 31 / 32 * 4 * 512 * 4096 + 3 * 2 * 31 / 32 * 4 * 4096
    assert shown.classes_s == pytest.approx(sent / bytes_s, rel=0.01)
    assert shown.hidden_s + shown.exposed_s == pytest.approx(2 * 31 / 32 * 2 * 87.6e6 / bytes_s, rel=0.01)


def test_a_rank_alone_has_its_step_over_time_without_figures_of_links() -> None:
    one = ("cluster.num_nodes=1", "cluster.ranks_per_node=1", "optim.gradient_compression=none")
    config = configured("+exp=vision_city", *one, "deadline=null", "parallelism.microbatch_size=128")
    known = hardware_of(config.cluster)
    alone = Hardware("mine", {name: known.figures[name] for name in known.figures if name not in LINKS})
    plan = make_plan(config, find_workload(config))
    shown = make_replicated_step(config, plan, alone)
    assert shown is not None and (shown.hidden_s, shown.exposed_s, shown.classes_s) == (0, 0, 0)


def test_dots_of_the_curve_lie_below_the_deadline_where_they_meet_it() -> None:
    svg, sizes = drawings(page_of("vision"), "nodes"), vision().sizes
    known = {s.num_nodes: s.forecast.total_s.mid for s in sizes if s.forecast and s.forecast.total_s}
    dots = {int(dot.get("data-nodes", 0)): dot for dot in of_class(svg, "dot")}
    assert dots.keys() == known.keys() and len(known) >= 3
    (deadline,) = of_class(svg, "limit")
    y = float(deadline.get("y1", 0))
    for nodes, dot in dots.items():
        assert float(dot.get("data-seconds", 0)) == pytest.approx(known[nodes], abs=0.1)
        assert (float(dot.get("cy", 0)) > y) == (known[nodes] < 36 * 3600)
    assert len(of_class(svg, "refused")) == len([size for size in sizes if size.plan is None])
    (own,) = of_class(svg, "own")
    assert own.get("data-nodes") == "4"


def test_the_curve_goes_through_the_runs_own_time_whatever_would_be_chosen_for_as_many_nodes() -> None:
    page = vision()
    plan = page.plan
    assert plan is not None and plan.forecast is not None
    total, days = plan.forecast.total_s, plan.forecast.days
    assert total is not None and days is not None
    twice = replace(plan.forecast, total_s=total.scaled(2.0), days=days.scaled(2.0))
    slower = replace(plan, forecast=twice)
    for sizes in ([size for size in page.sizes if size.num_nodes != 4], page.sizes):
        text = make_page(replace(page, plan=slower, sizes=sizes))
        (own,) = of_class(drawings(text, "nodes"), "own")
        assert float(own.get("data-seconds", 0)) == pytest.approx(2 * total.mid, abs=0.1)


def test_a_layout_that_few_numbers_of_nodes_carry_is_set_beside_the_best_of_half_and_twice_as_many() -> None:
    config = configured(
        "+exp=finance_callbot",
        "model=decoder_tiny",
        "data.sequence_length=1024",
        "cluster.ranks_per_node=2",
        "cluster.num_nodes=2",
        "plan.max_nodes=4",
        "parallelism=pp2",
        "parallelism.pp=4",
    )
    sizes = _sizes(config, make_plan(config, find_workload(config)), everything=True)
    layouts = {size.num_nodes: size.layout_text() for size in sizes}
    assert layouts.keys() == {1, 2, 4}
    assert (layouts[2], layouts[4]) == ("pp 4", "pp 4 × dp_replicate 2") and "pp 4" not in layouts[1]


def test_the_head_says_whether_it_fits_when_it_is_done_and_what_it_costs() -> None:
    config = configured("+exp=finance_callbot", "plan.price_per_gpu_hour=0.31", "deadline=1d")
    config.plan.force = True
    page = paged(config)
    assert page.plan is not None and page.plan.forecast is not None
    shown, forecast = Reader(make_page(page)).text, page.plan.forecast
    assert forecast.total_s is not None and forecast.cost is not None
    fullest = max(memory.total for memory in page.plan.memory) / 2**30
    assert f"it fits ✓ {fullest:.1f} GiB of 22.2 GiB at pp" in shown
    assert f"time {forecast.total_s.mid / 86400:.1f} days {forecast.total_s.low / 86400:.1f}–" in shown
    assert "deadline ✗ 24.0 h missed by" in shown
    # 32 cards.
    assert forecast.cost.mid == pytest.approx(forecast.total_s.mid / 3600 * 32 * 0.31)
    assert f"cost {forecast.cost.text()} USD 0.31 USD a GPU-hour" in shown


def test_layouts_side_by_side_begin_with_the_run_and_tell_why_one_is_refused() -> None:
    shown = Reader(page_of("finance")).text
    assert re.search(
        r"this run pp 16 × tp 2 .* pp8 refused – – – a rank at pp=\d .* pp4_tp8 pp 4 × tp 8", shown
    )
    bars = drawings(page_of("finance"), "named").findall(".//g[@data-bar]")
    assert [bar.get("data-bar") for bar in bars] == ["this run (pp 16 × tp 2)", "pp4_tp8 (pp 4 × tp 8)"]


def test_figures_that_move_the_step_are_marked_and_all_of_them_have_a_source() -> None:
    page = vision()
    assert page.plan is not None and page.plan.forecast is not None
    shown = Reader(page_of("vision")).text
    marked = re.findall(r"(\w+) ▲ moves the step by (\d+)%", shown)
    assert marked == [(each.figure, f"{each.share * 100:.0f}") for each in page.plan.forecast.influences]
    for name, figure in hardware_of(page.config.cluster).figures.items():
        assert re.search(rf"\b{name}\b.*{re.escape(figure.source)}", shown), name


def test_figures_of_the_page_are_those_that_change_the_plan() -> None:
    page = vision()
    config, plan = page.config, page.plan
    assert plan is not None
    hardware, workload = hardware_of(config.cluster), find_workload(config)
    used = used_figures(config, plan, hardware)
    certain = Hardware(
        hardware.name, {n: replace(f, low=f.value, high=f.value) for n, f in hardware.figures.items()}
    )

    def forecast(figures: Hardware) -> Any:
        return make_forecast(config, plan.layout, plan.batch, plan.stages, figures, workload)

    planned = forecast(certain)
    changing = {
        name
        for name in hardware.figures
        if any(forecast(certain.with_value(name, k * hardware[name])) != planned for k in (0.1, 10.0))
    }
    assert {"convnet_efficiency", "network_gbps", "decode_ms", "write_gbps", "requeue_s"} <= changing <= used
    assert len(used) < 0.7 * len(hardware.figures)


def test_hostile_names_come_out_as_text() -> None:
    config = configured("+exp=vision_city", "plan.price_per_gpu_hour=1")
    plan = make_plan(config, find_workload(config))
    config.name, config.data.root = f"run{HOSTILE}", f"/data/{HOSTILE}"
    config.plan.currency = HOSTILE
    assert isinstance(config.model, VisionConfig) and plan.forecast is not None
    config.model.backbone = f"net{HOSTILE}"
    plan = replace(
        plan,
        forecast=replace(plan.forecast, currency=HOSTILE),
        places=(f"where{HOSTILE}",),
        warnings=(f"forced{HOSTILE}",),
    )
    size = make_size(configured("+exp=vision_city"), None, 4)
    named = [(f"layout{HOSTILE}", size), ("other", replace(size, plan=None, refusal=f"no{HOSTILE}"))]
    page = Planned(
        config=config,
        plan=plan,
        found=None,
        sizes=[],
        named=named,
        refusal=f"refused{HOSTILE}\n  - a{HOSTILE}",
    )
    # The backbone is none that is known: what needs its costs is left out.
    text = make_page(page)
    reader = Reader(text)
    assert "script" not in {tag for tag, _ in reader.tags}
    for before in ("run", "/data/", "net", "where", "forced", "layout", "no", "refused", "a"):
        assert before + HOSTILE in reader.text, before
    assert all(ET.iselement(svg) for svg in svgs(text))


def test_characters_that_xml_cannot_hold_are_replaced() -> None:
    config = configured("+exp=vision_city_laptop")
    page = paged(config)
    config.name = "a\x00\x1b[31m\ud800b"
    text = make_page(page)
    assert "a\ufffd\ufffd[31m\ufffdb" in Reader(text).text
    text.encode()


def test_a_run_without_figures_of_its_cluster_has_a_page_without_times() -> None:
    page = paged(configured("+exp=vision_city_laptop"))
    assert page.plan is not None and page.plan.forecast is None
    for plan in (page.plan, replace(page.plan, memory=())):
        shown = Reader(make_page(replace(page, plan=plan))).text
        assert "time not known" in shown and "hpctrain calibrate measures them" in shown
        assert "What a step is made of" not in shown
    assert "memory not known" in shown


def test_a_run_whose_length_nobody_knows_has_a_page_with_its_step() -> None:
    config = configured("+exp=vision_city", "plan.num_samples=null", "deadline=null")
    shown = Reader(make_page(paged(config))).text
    assert "time not known data.root of packed data" in shown and "What a step is made of" in shown


def test_a_refused_run_has_a_page_that_says_why_and_what_would_do(tmp_path: Path) -> None:
    path = tmp_path / "plan.html"
    flags = Namespace(html=str(path), json=False, compare=[], trace=False, slurm=False)
    with pytest.raises(PlanError):
        plan_verb(configured("+exp=vision_city", "deadline=22h"), flags, lambda _: Config())
    shown = Reader(path.read_text()).text
    assert "✗ the plan refuses this run: deadline=22h, but the run takes" in shown
    assert "deadline ✗ 22.0 h missed by" in shown
    assert re.search(r"The fewest that meet 22.0 h: \d+ nodes", shown)


def test_a_run_that_no_force_helps_has_a_page_without_a_plan(tmp_path: Path) -> None:
    path = tmp_path / "plan.html"
    flags = Namespace(html=str(path), json=False, compare=[], trace=False, slurm=False)
    with pytest.raises(PlanError):
        plan_verb(configured("+exp=vision_city", "optim.global_batch_size=4097"), flags, lambda _: Config())
    shown = Reader(path.read_text()).text
    assert "optim.global_batch_size=4097 does not divide" in shown and "The figures behind it" in shown


def test_a_page_that_cannot_be_written_is_refused_in_words(tmp_path: Path) -> None:
    page = paged(configured("+exp=vision_city_laptop"))
    with pytest.raises(ConfigError, match="--html"):
        write_page(page, tmp_path / "none" / "plan.html")


def test_the_page_of_the_headline_run_is_no_more_than_a_megabyte() -> None:
    assert len(make_page(finance())) < 1_000_000


def test_of_a_long_pipeline_every_third_place_is_drawn_over_time_and_all_in_memory() -> None:
    page = finance()
    assert page.plan is not None
    memory = page.plan.memory * 4  # as many bars as pp 64
    stages = tuple((first, first + 1) for first in range(64))
    plan: RunPlan = replace(
        page.plan,
        memory=memory,
        stages=stages,
        layout=replace(page.plan.layout, pp=64, tp=2),
        batch=replace(page.plan.batch, num_microbatches=70),
    )
    text = make_page(replace(page, plan=plan, named=[]))
    for kind in ("wide", "narrow"):
        lanes = drawings(text, "step", kind).findall(".//g[@data-place]")
        assert len({lane.get("data-place") for lane in lanes}) == 22  # every third
        assert len(drawings(text, "memory", kind).findall(".//g[@data-bar]")) == 64
