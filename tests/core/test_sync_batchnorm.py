"""BatchNorm over ranks against torch's own on the whole batch."""

from __future__ import annotations

import copy

import pytest
import timm
import torch
import torch.distributed as dist
from timm.layers import BatchNormAct2d
from torch import nn

from hpctrain.core.sync_batchnorm import SyncBatchNorm, apply_sync_batchnorm
from tests.helpers.ranks import run_ranks

TOLERANCE = 1e-10  # float64 sums in another order differ by about 1e-15
BATCH, CHANNELS = 12, 3

NORMS = {
    "1d": lambda: nn.BatchNorm1d(CHANNELS),
    "2d": lambda: nn.BatchNorm2d(CHANNELS),
    "not_affine": lambda: nn.BatchNorm2d(CHANNELS, affine=False),
    "plain_average": lambda: nn.BatchNorm2d(CHANNELS, momentum=None),
    "not_tracking": lambda: nn.BatchNorm2d(CHANNELS, track_running_stats=False),
    "timm": lambda: BatchNormAct2d(CHANNELS, act_layer=nn.PReLU),
}


def make_norm(kind):
    norm = NORMS[kind]().double()
    with torch.no_grad():
        for index, parameter in enumerate(norm.parameters()):
            parameter.copy_(torch.linspace(0.3, 1.2 + index, parameter.numel()).view_as(parameter))
    return nn.Sequential(norm)


def make_inputs(kind):
    random = torch.Generator().manual_seed(3)
    shape = (3, BATCH, CHANNELS) if kind == "1d" else (3, BATCH, CHANNELS, 4, 5)
    # Another mean for each sample: ranks disagree about the statistics.
    offset = torch.arange(BATCH).view(1, BATCH, *[1] * (len(shape) - 2))
    return torch.randn(shape, generator=random, dtype=torch.float64) + offset


def pass_through(model, inputs, rank, world):
    """Three batches forward and backward; this rank's share of outputs and gradients, and the state."""
    share = slice(rank * BATCH // world, (rank + 1) * BATCH // world)
    told = []
    for whole in inputs:
        own = whole[share].clone().requires_grad_()
        output = model(own)
        model.zero_grad()
        torch.sin(output * 3).sum().backward()
        told.append((output.detach(), own.grad))
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return [torch.stack(each) for each in zip(*told, strict=True)], gradients, model.state_dict()


def on_ranks(rank, world, kind):
    model = make_norm(kind)
    apply_sync_batchnorm(model)
    assert isinstance(model[0], SyncBatchNorm)
    (outputs, input_grads), gradients, state = pass_through(model, make_inputs(kind), rank, world)
    for gradient in gradients.values():
        dist.all_reduce(gradient)
    return outputs, input_grads, gradients, state


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("kind", NORMS)
def test_it_equals_batchnorm_of_the_whole_batch(kind, world):
    (outputs, input_grads), gradients, state = pass_through(make_norm(kind), make_inputs(kind), 0, 1)
    ranks = run_ranks(world, on_ranks, kind)
    for index, wanted in enumerate((outputs, input_grads)):
        found = torch.cat([rank[index] for rank in ranks], dim=1)
        torch.testing.assert_close(found, wanted, rtol=0, atol=TOLERANCE)
    for rank in ranks:
        for found, wanted in zip(rank[2:], (gradients, state), strict=True):
            torch.testing.assert_close(found, wanted, rtol=0, atol=TOLERANCE)


def test_a_large_mean_does_not_drown_the_variance():
    # In fp32 a sum of squares around 1e8 has steps of 8: the variance of 1 would be lost.
    values = torch.randn(BATCH, CHANNELS, 8, 8, generator=torch.Generator().manual_seed(0)) + 1e4
    exact = values.double()
    wanted = (exact - exact.mean((0, 2, 3), keepdim=True)) / exact.std((0, 2, 3), correction=0, keepdim=True)

    def normalise(rank, world):
        model = nn.Sequential(nn.BatchNorm2d(CHANNELS, affine=False, eps=0.0))
        apply_sync_batchnorm(model)
        return model(values[rank * 6 : (rank + 1) * 6])

    found = torch.cat(run_ranks(2, normalise)).double()
    # The input's own rounding, 1e4 · 2⁻²⁴, twice: that of the mean comes on top.
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-3)


