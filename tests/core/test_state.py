"""The hash of samples, progress, random numbers."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hpctrain.core import rng
from hpctrain.core.mesh import Mesh
from hpctrain.core.state import Progress, hash_samples
from tests.core.toy import make_batch, microbatches_of
from tests.helpers.ranks import run_ranks

NUM_STEPS = 6
MASK = (1 << 64) - 1


def make_mesh(rank, world):
    return Mesh(rank, rank, world, torch.device("cpu"), dist.group.WORLD)


def splitmix64(state):
    """Vigna's splitmix64.c after adding the increment, in Python's integers."""
    z = state & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def test_the_hash_is_the_sum_of_mixed_samples():
    ids = [0, 5, 123456789]
    wanted = sum(splitmix64(i + 4 * 0x9E3779B97F4A7C15) for i in ids) & MASK
    assert hash_samples(np.array(ids), 3) == wanted


def hash_on(rank, world, num_microbatches, resume_at=None):
    mesh, progress = make_mesh(rank, world), Progress()
    for step in range(NUM_STEPS):
        if step == resume_at:
            facts = progress.to_facts(progress.total_hash(mesh))
            progress = Progress.from_facts(step, facts)
        progress.advance(microbatches_of(make_batch(step), rank, world, num_microbatches), 24)
    return progress.total_hash(mesh), progress.samples_consumed


@pytest.mark.parametrize(("world", "num_microbatches", "resume_at"), [(2, 1, None), (3, 2, None), (4, 1, 3)])
def test_the_hash_does_not_depend_on_ranks_microbatches_or_a_resume(world, num_microbatches, resume_at):
    wanted = sum(hash_samples(make_batch(step).sample_id_B.numpy(), step) for step in range(NUM_STEPS)) & MASK
    found = run_ranks(world, hash_on, num_microbatches, resume_at)
    assert found == [(wanted, 24 * NUM_STEPS)] * world


@pytest.mark.parametrize("order", [[0, 1, 1, 3], [0, 1, 3], [0, 2, 1, 3], [0, 1, 2, 3, 3], [1, 2, 3, 4]])
def test_a_repeated_missing_or_swapped_batch_changes_the_hash(order):
    def total(batches):
        return (
            sum(
                hash_samples(make_batch(batch).sample_id_B.numpy(), step)
                for step, batch in enumerate(batches)
            )
            & MASK
        )

    assert total(order) != total([0, 1, 2, 3])


def test_a_sample_in_another_order_within_its_step_does_not_change_the_hash():
    ids = np.arange(100)
    assert hash_samples(ids, 3) == hash_samples(ids[::-1], 3)


def test_damaged_samples_are_kept_until_they_are_written_down():
    progress = Progress()
    ids = torch.arange(2)
    progress.advance([SimpleNamespace(sample_id_B=ids, damaged=[(1, "truncated")])], 2)
    progress.advance([SimpleNamespace(sample_id_B=ids, damaged=[])], 2)
    assert progress.damaged == [(1, "truncated")]


def test_ranks_draw_different_numbers_and_a_start_at_a_step_the_same_ones():
    def draw(seed, rank, step):
        with torch.random.fork_rng(devices=[]):
            rng.seed_rank(seed, rank, step)
            return tuple(torch.rand(4).tolist())

    drawn = {draw(seed, rank, step) for seed in (0, 1) for rank in range(3) for step in range(3)}
    assert len(drawn) == 18
    assert draw(5, 1, 2) == draw(5, 1, 2)


def test_large_and_negative_seeds_are_taken():
    with torch.random.fork_rng(devices=[]):
        for seed in (2**40, 20_261_130_123_456, -1):
            rng.seed_weights(seed)
            rng.seed_rank(seed, 511, 10**7)
