"""A step gives the same, however the batch is cut over ranks and microbatches: float64, 1e-10."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.core.toy import build_step, build_toy, make_batch, microbatches_of, train_plainly
from tests.helpers.ranks import run_ranks

NUM_STEPS = 3
SIZE = 24
TOLERANCE = 1e-10  # float64 sums in another order differ by about 1e-15; fp32 or a lost term by 1e-7 and more


def make_batches():
    return [make_batch(0, padding=0), make_batch(1, padding=0), make_batch(2)]


def train_ours(rank, world, norm, num_microbatches, break_it=None, compiled=False):
    model = build_toy(norm).double()
    if compiled:
        model.backbone.compile(backend="aot_eager")
    batches = make_batches()
    first = microbatches_of(batches[0], rank, world, num_microbatches)
    step = build_step(model, world, settle_with=first[0])
    told = []
    for index, batch in enumerate(batches):
        microbatches = microbatches_of(batch, rank, world, num_microbatches)
        if break_it is not None:
            break_it(step, microbatches)
        scalars = step(microbatches, index)
        dist.all_reduce(scalars["loss"])
        told.append(
            {
                "loss": float(scalars["loss"]),
                "grad_norm": float(scalars["grad_norm"]),
                "grads": {n: p.grad.clone() for n, p in model.named_parameters()},
                "values": {n: v.clone() for n, v in model.state_dict().items()},
            }
        )
    return told


def expected(norm, world, num_microbatches):
    """Through BatchNorm go together: the microbatches of the same number of all ranks."""
    number_B = (
        torch.arange(SIZE).view(world, num_microbatches, -1).transpose(0, 1).reshape(num_microbatches, -1)
    )
    groups = list(number_B) if norm == "sync" else [torch.arange(SIZE)]
    return train_plainly(build_toy("batch" if norm == "sync" else norm).double(), make_batches(), groups)


def differences(found, wanted):
    """What differs by more than the tolerance."""
    wrong = set()
    for ours, plain in zip(found, wanted, strict=True):
        for key in ("loss", "grad_norm"):
            if abs(ours[key] - plain[key]) > TOLERANCE:
                wrong.add(key)
        for key in ("grads", "values"):
            assert ours[key].keys() == plain[key].keys()
            for name, value in ours[key].items():
                if not torch.allclose(value, plain[key][name], rtol=0, atol=TOLERANCE):
                    wrong.add(f"{key} {name}")
    return wrong


@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("norm", ["layer", "sync"])
def test_a_step_equals_plain_pytorch_on_the_whole_batch(norm, world, num_microbatches):
    wanted = expected(norm, world, num_microbatches)
    assert wanted[0]["grad_norm"] > 0.05  # clipping has something to do
    for found in run_ranks(world, train_ours, norm, num_microbatches):
        assert differences(found, wanted) == set()


def test_a_compiled_backbone_under_ddp_equals_plain_pytorch():
    wanted = expected("layer", 2, 2)
    for found in run_ranks(2, train_ours, "layer", 2, None, True):
        assert differences(found, wanted) == set()


def without_world_size(step, microbatches):
    step.parallel.dp = 1


def with_local_counts(step, microbatches):
    for each in microbatches:
        real_B = each.weight_B > 0
        each.counts = {
            "identity": float((real_B & (each.identity_B >= 0)).sum()),
            "behaviour": float((real_B & (each.has_behaviour_B > 0)).sum()),
        }


def without_all_reduce(step, microbatches):
    step.parallel.replica.require_backward_grad_sync = False


def without_synchronised_statistics(step, microbatches):
    step.parallel.replica.module.backbone[1].group = dist.new_group(
        [dist.get_rank()], use_local_synchronization=True
    )


@pytest.mark.parametrize(
    ("norm", "break_it"),
    [
        ("layer", without_world_size),
        ("layer", with_local_counts),
        ("layer", without_all_reduce),
        ("sync", without_synchronised_statistics),
    ],
)
def test_the_comparison_sees_a_broken_step(norm, break_it):
    wanted = expected(norm, 2, 2)
    for found in run_ranks(2, train_ours, norm, 2, break_it):
        wrong = differences(found, wanted)
        assert any(name.startswith("grads") for name in wrong)
