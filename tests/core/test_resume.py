"""A resumed run repeats the undisturbed one bit for bit, through DDP, at any number of ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from hpctrain.checkpoint import reader, writer
from hpctrain.config.schema import GradientCompression, OptimizerKind
from hpctrain.core import rng
from hpctrain.core.data_parallel import sync_buffers
from hpctrain.core.state import Kept, make_state, restore_state
from tests.core.toy import OPTIM, build_step, build_toy, make_batch, microbatches_of
from tests.helpers.ranks import run_ranks

CPU = torch.device("cpu")
OPTIONS = {
    "adamw": replace(OPTIM, ema_decay=0.9),
    "sgd": replace(OPTIM, kind=OptimizerKind.sgd, ema_decay=0.9),
    "plain_sgd": replace(OPTIM, kind=OptimizerKind.sgd, momentum=0.0),
}


def train(rank, world, root, num_steps, save_at, optim, settle):
    """From the newest checkpoint, if there is one, to `num_steps`; returns all that the run consists of."""
    # 2.3 MiB of gradients in buckets of 1 MiB.
    model = build_toy("batch", width=272, depth=8, drop_rate=0.2)
    torch.manual_seed(1)
    batches = [microbatches_of(make_batch(index), rank, world, 2) for index in range(num_steps)]
    step = build_step(model, 1, optim=optim)
    state = make_state(Kept(model, step.optimizer, step.ema), CPU)
    loaded = reader.load(root, state=state, group=dist.group.WORLD, timeout_s=30)
    rng.seed_rank(0, rank, 0)
    first = 0
    if loaded is None:
        step.optimizer.state.clear()
    else:
        restore_state(state, loaded.per_rank, Kept(model, step.optimizer), CPU)
        first = loaded.step
    restored, ema = step.optimizer, step.ema
    step = build_step(
        model, world, optim=optim, bucket_mib=1, settle_with=batches[first][0] if settle else None
    )
    step.optimizer, step.ema = restored, ema
    for index in range(first, num_steps):
        step(batches[index], index)
        if index + 1 == save_at and loaded is None:
            sync_buffers(model, ema)
            writer.save(
                root,
                step=save_at,
                attempt="1_0_0",
                state=make_state(Kept(model, step.optimizer, ema), CPU),
                facts={},
                group=dist.group.WORLD,
                timeout_s=30,
                layout={"dp_replicate": world},
            )
    sync_buffers(model, ema)
    return flat(make_state(Kept(model, step.optimizer, ema), CPU)), first


def flat(state, prefix=""):
    found = {}
    for key, value in state.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value.detach().clone() if isinstance(value, torch.Tensor) else value
    return found


def differing(found, wanted):
    assert found.keys() == wanted.keys()
    return [
        name
        for name, value in found.items()
        if not (
            torch.equal(value, wanted[name]) if isinstance(value, torch.Tensor) else value == wanted[name]
        )
    ]


def run_twice(world, root, optim, settle):
    """Differences between four steps in a row, and the last two of them done by other processes."""
    undisturbed = run_ranks(world, train, root, 4, 2, optim, settle)
    resumed = run_ranks(world, train, root, 4, 0, optim, settle)
    assert {first for _, first in undisturbed} == {0} and {first for _, first in resumed} == {2}
    names = set(undisturbed[0][0])
    assert {"model.backbone.0.weight", "model.backbone.1.running_var", "per_rank.rng.cpu"} < names
    return [differing(a[0], b[0]) for a, b in zip(resumed, undisturbed, strict=True)], undisturbed


@pytest.mark.parametrize(("world", "kind"), [(2, "sgd"), (3, "adamw"), (4, "adamw"), (3, "plain_sgd")])
def test_a_resumed_run_equals_the_undisturbed_one_bit_for_bit(tmp_path, world, kind):
    differences, ranks = run_twice(world, tmp_path, OPTIONS[kind], True)
    assert differences == [[]] * world
    for state, _ in ranks[1:]:  # and all ranks hold the same, but for their own random numbers
        assert differing(state, ranks[0][0]) == ["per_rank.rng.cpu"]


def test_without_settled_buckets_a_resumed_run_differs(tmp_path):
    differences, _ = run_twice(4, tmp_path, OPTIONS["adamw"], False)
    assert all("model.backbone.0.weight" in names for names in differences)


def test_settling_changes_nothing_but_the_order_of_buckets():
    def settle(rank, world):
        model = build_toy("batch", drop_rate=0.5)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        random = torch.get_rng_state()
        step = build_step(model, world, settle_with=microbatches_of(make_batch(0), rank, world, 1)[0])
        assert differing(model.state_dict(), before) == []
        assert torch.equal(torch.get_rng_state(), random)
        assert all(parameter.grad is None for parameter in model.parameters())
        assert not step.optimizer.state

    run_ranks(2, settle)


def test_gradients_in_bf16_train_and_leave_all_ranks_the_same():
    def learn(rank, world):
        model = build_toy("layer")
        microbatches = microbatches_of(make_batch(0), rank, world, 2)
        step = build_step(
            model,
            world,
            optim=replace(OPTIM, num_epochs=10),
            compression=GradientCompression.bf16,
            settle_with=microbatches[0],
        )
        losses = []
        for index in range(30):
            loss = step(microbatches, index)["loss"]
            dist.all_reduce(loss)
            losses.append(float(loss))
        return losses, {name: value.clone() for name, value in model.state_dict().items()}

    (losses, first), (_, second) = run_ranks(2, learn)
    assert losses[-1] < 0.5 * losses[0]
    assert differing(first, second) == []
