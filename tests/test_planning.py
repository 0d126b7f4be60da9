"""The verb plan as its users meet it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.test_cli import LAPTOP, Run, run  # noqa: F401


def test_the_headline_plan_needs_no_data_yet(run: Run) -> None:  # noqa: F811
    said = run("plan", "+exp=vision_city")
    assert said.code == 0
    assert re.search(
        r"run     488,300 steps: 3\d\.\d h \(\d+\.\d–\d+\.\d h\), if there are as many samples", said.out
    )
    assert "one card would take 41.7 days" in said.out
    assert "nodes for 36.0 h: 4 probably" in said.out
    assert "data.root=FOLDER before it is submitted" in said.out


def test_a_run_that_is_submitted_needs_its_data(run: Run) -> None:  # noqa: F811
    said = run("+exp=vision_city")
    assert said.code == 2 and "data.root is not set" in said.err and "data.root=VALUE" in said.err


def test_other_layouts_and_why_not(run: Run) -> None:  # noqa: F811
    said = run("plan", "+exp=finance_callbot")
    assert said.code == 0
    assert "layouts tried" in said.out and "the fastest that fits" in said.out
    assert re.search(r"pp 4 × tp 8 .*% of the step in all-reduces of tp; \d\.\d × slower", said.out)


def test_named_layouts_side_by_side(run: Run) -> None:  # noqa: F811
    said = run("plan", "+exp=finance_callbot", "--compare", "pp4_tp8,auto,pp8")
    table = said.out.partition("layouts side by side")[2]
    assert re.search(r"pp4_tp8 .*tp \d\d%", table) and "auto" in table
    assert re.search(r"pp8 +refused .*needs \d+\.\d GiB", table)


def test_an_unknown_layout_to_compare_is_refused(run: Run) -> None:  # noqa: F811
    said = run("plan", "+exp=finance_callbot", "--compare", "pp9")
    assert said.code == 2 and "'pp9'" in said.err and "pp8" in said.err


def test_the_planner_chooses_when_it_is_asked(run: Run) -> None:  # noqa: F811
    said = run(
        "plan",
        "+exp=finance_callbot_lora",
        "parallelism=auto",
        "cluster.num_nodes=-1",
        "deadline=100h",
        "--json",
    )
    plan = json.loads(said.out)
    layout = plan["layout"]
    assert layout["pp"] * layout["dp_replicate"] * layout["dp_shard"] * layout["tp"] == plan["world_size"]
    total = plan["forecast"]["total_s"]["mid"]
    assert total <= 100 * 3600
    smaller = [size for size in plan["sizes"] if size["num_nodes"] < plan["num_nodes"]]
    assert all(
        size["plan"] is None or size["plan"]["forecast"]["total_s"]["mid"] > 100 * 3600 for size in smaller
    )


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["+exp=finance_callbot", "cluster.num_nodes=-1"], "there is no deadline"),
        (
            ["+exp=vision_city", "cluster.num_nodes=-1", "deadline=1h"],
            "the fastest of 1 to 16 (plan.max_nodes)",
        ),
        (["+exp=vision_city", "deadline=20h"], "deadline=20h, but the run takes"),
        (["+exp=vision_city", "plan.hours_per_day=0"], "plan.hours_per_day=0.0: must be positive"),
        (["+exp=vision_city", "plan.hours_per_day=30"], "plan.hours_per_day=30.0: a day has 24"),
        (["+exp=vision_city", "plan.price_per_gpu_hour=-1"], "plan.price_per_gpu_hour=-1.0"),
        (["+exp=vision_city", "plan.max_nodes=0"], "plan.max_nodes=0"),
        (["+exp=vision_city", "+cluster.figures.overlap=0"], "a figure is positive and finite"),
        ([LAPTOP, "parallelism=auto"], "hpctrain calibrate"),
        (["+exp=vision_city", "cluster.hardware=abacus"], "cluster.hardware=abacus: the catalogue has"),
        (["+exp=vision_city", "+cluster.figures.speed=9"], "cluster.figures.speed=9"),
        (["+exp=finance_callbot", "cluster.num_nodes=2", "parallelism=pp8"], "needs"),
    ],
)
def test_what_cannot_be_planned_is_refused(run: Run, overrides: list[str], words: str) -> None:  # noqa: F811
    said = run("plan", *overrides)
    assert said.code == 3 and words in said.err


def test_a_refused_plan_still_shows_what_would_do(run: Run) -> None:  # noqa: F811
    said = run("plan", "+exp=vision_city", "deadline=20h")
    assert "nodes for 20.0 h: more than 16" in said.out and "too late" in said.out


@pytest.mark.parametrize("experiment", ["vision_city", "finance_callbot"])
def test_the_readme_shows_what_the_plan_says(run: Run, experiment: str) -> None:  # noqa: F811
    page = (Path(__file__).parents[1] / "README.md").read_text()
    block = page.partition(f"hpctrain plan +exp={experiment}`")[2].split("```")[1]
    said = [line.rstrip() for line in run("plan", f"+exp={experiment}").out.splitlines()]
    shown = [line.removesuffix("…").rstrip() for line in block.strip("\n").splitlines()]
    assert len(shown) >= 4
    assert [line for line in shown if not any(whole.startswith(line) for whole in said)] == []
