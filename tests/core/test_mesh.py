"""Which GPU is a rank's."""

from __future__ import annotations

import pytest

from hpctrain.core.mesh import device_index
from hpctrain.errors import RunError


@pytest.mark.parametrize("local_rank", range(8))
def test_a_task_that_sees_one_gpu_takes_it_and_one_that_sees_all_takes_its_own(local_rank):
    assert device_index(local_rank, 1) == 0
    assert device_index(local_rank, 8) == local_rank


@pytest.mark.parametrize(("local_rank", "num_visible"), [(4, 4), (7, 4), (0, 0)])
def test_two_ranks_never_share_a_gpu(local_rank, num_visible):
    with pytest.raises(RunError):
        device_index(local_rank, num_visible)
