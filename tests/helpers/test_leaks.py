import os
import subprocess
from multiprocessing.shared_memory import SharedMemory

import pytest
import torch.distributed as dist

from tests.helpers.leaks import Surroundings


def test_a_quiet_test_leaves_nothing() -> None:
    assert Surroundings().leaks() == []


def test_a_changed_variable_is_reported_once_and_put_back() -> None:
    before = Surroundings()
    os.environ["HPCTRAIN_LEAK"] = "1"
    home = os.environ.pop("PATH")
    assert before.leaks() == ["environment variable HPCTRAIN_LEAK", "environment variable PATH"]
    assert os.environ["PATH"] == home and before.leaks() == []


def test_a_process_left_running_is_reported_and_ended() -> None:
    before = Surroundings()
    process = subprocess.Popen(["sleep", "60"])
    assert before.leaks() == [f"process {process.pid}: sleep 60 "]
    assert process.wait(5) == -9


def test_a_segment_of_shared_memory_is_reported_and_removed() -> None:
    before = Surroundings()
    segment = SharedMemory(create=True, size=16)
    segment.close()
    assert before.leaks() == [f"/dev/shm/{segment.name}"]
    with pytest.raises(FileNotFoundError):
        segment.unlink()


def test_a_process_group_left_initialised_is_reported_and_destroyed() -> None:
    before = Surroundings()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    assert before.leaks() == ["an initialised process group"]
    assert not dist.is_initialized()
