"""The feed: order, waiting time, and the end of its workers."""

from __future__ import annotations

import os
import time

import pytest
import torch
from torch.utils.data import DataLoader

from hpctrain.core.feed import Feed
from tests.helpers.polling import wait_until
from tests.helpers.processes import children

CPU = torch.device("cpu")


def test_peeking_uses_nothing_up():
    feed = Feed([["a"], ["b"]], CPU)
    assert feed.peek() == feed.peek() == ["a"]
    assert list(feed) == [(["a"], ["a"]), (["b"], ["b"])]
    with pytest.raises(StopIteration):
        feed.peek()


def test_time_spent_waiting_for_the_loader_is_counted(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def load():
        for seconds in (3.0, 0.5):
            now[0] += seconds
            yield [seconds]

    feed = Feed(load(), CPU)
    feed.peek()
    now[0] += 10.0  # a step
    next(feed)
    next(feed)
    assert feed.waited_s == 3.5


def test_closing_ends_the_workers_in_mid_epoch():
    before = children(os.getpid())
    loader = DataLoader(range(1000), num_workers=2, batch_size=1, multiprocessing_context="fork")
    feed = Feed(loader, CPU)
    next(feed)
    assert len(children(os.getpid()) - before) == 2
    feed.close()
    wait_until(lambda: children(os.getpid()) <= before, 10, "the workers are gone", 0.01)


def test_closing_a_feed_that_never_began_starts_no_workers():
    before = children(os.getpid())
    Feed(DataLoader(range(10), num_workers=2, multiprocessing_context="fork"), CPU).close()
    assert children(os.getpid()) == before
