from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from hpctrain.data.order import (
    EpochOrder,
    Stream,
    random_bits,
    rank_positions,
    samples_after,
    steps_before,
    steps_per_epoch,
)

SHAPES = [(1, 1, 1), (10, 3, 2), (1000, 16, 4), (1000, 16, 1000), (257, 256, 1), (4096, 1, 64)]


def _philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x64-10 from the paper (Salmon et al., SC'11, §3.3), in plain Python."""
    mask, x, k = 2**64 - 1, list(counter), list(key)
    for _ in range(10):
        first, second = 0xD2E7470EE14C6C93 * x[0], 0xCA5A826395121157 * x[2]
        x = [(second >> 64) ^ x[1] ^ k[0], second & mask, (first >> 64) ^ x[3] ^ k[1], first & mask]
        k = [(k[0] + 0x9E3779B97F4A7C15) & mask, (k[1] + 0xBB67AE8584CAA73B) & mask]
    return x


def test_random_bits_are_philox_of_seed_epoch_stream_and_index() -> None:
    # The known answer of Random123 for zeros shows that the reference itself is right.
    assert _philox([0] * 4, [0] * 2) == [
        0x16554D9ECA36314C,
        0xDB20FE9D672D0FDC,
        0xD7E772CEE186176B,
        0x7E68B68AEC7BA23B,
    ]
    words = random_bits(7, 3, Stream.augment, 123, 8).tolist()
    stream = int(Stream.augment)
    assert words == _philox([1, 0, 123, stream], [7, 3]) + _philox([2, 0, 123, stream], [7, 3])


@pytest.mark.parametrize(("num_samples", "block", "window"), SHAPES)
def test_every_sample_comes_exactly_once(num_samples: int, block: int, window: int) -> None:
    order = EpochOrder(num_samples, 1, 2, block, window)
    assert sorted(order.slice(0, num_samples).tolist()) == list(range(num_samples))


@pytest.mark.parametrize(("num_samples", "block", "window"), SHAPES)
def test_a_slice_is_that_piece_of_the_whole_order(num_samples: int, block: int, window: int) -> None:
    whole = EpochOrder(num_samples, 1, 2, block, window).slice(0, num_samples)
    rng = np.random.Generator(np.random.PCG64(0))
    for start, stop in rng.integers(0, num_samples + 20, (30, 2)).tolist():
        fresh = EpochOrder(num_samples, 1, 2, block, window)
        np.testing.assert_array_equal(fresh.slice(start, stop), whole[start:stop])


def test_seed_and_epoch_change_the_order() -> None:
    orders = {
        tuple(EpochOrder(500, seed, epoch, 8, 4).slice(0, 500).tolist())
        for seed in range(3)
        for epoch in range(3)
    }
    assert len(orders) == 9


def test_a_window_mixes_whole_blocks_of_neighbours() -> None:
    order = EpochOrder(1000, 5, 0, 16, 4)
    position = 0
    for window in range(order.num_windows):
        blocks = order.blocks_of(window)
        ids = [i for first, after in blocks for i in range(first, after)]
        mixed = order.slice(position, position + len(ids)).tolist()
        assert sorted(mixed) == sorted(ids) and mixed != ids
        assert all(first % 16 == 0 and after == min(first + 16, 1000) for first, after in blocks)
        assert {order.window_at(each) for each in range(position, position + len(ids))} == {window}
        position += len(ids)
    assert position == 1000


def test_every_stretch_of_a_window_takes_evenly_from_its_blocks() -> None:
    order = EpochOrder(64 * 32 - 10, 5, 0, 64, 16)  # the last block is shorter
    for window in range(order.num_windows):
        blocks = order.blocks_of(window)
        length = sum(after - first for first, after in blocks)
        start = next(i for i in range(len(order)) if order.window_at(i) == window)
        for at in range(0, length - 128, 37):
            ids = order.slice(start + at, start + at + 128)
            for first, after in blocks:
                taken = int(((ids >= first) & (ids < after)).sum())
                assert abs(taken - 128 * (after - first) / length) < 2


def test_neighbours_in_the_order_of_a_window_are_not_bound_to_each_other() -> None:
    # Batches smaller than a window has blocks must not go round the same groups of blocks again and again.
    order = EpochOrder(4096, 5, 0, 64, 64)
    met = {
        (int(a) // 64, int(b) // 64)
        for at in range(0, 4096, 16)
        for ids in [order.slice(at, at + 16)]
        for a in ids
        for b in ids
    }
    assert len(met) > 0.9 * 64 * 64


def test_twenty_million_samples_cost_little_memory() -> None:
    tracemalloc.start()
    order = EpochOrder(20_000_000, 0, 0, 256, 16)
    ids = order.slice(10_000_000, 10_000_480)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(set(ids.tolist())) == 480
    assert peak_bytes < 10e6  # a materialised order would take 160 MB


def test_positions_past_the_end_start_again_at_the_front() -> None:
    order = EpochOrder(10, 0, 0, 4, 2)
    whole = order.slice(0, 10).tolist()
    assert order.ids_at(np.arange(8, 24)).tolist() == whole[8:] + whole + whole[:4]
    assert order.ids_at(np.arange(20, 22)).tolist() == whole[:2]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_ranks_share_a_batch_in_contiguous_slices(world: int) -> None:
    shares = [rank_positions(5, 24, rank, world) for rank in range(world)]
    assert np.concatenate(shares).tolist() == list(range(120, 144))


def test_samples_consumed_count_no_padding_and_lead_back_to_the_step() -> None:
    assert steps_per_epoch(90, 24) == 4
    assert [samples_after(steps, 90, 24) for steps in range(6)] == [0, 24, 48, 72, 90, 114]
    assert all(steps_before(samples_after(steps, 90, 24), 90, 24) == steps for steps in range(50))
    assert steps_before(25, 90, 24) is None
