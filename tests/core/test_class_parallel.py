"""A margin head whose identities are shared out over ranks equals the whole head; how it samples.

Shapes: C identities, N samples, S sampled identities.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from hpctrain.config.schema import GradientCompression, Margin
from hpctrain.core.class_parallel import GroupShard, apply_class_parallel
from hpctrain.core.flops import count_training_flops
from hpctrain.errors import ConfigError
from hpctrain.models.heads import IdentityHead, sample_classes
from tests.core.class_parallel_toy import (
    CLIP_NORM,
    C,
    D,
    FaceModel,
    Trainer,
    build_model,
    build_sharded,
    make_batches,
    plain_loss,
    train_plainly,
    whole,
    whole_mesh,
)
from tests.core.toy import ToyBatch, microbatches_of
from tests.helpers.ranks import run_ranks

KIND = (Margin.arcface, 0.5, 64.0)
TOLERANCE = 1e-10  # float64 sums in another order differ by about 1e-14; a lost term by 1e-4 and more


def train_sharded(
    rank: int,
    world: int,
    margin: Margin,
    num_microbatches: int,
    break_it: Callable[[FaceModel], None] | None = None,
) -> list[dict[str, Any]]:
    model = build_sharded(margin)
    if break_it is not None:
        break_it(model)
    trainer, told = Trainer(model, world), []
    batches = [microbatches_of(batch, rank, world, num_microbatches) for batch in make_batches()]
    trainer.replicate(batches[0][0])
    for microbatches in batches:
        facts: dict[str, Any] = {"loss": trainer.backward(microbatches)}
        facts["grads"] = {n: whole(p.grad) for n, p in model.named_parameters()}
        facts["norm"] = trainer.update()
        facts["values"] = {n: whole(p) for n, p in model.named_parameters()}
        told.append(facts)
    return told


def differences(found: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> set[str]:
    wrong = set()
    for ours, plain in zip(found, wanted, strict=True):
        wrong |= {key for key in ("loss", "norm") if abs(ours[key] - plain[key]) > TOLERANCE}
        for key in ("grads", "values"):
            assert ours[key].keys() == plain[key].keys()
            for name, value in ours[key].items():
                if not torch.allclose(value, plain[key][name], rtol=0, atol=TOLERANCE):
                    wrong.add(f"{key} {name}")
    return wrong


# Parity


@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("margin", list(Margin))
def test_three_steps_equal_one_process_that_holds_all_identities(margin, world, num_microbatches):
    wanted = train_plainly(margin)
    assert wanted[0]["norm"] > CLIP_NORM  # clipping has something to do
    for found in run_ranks(world, train_sharded, margin, num_microbatches):
        assert differences(found, wanted) == set()


def only_own_sum(self: GroupShard, value: Tensor) -> None:
    pass


def only_own_scatter(self: GroupShard, value: Tensor) -> Tensor:
    return value.chunk(self.num_ranks)[self.rank].clone()


def break_method(name: str, method: Any, model: FaceModel) -> None:
    shard: Any = model.identity_head.shard
    setattr(shard, name, partial(method, shard))


def break_division(model: FaceModel) -> None:
    model.identity_head.weight.register_hook(lambda gradient: gradient * 2)


def break_start(model: FaceModel) -> None:
    shard: Any = model.identity_head.shard
    shard.start = 0


@pytest.mark.parametrize(
    ("break_it", "seen"),
    [
        (partial(break_method, "sum_", only_own_sum), "loss"),
        (partial(break_method, "max_", only_own_sum), "loss"),
        (partial(break_method, "scatter_sum", only_own_scatter), "grads backbone.0.weight"),
        (break_division, "grads identity_head.weight"),
        (break_start, "loss"),
    ],
)
def test_the_comparison_sees_a_broken_head(break_it, seen):
    wanted = train_plainly(Margin.arcface)
    for found in run_ranks(2, train_sharded, Margin.arcface, 1, break_it):
        assert seen in differences(found[:1], wanted[:1])


def test_initial_rows_do_not_depend_on_the_number_of_ranks():
    def rows(rank: int, world: int) -> tuple[Tensor, int, Tensor]:
        torch.manual_seed(9)
        model = nn.ModuleDict({"head": IdentityHead(3, 2500, *KIND, class_parallel=True)})
        after = torch.rand(())
        (head,) = apply_class_parallel(model, whole_mesh())
        return whole(head.weight), len(head.weight.to_local()), after

    torch.manual_seed(9)
    wanted = IdentityHead(3, 2500, *KIND).weight.detach()
    after = torch.rand(())
    assert abs(float(wanted.std()) - 0.01) < 3e-4 and len(wanted.unique(dim=0)) == 2500
    for world, counts in ((1, [2500]), (3, [834, 834, 832])):
        found = run_ranks(world, rows)
        assert [count for _, count, _ in found] == counts
        for weight, _, then in found:
            assert torch.equal(weight, wanted) and torch.equal(then, after)


def test_only_own_rows_of_a_million_identities_are_held_with_gradient_and_adam_state():
    """The numbers of docs/your_model.md."""

    def rank_of_32(rank: int, world: int) -> tuple[int, int]:
        dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=17, world_size=32)
        model = nn.ModuleDict({"head": IdentityHead(512, 1_000_000, *KIND, class_parallel=True)})
        (head,) = apply_class_parallel(model, init_device_mesh("cpu", (32,)))
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        head.weight.grad = torch.zeros_like(head.weight)
        optimizer.step()
        state = optimizer.state[head.weight]
        held = [head.weight, head.weight.grad, state["exp_avg"], state["exp_avg_sq"]]
        return sum(value.to_local().nbytes for value in held), head.shard.start

    assert run_ranks(1, rank_of_32) == [(4 * 31_250 * 512 * 4, 17 * 31_250)]
    assert 4 * 31_250 * 512 * 4 == 256_000_000 and 4 * 1_000_000 * 512 * 4 == 8_192_000_000


def test_fewer_identities_than_give_every_rank_one_are_refused():
    def apply(rank: int, world: int) -> None:
        head = IdentityHead(4, 5, *KIND, class_parallel=True)
        with pytest.raises(ConfigError, match="5 identities over 4 ranks"):
            apply_class_parallel(nn.ModuleDict({"head": head}), whole_mesh())

    run_ranks(4, apply)


def test_compression_of_gradients_leaves_the_rows_alone():
    def gradients(rank: int, world: int) -> list[dict[str, Tensor]]:
        told = []
        for compression in GradientCompression:
            trainer = Trainer(build_sharded(), world, compression)
            microbatches = microbatches_of(make_batches()[0], rank, world, 1)
            trainer.replicate(microbatches[0])
            trainer.backward(microbatches)
            told.append({name: whole(p.grad) for name, p in trainer.model.named_parameters()})
        return told

    for plain, compressed in run_ranks(2, gradients):
        same = {name for name, gradient in plain.items() if torch.equal(gradient, compressed[name])}
        assert same == {"identity_head.weight"}


def test_the_flops_of_a_sample_are_those_of_the_whole_head():
    def count(rank: int, world: int) -> float:
        return count_training_flops(build_sharded(), microbatches_of(make_batches()[0], rank, world, 1)[0])

    whole_flops = count_training_flops(build_model(), make_batches()[0])
    # The larger of two shares has 6 of 11 identities, and sees the samples of both ranks.
    shares = [whole_flops + 3 * 2 * D * (2 * rows - C) for rows in (6, 5)]
    assert run_ranks(2, count) == shares


@pytest.mark.parametrize("sample_rate", [0.5, 1.0])
def test_no_value_is_read_back_to_the_host(sample_rate):
    def step(rank: int, world: int) -> None:
        dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
        mesh, labels = whole_mesh(), torch.arange(-1, 7)
        model = nn.ModuleDict(
            {"head": IdentityHead(D, 300, *KIND, class_parallel=True, sample_rate=sample_rate)}
        )
        # Fake tensors have no values: what needs one, or has a shape that depends on one, raises.
        with FakeTensorMode(allow_non_fake_inputs=True):
            (head,) = apply_class_parallel(model, mesh)
            embedding_BD = torch.randn(8, D, requires_grad=True)
            head(embedding_BD, labels, torch.ones(8)).backward()
            assert embedding_BD.grad.shape == (8, D) and head.weight.grad.to_local().shape == (75, D)

    run_ranks(1, step)


# Sampling


def test_a_sample_of_classes_has_all_labels_and_the_asked_number():
    random = torch.Generator().manual_seed(0)
    for trial in range(50):
        label_N = torch.randint(-20, 60, (16,), generator=random)  # 40 … 59 and below 0 are another shard's
        index_S = sample_classes(label_N, 40, 20, torch.Generator().manual_seed(trial))
        own = set(label_N.tolist()) & set(range(40))
        assert len(own) > 0 and own <= set(index_S.tolist())
        assert index_S.tolist() == sorted(set(index_S.tolist())) and len(index_S) == 20
    assert torch.equal(index_S, sample_classes(label_N, 40, 20, torch.Generator().manual_seed(49)))


def test_every_negative_is_equally_likely_and_their_sum_is_estimated_without_bias():
    trials, num_classes, num_sampled = 4000, 40, 12
    label_N = torch.tensor([3, 3, 17, 39, -5])
    positive_C = torch.zeros(num_classes, dtype=torch.bool).index_fill_(0, label_N[:4], True)
    mass_C = torch.exp(torch.randn(num_classes, generator=torch.Generator().manual_seed(1)).double())
    count_C, sums = torch.zeros(num_classes), []
    random = torch.Generator().manual_seed(2)
    for _ in range(trials):
        index_S = sample_classes(label_N, num_classes, num_sampled, random)
        count_C[index_S] += 1
        sums.append(mass_C[index_S][~positive_C[index_S]].sum())
    share = (num_sampled - 3) / (num_classes - 3)
    deviation = math.sqrt(trials * share * (1 - share))
    assert (count_C[positive_C] == trials).all()
    assert (count_C[~positive_C] - trials * share).abs().max() < 5 * deviation
    estimate = torch.stack(sums) / share
    error = estimate.std() / math.sqrt(trials)
    assert abs(estimate.mean() - mass_C[~positive_C].sum()) < 5 * error


def sampled_gradients(rank: int, world: int, steps: list[int], rate: float) -> list[dict[str, Tensor]]:
    """Loss and gradients of the same few samples in each of the steps."""
    trainer, told = Trainer(build_sharded(sample_rate=rate), world), []
    microbatches = microbatches_of(few_samples(), rank, world, 1)
    trainer.replicate(microbatches[0])
    for step in steps:
        trainer.model.identity_head.begin_step(step)
        loss = trainer.backward(microbatches)
        told.append({name: whole(p.grad) for name, p in trainer.model.named_parameters()})
        told[-1]["loss"] = torch.tensor(loss, dtype=torch.float64)
    return told


def few_samples() -> ToyBatch:
    return make_batches()[0].cut(slice(0, 4))  # fewer than a rank has identities: there is room for negatives


def test_a_sampled_step_is_the_softmax_over_own_identities_and_as_many_others_as_asked():
    model, batch = build_model(), few_samples()
    positive = set(batch.identity_B[batch.identity_B >= 0].tolist())
    kept_sets = set()
    first, second = run_ranks(2, sampled_gradients, [0, 1, 2, 0], 0.75)
    for ours, theirs in zip(first, second, strict=True):
        kept_C = ours["identity_head.weight"].any(1)  # the softmax is nowhere 0
        assert int(kept_C[:6].sum()) == 5 and int(kept_C[6:].sum()) == 4  # ceil(0.75 · 6), ceil(0.75 · 5)
        assert positive <= set(kept_C.nonzero().flatten().tolist())
        kept_sets.add(tuple(kept_C.tolist()))
        model.zero_grad()
        loss = plain_loss(model, batch, Margin.arcface, kept_C)
        loss.backward()
        wanted = {name: p.grad for name, p in model.named_parameters()} | {"loss": loss.detach()}
        for found in (ours, theirs):
            torch.testing.assert_close(found, wanted, rtol=0, atol=TOLERANCE)
    assert torch.equal(first[0]["identity_head.weight"], first[3]["identity_head.weight"])
    assert len(kept_sets) > 1


def test_a_sample_that_has_room_for_all_is_the_full_softmax():
    for ours, full in zip(
        run_ranks(2, sampled_gradients, [0], 0.99), run_ranks(2, sampled_gradients, [0], 1.0), strict=True
    ):
        assert all(torch.equal(ours[0][name], value) for name, value in full[0].items())
