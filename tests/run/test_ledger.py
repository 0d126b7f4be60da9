"""The ledger survives being cut off, and tells attempts apart."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpctrain.run.ledger import Ledger


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "ledger.jsonl")


def test_a_ledger_that_does_not_exist_is_empty(ledger: Ledger) -> None:
    assert ledger.events() == [] and ledger.attempts() == [] and ledger.last("start") is None


def test_events_come_back_in_order_with_their_facts(ledger: Ledger) -> None:
    ledger.append("submitted", job="7")
    ledger.append("start", attempt="7_0_1", nodes=["a", "b"])
    assert [event["event"] for event in ledger.events()] == ["submitted", "start"]
    assert ledger.events()[1]["nodes"] == ["a", "b"]
    assert all(event["time"] > 1.7e9 for event in ledger.events())


@pytest.mark.parametrize("length", range(1, 40, 6))
def test_a_torn_last_line_is_skipped_and_costs_no_later_event(ledger: Ledger, length: int) -> None:
    ledger.append("start", attempt="1_0_1")
    torn = json.dumps({"event": "saved", "attempt": "1_0_1", "step": 5})[:length]
    with ledger.path.open("a") as handle:
        handle.write(torn)
    assert [event["event"] for event in ledger.events()] == ["start"]
    ledger.append("end", attempt="1_0_1", cause="lost")
    ledger.append("start", attempt="1_1_1")
    assert [event["event"] for event in ledger.events()] == ["start", "end", "start"]


def test_lines_that_are_no_events_are_skipped(ledger: Ledger) -> None:
    ledger.path.write_bytes(b'7\n[]\n{"step": 1}\n\xff\xfe\n\n')
    ledger.append("start", attempt="1_0_1")
    assert [event["event"] for event in ledger.events()] == ["start"]


def test_last_finds_the_newest_event_of_its_kind(ledger: Ledger) -> None:
    ledger.append("submitted", job="1")
    ledger.append("submitted", job="2")
    ledger.append("start", attempt="2_0_1")
    assert ledger.last("submitted")["job"] == "2"  # type: ignore[index]


def test_attempts_gather_their_own_events(ledger: Ledger) -> None:
    ledger.append("start", attempt="1_0_1")
    ledger.append("saved", attempt="1_0_1", step=10)
    ledger.append("saved", attempt="1_0_1", step=20)
    ledger.append("end", attempt="1_0_1", cause="preemption")
    ledger.append("start", attempt="1_1_1")
    ledger.append("restored", attempt="1_1_1", step=20)
    first, second = ledger.attempts()
    assert (first.name, first.restored_step, first.saved_step) == ("1_0_1", None, 20)
    assert first.end is not None and first.end["cause"] == "preemption"
    assert (second.restored_step, second.saved_step, second.end) == (20, None, None)


@pytest.mark.parametrize(
    ("restored", "saved", "progressed"),
    [(None, None, False), (None, 0, False), (None, 5, True), (5, None, False), (5, 5, False), (5, 6, True)],
)
def test_an_attempt_progressed_if_it_saved_beyond_where_it_began(
    ledger: Ledger, restored: int | None, saved: int | None, progressed: bool
) -> None:
    ledger.append("start", attempt="1_0_1")
    if restored is not None:
        ledger.append("restored", attempt="1_0_1", step=restored)
    if saved is not None:
        ledger.append("saved", attempt="1_0_1", step=saved)
    (attempt,) = ledger.attempts()
    assert attempt.progressed is progressed


def test_budgets_begin_anew_when_a_person_sends_the_run_whatever_the_clocks_say(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.append("frozen", code="a")
    ledger.append("start", attempt="1_0_1")
    ledger.append("frozen", code="a")
    ledger.append("start", attempt="2_0_1")
    lines = ledger.path.read_text().splitlines()
    # The login node's clock is five minutes ahead of the batch host's.
    shifted = [json.loads(line) for line in lines]
    shifted[2]["time"] += 300
    ledger.path.write_text("\n".join(map(json.dumps, shifted)) + "\n")
    assert [attempt.name for attempt in ledger.since_frozen()] == ["2_0_1"]
    assert [attempt.name for attempt in ledger.attempts()] == ["1_0_1", "2_0_1"]
