"""Times on real ranks, of work whose length is known."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hpctrain.config.schema import ClusterConfig, Config
from hpctrain.core.measure import Bench, StoppedError, collective, node_groups, open_bench, world_groups
from hpctrain.core.measure_storage import make_jpeg, measure_storage
from hpctrain.core.mesh import Mesh
from hpctrain.core.stop import SignalFlag
from hpctrain.plan.calibration import Row
from hpctrain.run.causes import CauseKind
from tests.helpers.ranks import run_ranks


def make_config(nodes: int, per_node: int, roots: list[list[int]] | None = None) -> Config:
    return Config(cluster=ClusterConfig(num_nodes=nodes, ranks_per_node=per_node, pcie_roots=roots or []))


def make_bench(rank: int, world: int, flag: SignalFlag | None = None) -> Bench:
    control = dist.new_group(backend="gloo", timeout=timedelta(seconds=30))
    assert isinstance(control, dist.ProcessGroup)
    mesh = Mesh(rank, rank, world, torch.device("cpu"), control)
    return open_bench(make_config(1, world), mesh, flag or SignalFlag())


def test_without_known_roots_neighbours_are_the_pairs_of_a_node() -> None:
    assert node_groups(make_config(1, 2)) == {"node2": [[0, 1]]}
    assert node_groups(make_config(1, 1)) == {}


def test_with_known_roots_pairs_under_a_root_and_across_roots_are_told_apart() -> None:
    groups = node_groups(make_config(1, 8, [[0, 1, 4, 5], [2, 3, 6, 7]]))
    assert groups["root"] == [[0, 1], [2, 3], [4, 5], [6, 7]]  # ranks fill one root after the other
    assert groups["node2"] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert groups["node4"] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert groups["node8"] == [list(range(8))]


def test_across_nodes_each_local_rank_has_its_group() -> None:
    groups = world_groups(make_config(2, 2))
    assert groups == {"node2": [[0, 1], [2, 3]], "network": [[0, 2], [1, 3]], "world": [[0, 1, 2, 3]]}


def sleep_on_ranks(rank: int, world: int) -> list[Row]:
    bench = make_bench(rank, world)
    bench.add("alone", 1, lambda: time.sleep(0.04 * (rank + 1)), repeats=3)
    bench.add("together", 1, lambda: time.sleep(0.04 * (rank + 1)), ranks=world, repeats=3)
    bench.add("first", 1, None if rank else lambda: time.sleep(0.04), repeats=3)
    bench.add("there and back", 1, lambda: time.sleep(0.08), parts=2, ranks=world, repeats=3)
    return bench.rows


def test_a_group_takes_as_long_as_its_last_rank_and_others_as_each_rank() -> None:
    rows, none = run_ranks(2, sleep_on_ranks)
    assert none == []
    alone, together, first, parts = rows
    assert len(alone.seconds) == 6 and len(together.seconds) == 3 and len(first.seconds) == 3
    # Sleeps are never shorter, and others use the cores too.
    assert min(alone.seconds) == pytest.approx(0.04, rel=0.2)
    assert min(together.seconds) == pytest.approx(0.08, rel=0.2)
    assert min(first.seconds) == pytest.approx(0.04, rel=0.2)
    assert min(parts.seconds) == pytest.approx(0.04, rel=0.2)


def stop_on_one_rank(rank: int, world: int) -> str:
    flag = SignalFlag()
    bench = make_bench(rank, world, flag)
    bench.add("before", 1, lambda: None, repeats=1)
    flag.cause = CauseKind.preemption if rank else None
    try:
        bench.add("after", 1, lambda: None, repeats=1)
    except StoppedError as stop:
        return stop.reason.value
    return "went on"


def test_a_signal_to_one_rank_ends_the_measurements_of_all() -> None:
    assert run_ranks(2, stop_on_one_rank) == ["preemption", "preemption"]


def moved(rank: int, world: int) -> list[float]:
    """Bytes that this rank's network device sends for each collective, over those of its tensors."""
    group = dist.new_group(backend="gloo")
    sent = []
    for what in ("all_reduce", "all_gather", "reduce_scatter"):
        work = collective(what, 3 * 2**20, group, torch.device("cpu"))
        work()
        dist.barrier()
        before = _sent_bytes()
        dist.barrier()  # nobody sends before it was read
        for _ in range(3):
            work()
        dist.barrier()
        sent.append((_sent_bytes() - before) / (3 * 3 * 2**20))
    return sent


def _sent_bytes() -> int:
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    return next(int(line.split()[9]) for line in lines if line.strip().startswith("lo:"))


def test_collectives_move_what_is_reckoned_for_them() -> None:
    """Over the loopback device all ranks' bytes are seen: 2 (n-1) and n-1 times the tensor. Others may use
    the device at the same time, so that only the lower bound holds."""
    all_reduce, all_gather, reduce_scatter = run_ranks(3, moved)[0]
    assert all_reduce > 4 and all_gather > 2 and reduce_scatter > 2


def measure_a_disk(rank: int, world: int, folder: Path) -> list[Any]:
    bench = make_bench(rank, world)
    measure_storage(bench, folder, folder / "no data")
    return [(row.what, row.group, row.size, min(row.seconds)) for row in bench.rows]


def test_a_disk_is_measured_in_the_run_directory_where_there_are_no_data(tmp_path: Path) -> None:
    write, read = run_ranks(2, measure_a_disk, tmp_path)[0]
    assert write[:3] == ("write", "", 2 * 32 * 2**20)
    assert read[:3] == ("read", "run", 2 * 32 * 2**20)
    assert all(1e6 < size / seconds < 1e12 for _, _, size, seconds in (write, read))
    assert list(tmp_path.iterdir()) == []


def test_the_picture_that_is_decoded_has_a_cameras_size() -> None:
    """0.15 bytes a pixel is what plan.image_bytes reckons."""
    assert len(make_jpeg(720, 960)) / (720 * 960) == pytest.approx(0.15, rel=0.2)
