"""All ranks go on, or all that are alive raise, within the time-out."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from hpctrain.checkpoint.exchange import Exchange
from hpctrain.errors import CheckpointError
from tests.helpers.polling import wait_until
from tests.helpers.ranks import Exited, run_ranks


def said(action):
    """What `action` raised, as text."""
    with pytest.raises(CheckpointError) as caught:
        action()
    return str(caught.value)


def fail(text):
    raise OSError(text)


def test_results_come_in_rank_order_and_rank_0_leads():
    def both(rank, world):
        with Exchange(dist.group.WORLD, 20, "try") as ranks:
            return ranks.everyone(lambda: 10 * rank), ranks.lead(lambda: f"rank {rank}")

    assert run_ranks(3, both) == [([0, 10, 20], "rank 0")] * 3


def test_a_failure_on_one_rank_is_raised_on_all_and_the_group_stays_usable():
    def one_fails(rank, world):
        with Exchange(dist.group.WORLD, 20, "try") as ranks:
            first = said(lambda: ranks.everyone(lambda: fail("disk full") if rank == 1 else None))
            second = said(lambda: ranks.lead(lambda: fail("no such folder")))
            return first, second, ranks.everyone(lambda: rank)

    texts = ("try\n  found: rank 1: OSError: disk full", "try\n  found: rank 0: OSError: no such folder")
    assert run_ranks(3, one_fails) == [(*texts, [0, 1, 2])] * 3


def test_reasons_of_several_ranks_are_all_said():
    def all_fail(rank, world):
        with Exchange(dist.group.WORLD, 20, "try") as ranks:
            return said(lambda: ranks.everyone(lambda: fail(f"reason {rank}")))

    expected = "try\n  found: rank 0: OSError: reason 0; rank 1: OSError: reason 1"
    assert run_ranks(2, all_fail) == [expected] * 2


@pytest.mark.parametrize("dead", [0, 1])
def test_a_dead_rank_is_an_error_on_all_others_at_once(dead):
    def one_dies(rank, world):
        with Exchange(dist.group.WORLD, 30, "try") as ranks:
            ranks.everyone(lambda: None)
            if rank == dead:
                os.kill(os.getpid(), signal.SIGKILL)
            began_s = time.monotonic()
            return said(lambda: ranks.everyone(lambda: None)), time.monotonic() - began_s

    results = run_ranks(3, one_dies, allow_exit=True)
    assert results.pop(dead) == Exited(-signal.SIGKILL)
    for text, seconds in results:
        assert "lost another rank" in text
        assert seconds < 10


def test_a_stalled_rank_is_an_error_within_the_timeout_whatever_the_groups_own(tmp_path):
    def one_stalls(rank, world):
        assert dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=60)
        with Exchange(dist.group.WORLD, 1, "try") as ranks:
            ranks.everyone(lambda: None)
            if rank == 1:
                wait_until(lambda: len(list(tmp_path.iterdir())) == 2, 30, "the others")
            began_s = time.monotonic()
            text = said(lambda: ranks.everyone(lambda: None))
            (tmp_path / str(rank)).touch()
            return text, time.monotonic() - began_s

    for text, seconds in run_ranks(3, one_stalls):
        assert "raise checkpoint.timeout_s (now 1 s)" in text
        assert seconds < 5