def test_bf16_goes_in_and_comes_out_while_statistics_are_fp32():
    values = torch.randn(BATCH, CHANNELS, 4, 4, generator=torch.Generator().manual_seed(0)).bfloat16()

    def normalise(rank, world):
        model = nn.Sequential(nn.BatchNorm2d(CHANNELS))
        apply_sync_batchnorm(model)
        own = values[rank * 6 : (rank + 1) * 6].clone().requires_grad_()
        output = model(own)
        output.float().sum().backward()
        return output.detach(), own.grad.dtype, model.state_dict()

    plain = nn.Sequential(nn.BatchNorm2d(CHANNELS))
    wanted = plain(values.float()).bfloat16()
    for rank, (output, grad_dtype, state) in enumerate(run_ranks(2, normalise)):
        assert output.dtype == grad_dtype == torch.bfloat16
        torch.testing.assert_close(output, wanted[rank * 6 : (rank + 1) * 6], rtol=2**-7, atol=2**-10)
        torch.testing.assert_close(state, plain.state_dict())


def test_evaluation_is_that_of_batchnorm_and_state_dicts_are_interchangeable():
    plain = timm.create_model("test_resnet", num_classes=0)
    for buffer in plain.buffers():
        if buffer.is_floating_point():
            buffer.copy_(torch.rand_like(buffer) + 0.5)
    synchronised = copy.deepcopy(plain)
    parameters = dict(synchronised.named_parameters())
    apply_sync_batchnorm(synchronised)
    assert all(parameters[name] is p for name, p in synchronised.named_parameters())
    assert not [m for m in synchronised.modules() if isinstance(m, nn.BatchNorm2d)]
    assert list(synchronised.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(synchronised.state_dict())
    synchronised.load_state_dict(plain.state_dict())
    images = torch.randn(2, 3, 64, 64)
    assert torch.equal(synchronised.eval()(images), plain.eval()(images))


def test_every_batchnorm_of_timm_with_activation_keeps_it():
    model = timm.create_model("efficientnet_lite0", num_classes=0)
    before = {name: m.act for name, m in model.named_modules() if isinstance(m, BatchNormAct2d)}
    apply_sync_batchnorm(model)
    after = {name: m.act for name, m in model.named_modules() if isinstance(m, SyncBatchNorm)}
    assert before and all(after[name] is act for name, act in before.items())


def test_a_batchnorm_with_its_own_forward_is_refused():
    class Odd(nn.BatchNorm2d):
        def forward(self, input):
            return -super().forward(input)

    with pytest.raises(TypeError, match="Odd has a forward pass of its own"):
        apply_sync_batchnorm(nn.Sequential(Odd(3)))


# Dynamo itself looks whether tensors have a gradient, and hides the warning unless warnings are errors.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_a_compiled_model_gives_the_same_with_it():
    def compare(rank, world):
        plain = nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)
        )
        apply_sync_batchnorm(plain)
        compiled = copy.deepcopy(plain)
        compiled.compile(backend="aot_eager")
        images = torch.randn(4, 3, 8, 8) + rank
        for model in (plain, compiled):
            model(images).square().sum().backward()
        grads = [[p.grad for p in model.parameters()] for model in (plain, compiled)]
        return all(map(torch.equal, *grads)), plain.state_dict(), compiled.state_dict()

    for equal, plain, compiled in run_ranks(2, compare):
        assert equal
        torch.testing.assert_close(plain, compiled, rtol=0, atol=0)
