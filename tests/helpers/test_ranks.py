import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.helpers.polling import wait_until
from tests.helpers.processes import is_running
from tests.helpers.ranks import Exited, run_ranks


def test_ranks_form_one_group_and_answer_in_rank_order() -> None:
    def squares(rank: int, world: int, factor: int) -> torch.Tensor:
        x = torch.tensor([float(rank)])
        dist.all_reduce(x)
        return torch.stack([x[0], torch.tensor(float(rank * factor))])

    results = run_ranks(3, squares, 10)
    assert [result.tolist() for result in results] == [[3.0, 0.0], [3.0, 10.0], [3.0, 20.0]]


def test_the_first_error_is_raised_with_its_rank_and_traceback() -> None:
    def fails(rank: int, world: int) -> None:
        if rank == 1:
            raise KeyError("no such thing")
        dist.barrier()

    with pytest.raises(KeyError) as caught:
        run_ranks(2, fails)
    assert "on rank 1" in caught.value.__notes__[0] and "in fails" in caught.value.__notes__[0]


def test_a_rank_killed_on_purpose_leaves_a_sentinel_and_the_others_go_on() -> None:
    def dies(rank: int, world: int) -> str:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(RuntimeError):
            dist.all_reduce(torch.zeros(1))
        return "alive"

    assert run_ranks(2, dies, allow_exit=True) == ["alive", Exited(-signal.SIGKILL)]


def test_a_rank_that_dies_unexpectedly_is_an_error() -> None:
    with pytest.raises(ChildProcessError, match="rank 0 ended with 5"):
        run_ranks(1, lambda rank, world: os._exit(5))


def test_stragglers_and_their_children_are_killed_and_named(tmp_path: Path) -> None:
    def waits_for_ever(rank: int, world: int) -> None:
        if rank == 1:
            worker = multiprocessing.get_context("fork").Process(target=signal.pause)
            worker.start()
            (tmp_path / "worker").write_text(str(worker.pid))
            signal.pause()

    start_s = time.monotonic()
    with pytest.raises(TimeoutError, match=r"(?s)ranks \[1\] still ran.*in waits_for_ever"):
        run_ranks(2, waits_for_ever, timeout_s=1.5)
    assert time.monotonic() - start_s < 6
    worker = int((tmp_path / "worker").read_text())
    wait_until(lambda: not is_running(worker), 5, "the straggler's child is gone")
