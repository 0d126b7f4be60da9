"""A sharded margin head is saved, and gone on with on as many ranks, on others, and as a whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hpctrain.checkpoint import reader, store, writer
from hpctrain.core.state import Kept, make_state, restore_state
from tests.core.class_parallel_toy import SIZE, Trainer, build_model, build_sharded, make_batches, whole
from tests.core.toy import microbatches_of
from tests.helpers.ranks import run_ranks

CPU = torch.device("cpu")
TOLERANCE = 1e-10  # float64 sums in another order differ by about 1e-14


def train_from_newest(
    rank: int, world: int, root: Any, num_steps: int, save_at: int, rate: float
) -> tuple[dict[str, Tensor], int]:
    model = build_sharded(sample_rate=rate)
    trainer = Trainer(model, world)
    state = make_state(Kept(model, trainer.optimizer), CPU)
    loaded = reader.load(root, state=state, group=dist.group.WORLD, timeout_s=30)
    first = loaded.step if loaded else 0
    if loaded:
        restore_state(state, loaded.per_rank, Kept(model, trainer.optimizer), CPU)
    else:
        trainer.optimizer.state.clear()
    size = SIZE if rate == 1.0 else world  # so few that there is room for negatives
    batches = [microbatches_of(b.cut(slice(size)), rank, world, 1) for b in make_batches(num_steps)]
    trainer.replicate(batches[first][0])
    for index in range(first, num_steps):
        model.identity_head.begin_step(index)
        trainer.backward(batches[index])
        trainer.update()
        if index + 1 == save_at:
            state = make_state(Kept(model, trainer.optimizer), CPU)
            place = {"attempt": "1_0_0", "facts": {}, "layout": {}, "timeout_s": 30}
            writer.save(root, step=save_at, state=state, group=dist.group.WORLD, **place)
    moments = trainer.optimizer.state[model.identity_head.weight]
    told = {name: whole(p) for name, p in model.named_parameters()}
    return told | {name: whole(value) for name, value in moments.items()}, first


@pytest.mark.parametrize("rate", [0.5, 1.0])
def test_on_as_many_ranks_a_resumed_run_equals_the_undisturbed_one_bit_for_bit(tmp_path, rate):
    undisturbed = run_ranks(3, train_from_newest, tmp_path, 4, 2, rate)
    resumed = run_ranks(3, train_from_newest, tmp_path, 4, 0, rate)
    for (wanted, start), (found, first) in zip(undisturbed, resumed, strict=True):
        assert (start, first) == (0, 2)
        assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


@pytest.mark.parametrize("saved_by, loaded_by", [(2, 3), (4, 1), (1, 4)])
def test_a_checkpoint_of_some_ranks_is_gone_on_with_by_others(tmp_path, saved_by, loaded_by):
    ((wanted, _), *_) = run_ranks(saved_by, train_from_newest, tmp_path, 3, 2, 1.0)
    for found, first in run_ranks(loaded_by, train_from_newest, tmp_path, 3, 0, 1.0):
        assert first == 2
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=TOLERANCE)


def test_a_sharded_checkpoint_is_read_as_a_whole_model_without_ranks(tmp_path):
    ((wanted, _), *_) = run_ranks(3, train_from_newest, tmp_path, 2, 2, 1.0)
    (checkpoint,) = store.find(tmp_path)
    model = build_model()
    model.load_state_dict(reader.load_full(checkpoint.path, ("model",))["model"])
    assert all(torch.equal(value, wanted[name]) for name, value in model.named_parameters())
