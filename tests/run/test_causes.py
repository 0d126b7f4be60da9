"""Which of the ranks' accounts explains the others."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.run.causes import CauseKind, RankCause, cause_path, classify, leave_cause, read_causes

K = CauseKind


def causes(*kinds: CauseKind | None) -> dict[int, RankCause]:
    """One account per rank; None: the rank left none."""
    return {
        rank: RankCause(rank, kind, f"rank {rank}: {kind}", time=float(rank))
        for rank, kind in enumerate(kinds)
        if kind is not None
    }


@pytest.mark.parametrize(
    ("kinds", "kind", "rank"),
    [
        ((K.done, K.done), K.done, None),
        ((K.preemption, K.preemption), K.preemption, None),
        ((K.time_limit, K.time_limit), K.time_limit, None),
        ((K.stop_file, K.stop_file), K.stop_file, None),
        ((K.peer_lost, K.crash, K.peer_lost), K.crash, 1),
        ((K.peer_lost, K.out_of_memory), K.out_of_memory, 1),
        ((K.hang, K.peer_lost), K.hang, 0),
        ((K.hang, K.crash), K.crash, 1),
        ((K.crash, K.out_of_memory), K.out_of_memory, 1),
        ((K.peer_lost, None, K.peer_lost), K.killed, 1),
        ((K.crash, None), K.crash, 0),
        ((None, None), K.killed, 0),
        ((K.done, None), K.killed, 1),
        ((K.preemption, None), K.killed, 1),
        ((K.peer_lost, K.preemption), K.peer_lost, 0),
        ((K.preemption, K.time_limit), K.preemption, None),
        ((K.done, K.preemption), K.preemption, None),
    ],
    ids=str,
)
def test_the_root_cause_explains_the_rest(
    kinds: tuple[CauseKind | None, ...], kind: CauseKind, rank: int | None
) -> None:
    found = classify(causes(*kinds), len(kinds))
    assert (found.kind, found.rank) == (kind, rank)


def test_the_first_of_two_crashes_is_the_root() -> None:
    later = RankCause(0, K.crash, "aftermath", time=9.0)
    first = RankCause(1, K.crash, "CUDA error", time=3.0)
    assert classify({0: later, 1: first}, 2).message == "CUDA error"


def test_every_kind_that_a_rank_can_leave_has_a_rule() -> None:
    for kind in K:
        if kind not in (K.node_failure, K.lost, K.killed):  # the supervisor's own words
            assert classify(causes(kind, kind), 2).kind is kind


def test_a_missing_account_names_the_ranks() -> None:
    assert "rank 1, 2" in classify(causes(K.peer_lost, None, None), 3).message


def test_the_first_cause_of_a_rank_counts(tmp_path: Path) -> None:
    try:
        raise RuntimeError("broken")
    except RuntimeError as error:
        leave_cause(tmp_path, "7_0_1", 1, K.crash, message="broken", step=4, saved_step=2, error=error)
    leave_cause(tmp_path, "7_0_1", 1, K.peer_lost, message="later")
    found = read_causes(tmp_path, "7_0_1", num_ranks=3)
    assert list(found) == [1]
    assert (found[1].kind, found[1].step, found[1].saved_step, found[1].rank) == (K.crash, 4, 2, 1)
    assert "RuntimeError: broken" in found[1].traceback


def test_accounts_of_another_attempt_do_not_count(tmp_path: Path) -> None:
    leave_cause(tmp_path, "7_0_1", 0, K.done)
    assert read_causes(tmp_path, "7_0_2", num_ranks=1) == {}
    assert read_causes(tmp_path, "7_0_11", num_ranks=1) == {}


def test_a_cause_file_is_whole_or_absent(tmp_path: Path) -> None:
    leave_cause(tmp_path, "7_0_1", 0, K.done)
    assert [path.name for path in tmp_path.iterdir()] == [cause_path(tmp_path, "7_0_1", 0).name]
