"""Which cells a user's cluster is checked with."""

from __future__ import annotations

import pytest

from hpctrain.config.schema import Device
from hpctrain.selftest.cells import cells_for


@pytest.mark.parametrize("world", [1, 2, 3, 4, 6, 8, 12, 16, 32, 64])
def test_every_cell_is_legal_and_takes_all_ranks(world: int) -> None:
    cells = cells_for(world, Device.cuda)
    assert len(set(cells)) == len(cells)
    assert all(cell.world == world and cell.is_legal() for cell in cells)


@pytest.mark.parametrize("world", [2, 4, 8, 32])
def test_every_axis_and_their_combinations_are_checked(world: int) -> None:
    cells = cells_for(world, Device.cpu)
    assert 12 <= len(cells) <= 20
    axes = {
        axis for cell in cells for axis in ("pp", "dp_replicate", "dp_shard", "tp") if getattr(cell, axis) > 1
    }
    assert axes == {"pp", "dp_replicate", "dp_shard", "tp"}
    assert any(cell.sequence_parallel for cell in cells) and any(cell.schedule != "1f1b" for cell in cells)
    if world >= 4:
        assert any(cell.pp > 1 and cell.tp > 1 for cell in cells)
        assert any(cell.dp_replicate > 1 and cell.dp_shard > 1 for cell in cells)
    if world >= 8:
        assert any(cell.pp > 1 and cell.tp > 1 and cell.dp_replicate * cell.dp_shard > 1 for cell in cells)


def test_bf16_is_for_gpus() -> None:
    assert {cell.precision for cell in cells_for(2, Device.cpu)} == {"fp64", "fp32"}
    assert {cell.precision for cell in cells_for(2, Device.cuda)} == {"fp64", "fp32", "bf16"}
