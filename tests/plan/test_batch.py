"""Batch arithmetic."""

from __future__ import annotations

import pytest

from hpctrain.plan.batch import resolve_batch


@pytest.mark.parametrize(("global_batch", "dp"), [(64, 2), (4096, 32), (15, 3), (7, 1)])
def test_without_a_microbatch_a_rank_takes_its_whole_share(global_batch: int, dp: int) -> None:
    batch, findings = resolve_batch(global_batch, None, dp)
    assert findings == [] and batch is not None
    assert batch.num_microbatches == 1 and batch.microbatch_size * dp == global_batch


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
def test_microbatches_make_up_the_global_batch(size: int) -> None:
    batch, findings = resolve_batch(64, size, 4)
    assert findings == [] and batch is not None
    assert batch.microbatch_size == size
    assert 4 * batch.num_microbatches * batch.microbatch_size == batch.global_batch_size == 64


@pytest.mark.parametrize(
    ("given", "dp", "near"), [(63, 2, (62, 64)), (100, 32, (96,)), (3, 8, (8,)), (5, 4, (4,))]
)
def test_global_batch_must_divide_by_the_data_parallel_ranks(
    given: int, dp: int, near: tuple[int, ...]
) -> None:
    batch, (finding,) = resolve_batch(given, None, dp)
    assert batch is None
    assert f"optim.global_batch_size={given}" in finding and f"{dp} data-parallel ranks" in finding
    assert int(finding.split()[-1]) in near


@pytest.mark.parametrize("size", [3, 64, 0, -1])
def test_global_batch_must_divide_by_dp_times_microbatch(size: int) -> None:
    batch, (finding,) = resolve_batch(64, size, 2)
    assert batch is None
    assert f"parallelism.microbatch_size={size}" in finding and "32 samples" in finding


@pytest.mark.parametrize("given", [0, -4])
def test_an_empty_batch_is_refused(given: int) -> None:
    batch, (finding,) = resolve_batch(given, None, 1)
    assert batch is None and f"optim.global_batch_size={given}" in finding
