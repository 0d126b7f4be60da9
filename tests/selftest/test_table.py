"""The table, from what rank 0 and the supervisor wrote into the ledger."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.launch.selftest import was_preempted
from hpctrain.run.directory import RunDirectory, free_name
from hpctrain.run.ledger import Ledger
from hpctrain.selftest.table import PREEMPTED, Row, facts, is_passed, read_rows, text

CHECKS = ["fp64  tp=2", "fp64  pp=2", PREEMPTED]
PLACE = {"device": "CPU", "ranks": 2, "nodes": 1, "torch": "2.14", "backend": "Gloo"}


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    """A selftest whose first attempt was begun, with its first check passed."""
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.append("frozen")
    ledger.append("start", attempt="7_0_1")
    ledger.append("selftest", checks=CHECKS, **PLACE)
    ledger.append("begun", check=CHECKS[0], attempt="7_0_1")
    ledger.append("checked", check=CHECKS[0], error="", seconds=1.5)
    return ledger


def errors(ledger: Ledger) -> list[str | None]:
    return [row.error for row in read_rows(ledger)]


def test_what_was_not_carried_out_has_not_passed(ledger: Ledger) -> None:
    assert errors(ledger) == ["", None, None]
    assert not is_passed(read_rows(ledger)) and not is_passed([])
    assert "1 of 3 checks passed: NOT PASSED" in text(ledger)


def test_a_check_that_ends_the_ranks_has_failed_with_their_cause(ledger: Ledger) -> None:
    ledger.append("begun", check=CHECKS[1], attempt="7_0_1")
    ledger.append("end", attempt="7_0_1", cause="crash", message="NCCL error: unhandled system error")
    passed, failed, left = errors(ledger)
    assert (passed, left) == ("", None)
    assert failed is not None and "crash: NCCL error" in failed and failed in text(ledger)


@pytest.mark.parametrize("cause", ["preemption", "time_limit", "node_failure", "lost"])
def test_a_check_that_was_under_way_when_slurm_took_the_job_is_done_again(ledger: Ledger, cause: str) -> None:
    ledger.append("begun", check=CHECKS[1], attempt="7_0_1")
    ledger.append("end", attempt="7_0_1", cause=cause, message="")
    assert errors(ledger) == ["", None, None]


def test_a_check_that_a_later_start_finished_counts_as_it_ended_there(ledger: Ledger) -> None:
    ledger.append("begun", check=PREEMPTED, attempt="7_0_1")
    ledger.append("end", attempt="7_0_1", cause="crash", message="else")
    for check in CHECKS[1:]:
        ledger.append("checked", check=check, error="", seconds=2.0)
    assert errors(ledger) == ["", "", ""] and is_passed(read_rows(ledger))
    assert "3 of 3 checks passed" in text(ledger) and "NOT" not in text(ledger)


def test_the_facts_say_where_the_table_was_made(ledger: Ledger) -> None:
    ledger.append("checked", check=CHECKS[1], error="rank 1: loss differs by 1.0e-01", seconds=2.0)
    told = facts(ledger)
    assert {key: told[key] for key in PLACE} == PLACE and told["passed"] is False
    assert told["checks"][1] == {
        "check": CHECKS[1],
        "error": "rank 1: loss differs by 1.0e-01",
        "seconds": 2.0,
    }


def test_a_run_without_a_check_has_no_table(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    assert read_rows(ledger) == [] and text(ledger) == "selftest: no check was begun"


def test_a_failed_row_shows_its_error_below_it() -> None:
    assert Row("tp=2", "differs", 1.25).text() == "ERROR       1.2 s  tp=2\n  differs"


def test_every_call_makes_a_run_of_its_own(tmp_path: Path) -> None:
    assert free_name(str(tmp_path), "selftest") == "selftest-1"
    (tmp_path / "selftest-1").mkdir()
    assert free_name(str(tmp_path), "selftest") == "selftest-2"


@pytest.mark.parametrize(
    ("check", "cause", "goes_on"),
    [(PREEMPTED, "preemption", True), (PREEMPTED, "crash", False), (CHECKS[1], "preemption", False)],
)
def test_only_its_own_signal_starts_it_again_without_slurm(
    ledger: Ledger, check: str, cause: str, goes_on: bool
) -> None:
    """Ctrl-C during a check ends it."""
    ledger.append("begun", check=check, attempt="7_0_1")
    ledger.append("end", attempt="7_0_1", cause=cause, message="")
    assert was_preempted(RunDirectory(ledger.path.parent)) is goes_on
