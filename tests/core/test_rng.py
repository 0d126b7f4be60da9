"""Numbers that dropout follows from."""

from __future__ import annotations

import pytest
import torch

from hpctrain.core.rng import dropout_keys


@pytest.mark.parametrize(("seed", "step"), [(0, 0), (0, 6950), (0, 10**9), (2**33, 0), (12345678901, 10**7)])
def test_every_step_and_seed_has_keys(seed: int, step: int) -> None:
    keys_B = dropout_keys(seed, step, torch.tensor([0, 1, 2**40]))
    assert keys_B.dtype == torch.int64 and len(keys_B.unique()) == 3


def test_sequences_steps_and_seeds_have_keys_of_their_own() -> None:
    ids_B = torch.arange(1000)
    keys = [dropout_keys(seed, step, ids_B) for seed in (0, 1, 2) for step in (0, 1, 7000, 7001)]
    assert len(torch.cat(keys).unique()) == 12 * 1000
