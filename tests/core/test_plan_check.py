"""A run beside its plan: once, after warm-up, from medians."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpctrain.core.plan_check import PlanCheck
from hpctrain.plan.batch import BatchPlan
from hpctrain.plan.forecast import Forecast
from hpctrain.plan.layout import Layout
from hpctrain.plan.memory import GIB, RankMemory
from hpctrain.plan.plan import RunPlan
from hpctrain.plan.uncertainty import Interval
from hpctrain.run.drift import drift_lines
from hpctrain.run.ledger import Ledger

STEP_S = Interval(0.9, 1.0, 1.2)


def planned(step_s: Interval | None = STEP_S) -> RunPlan:
    forecast = None
    if step_s is not None:
        forecast = Forecast(
            step_s=step_s,
            parts={"compute": 0.95, "data": 0.05},
            influences=(),
            samples_per_step=64,
            tokens_per_sample=0,
            save_s=Interval(1, 1, 1),
            checkpoint_bytes=0,
            disk_bytes=0,
        )
    memory = RankMemory(
        weights=4 * GIB, gradients=4 * GIB, optimizer=8 * GIB, activations=0, working=0, gathered=0
    )
    return RunPlan(
        world_size=1,
        num_nodes=1,
        ranks_per_node=1,
        layout=Layout(pp=1, dp_replicate=1, dp_shard=1, tp=1),
        batch=BatchPlan(global_batch_size=64, microbatch_size=64, num_microbatches=1),
        memory=(memory,),
        forecast=forecast,
    )


def report(step: int, samples_per_s: float, wait: float = 0.05, memory: float = 16.0) -> dict[str, Any]:
    return {"step": step, "samples_per_s": samples_per_s, "data_wait": wait, "memory_gib": memory}


def compare(
    ledger: Path, reports: list[dict[str, Any]], plan: RunPlan | None = None
) -> dict[str, Any] | None:
    check = PlanCheck(plan or planned(), Ledger(ledger), "7_0_1", on_gpu=True)
    for each in reports:
        check.add(each)
    return Ledger(ledger).last("compared")


def test_the_median_after_the_first_report_is_compared_once(tmp_path: Path) -> None:
    rates = [4.0, 64.0, 32.0, 64.0, 1.0, 1.0, 1.0]  # compilation, then one hiccup, then what comes too late
    event = compare(tmp_path / "ledger.jsonl", [report(10 * i, rate) for i, rate in enumerate(rates)])
    assert event is not None
    assert (event["step_s"], event["step"], event["attempt"]) == (1.0, 30, "7_0_1")
    assert len([e for e in Ledger(tmp_path / "ledger.jsonl").events() if e["event"] == "compared"]) == 1
    assert drift_lines(event) == ["1 s a step, as planned (0.9–1.2)"]


def test_a_short_run_is_not_compared(tmp_path: Path) -> None:
    assert compare(tmp_path / "ledger.jsonl", [report(i, 64.0) for i in range(3)]) is None


def test_a_plan_without_a_time_is_not_compared(tmp_path: Path) -> None:
    assert compare(tmp_path / "ledger.jsonl", [report(i, 64.0) for i in range(9)], planned(None)) is None


@pytest.mark.parametrize(
    ("reports", "words"),
    [
        (report(1, 32.0), "2 s a step, 100% slower than planned (0.9–1.2)"),
        (report(1, 128.0), "0.5 s a step, 50% faster than planned (0.9–1.2)"),
        (report(1, 64.0, wait=0.4), "waits for data 40% of the time, planned 5%"),
        (report(1, 64.0, memory=20.0), "takes 20.0 GiB on rank 0, planned 16.0"),
    ],
)
def test_drift_is_told(reports: dict[str, Any], words: str, tmp_path: Path) -> None:
    event = compare(tmp_path / "ledger.jsonl", [reports] * 4)
    assert event is not None and words in drift_lines(event)
