"""Learning rate, averages, clipping and optimizers against closed forms and torch's own."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from hpctrain.config.schema import OptimConfig, OptimizerKind
from hpctrain.core.clip import gradient_norm, scale_gradients
from hpctrain.core.optim import Ema, build_optimizer, learning_rate

OPTIM = OptimConfig(lr=0.8, num_epochs=10, warmup_epochs=2.0, final_lr_ratio=0.25)


def rate(step, steps_per_epoch=5, **changes):
    return learning_rate(step, optim=replace(OPTIM, **changes), steps_per_epoch=steps_per_epoch)


def test_learning_rate_warms_up_peaks_and_ends_where_the_formula_says():
    assert rate(0) == pytest.approx(0.8 / 10)
    assert rate(4) == pytest.approx(0.8 / 2)
    assert rate(9) == rate(10) == pytest.approx(0.8)
    assert rate(30) == pytest.approx((0.8 + 0.2) / 2)  # half way down the cosine
    assert rate(49) == pytest.approx(0.2 + 0.6 * (1 + math.cos(math.pi * 39 / 40)) / 2)
    assert rate(50) == rate(60) == pytest.approx(0.2)
    assert rate(0, warmup_epochs=0) == 0.8
    assert rate(49, warmup_epochs=20) == pytest.approx(0.8)  # longer than the run: warm-up to the end


def test_learning_rate_equals_torchs_schedulers():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.8)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=9)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40, eta_min=0.2)
    wanted = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # SequentialLR itself calls step with an epoch
        schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, cosine], milestones=[10])
        for _ in range(50):
            wanted.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
    # torch multiplies from step to step: rounding adds up over 50 steps of 2⁻⁵³.
    assert [rate(step) for step in range(50)] == pytest.approx(wanted, rel=1e-12)


def build_small():
    """No bias ahead of the BatchNorm: its gradient is rounding noise, which Adam would blow up to steps."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3, bias=False), nn.BatchNorm1d(3), nn.Linear(3, 2)).double()


def train_small(model, optimizer, num_steps, after_step):
    for step in range(num_steps):
        optimizer.zero_grad()
        inputs = torch.randn(6, 4, generator=torch.Generator().manual_seed(step)).double()
        model(inputs).square().sum().backward()
        optimizer.step()
        after_step()


def test_ema_equals_torchs_averaged_model_and_the_recurrence():
    model = build_small()
    ema = Ema(model, 0.9)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    averaged.update_parameters(model)  # torch's first call copies
    by_hand = {name: value.clone() for name, value in model.state_dict().items() if value.is_floating_point()}

    def after_step():
        ema.update()
        averaged.update_parameters(model)
        for name, value in by_hand.items():
            by_hand[name] = 0.9 * value + 0.1 * model.state_dict()[name]

    train_small(model, torch.optim.SGD(model.parameters(), lr=0.1), 5, after_step)
    torch.testing.assert_close(ema.average, by_hand, rtol=1e-12, atol=1e-14)
    for name, value in averaged.module.state_dict().items():
        if value.is_floating_point():
            torch.testing.assert_close(ema.average[name], value, rtol=1e-12, atol=1e-14)


def test_ema_covers_running_statistics_but_no_counters_constants_or_frozen_weights():
    model = build_small()
    model[0].weight.requires_grad_(False)
    model.register_buffer("constant", torch.ones(2), persistent=False)
    names = {"1.weight", "1.bias", "1.running_mean", "1.running_var", "2.weight", "2.bias"}
    assert set(Ema(model, 0.9).average) == names


def test_swapping_gives_the_averages_and_swapping_twice_is_identity():
    model = build_small()
    ema = Ema(model, 0.9)
    train_small(model, torch.optim.SGD(model.parameters(), lr=0.1), 3, ema.update)
    values = {name: value.clone() for name, value in model.state_dict().items()}
    average = {name: value.clone() for name, value in ema.average.items()}
    ema.swap()
    assert all(torch.equal(model.state_dict()[name], value) for name, value in average.items())
    ema.swap()
    assert all(torch.equal(model.state_dict()[name], value) for name, value in values.items())
    assert all(torch.equal(ema.average[name], value) for name, value in average.items())


@pytest.mark.parametrize("max_norm", [0.5, 1e6, None])
def test_clipping_equals_torchs(max_norm):
    ours, theirs = build_small(), build_small()
    for model in (ours, theirs):
        train_small(model, torch.optim.SGD(model.parameters(), lr=0.0), 1, lambda: None)
    wanted = torch.nn.utils.clip_grad_norm_(theirs.parameters(), math.inf if max_norm is None else max_norm)
    norm = gradient_norm(list(ours.parameters()))
    assert torch.equal(norm, wanted)
    if max_norm is not None:
        scale_gradients(list(ours.parameters()), torch.clamp(max_norm / (norm + 1e-6), max=1.0))
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


OPTIMIZERS = {
    "adamw": (
        OptimConfig(lr=0.02, betas=[0.8, 0.95]),
        lambda p: torch.optim.AdamW(p, lr=0.02, betas=(0.8, 0.95), weight_decay=0.1, foreach=False),
    ),
    "sgd": (
        OptimConfig(kind=OptimizerKind.sgd, lr=0.02, momentum=0.9),
        lambda p: torch.optim.SGD(
            p, lr=0.02, momentum=0.9, nesterov=True, weight_decay=0.1, foreach=False, fused=False
        ),
    ),
    "sgd_without_momentum": (
        OptimConfig(kind=OptimizerKind.sgd, lr=0.02, momentum=0.0),
        lambda p: torch.optim.SGD(p, lr=0.02, weight_decay=0.1, foreach=False, fused=False),
    ),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_fused_optimizers_equal_torchs_plain_ones(kind):
    optim, build_plain = OPTIMIZERS[kind]
    ours, theirs = build_small(), build_small()
    optimizer = build_optimizer([{"params": list(ours.parameters()), "weight_decay": 0.1}], optim)
    assert optimizer.defaults["fused"]
    train_small(ours, optimizer, 5, lambda: None)
    train_small(theirs, build_plain(list(theirs.parameters())), 5, lambda: None)
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=1e-12, atol=1e-13)
