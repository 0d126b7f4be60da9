"""Evaluation over a layout has each sequence's loss once, and changes nothing."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from hpctrain.core.state import Kept, make_state
from tests.helpers.ranks import run_ranks
from tests.parity.cells import Cell, build, in_float64, make_batch, microbatches_of, train_plainly

CPU = torch.device("cpu")
CELLS = [
    Cell(pp=2, dp_shard=2, layers=4, schedule="interleaved_1f1b", stages_per_rank=2, num_microbatches=2),
    Cell(dp_replicate=2, tp=2, sequence_parallel=True, dropout=0.2),
    Cell(pp=4, layers=4, tied=True, num_microbatches=4),
]


def evaluate(rank: int, world: int, cell: Cell) -> tuple[list[float], list[float]]:
    """After a step: this rank's loss sums and weights of another step's sequences, in an odd group."""
    with in_float64():
        train = build(cell)
        hybrid = train.parallel
        hybrid.start(list)
        train(microbatches_of(cell, 0, hybrid.dp_rank), 0)
        hybrid.model.eval()
        batches = microbatches_of(cell, 1, hybrid.dp_rank)
        outputs = hybrid.eval_outputs([*batches, batches[0]])[:-1]
        hybrid.model.train()
        make_state(Kept(hybrid.model, train.optimizer), CPU)  # as a checkpoint after an evaluation does
        train(microbatches_of(cell, 1, hybrid.dp_rank), 1)
    dist.barrier()
    return (
        torch.cat([output["nll_N"] for output in outputs]).tolist(),
        torch.cat([output["weight_N"] for output in outputs]).tolist(),
    )


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_each_sequence_is_evaluated_once_without_dropout(cell: Cell) -> None:
    ranks = run_ranks(cell.world, evaluate, cell)
    losses = sorted(loss for own, _ in ranks for loss in own)
    weights = sorted(weight for _, own in ranks for weight in own)
    batch = make_batch(1, cell.packed)
    assert weights == pytest.approx(sorted(batch.weight_BL.sum(1).tolist()))
    assert losses == pytest.approx(sorted(plain_losses(cell)), rel=1e-10)


def plain_losses(cell: Cell) -> list[float]:
    """The same from the reference's weights after one step."""
    from hpctrain.models.decoder import Decoder

    with in_float64():
        model = Decoder(cell.model)
        model.load_state_dict(train_plainly(cell)[0]["values"])
        batch = make_batch(1, cell.packed)
        with torch.no_grad():
            nll_B: torch.Tensor = model(batch.token_BL, **batch.inputs())
    return nll_B.tolist()
