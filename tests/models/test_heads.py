"""Heads against closed forms written with arccos in float64, and against torch's own cross-entropy."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hpctrain.config.schema import Margin
from hpctrain.models.heads import BehaviourHead, IdentityHead, make_margin_logits


def arcface_by_angle(cos: float, margin: float) -> float:
    theta = math.acos(cos)
    return math.cos(theta + margin) if theta + margin <= math.pi else cos - margin * math.sin(margin)


@pytest.mark.parametrize("margin", [0.0, 0.3, 0.5, 1.2])
def test_arcface_adds_the_margin_to_the_angle_and_falls_back_to_a_line_beyond_pi(margin: float) -> None:
    cosines = np.linspace(-0.999, 0.999, 101)
    cos_BC = torch.tensor(np.stack([cosines, np.full_like(cosines, 0.25)], axis=1))
    logits_BC = make_margin_logits(cos_BC, torch.zeros(101, dtype=torch.int64), Margin.arcface, margin, 30.0)
    expected = torch.tensor([30.0 * arcface_by_angle(c, margin) for c in cosines], dtype=torch.float64)
    torch.testing.assert_close(logits_BC[:, 0], expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(logits_BC[:, 1], torch.full((101,), 7.5, dtype=torch.float64))


def test_arcface_logit_never_rises_with_the_angle() -> None:
    cos_BC = torch.linspace(1, -1, 10_001, dtype=torch.float64)[:, None]
    logits_BC = make_margin_logits(cos_BC, torch.zeros(10_001, dtype=torch.int64), Margin.arcface, 0.5, 1.0)
    assert (logits_BC.diff(dim=0) < 0).all()


def test_cosface_takes_the_margin_from_the_cosine_of_the_own_identity_alone() -> None:
    torch.manual_seed(6)
    cos_BC = torch.rand(7, 5, dtype=torch.float64) * 2 - 1
    label_B = torch.tensor([0, 1, 2, 3, 4, 0, 1])
    logits_BC = make_margin_logits(cos_BC, label_B, Margin.cosface, 0.35, 64.0)
    expected = 64.0 * (cos_BC - 0.35 * F.one_hot(label_B, 5).double())
    torch.testing.assert_close(logits_BC, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_cosines_that_rounding_took_beyond_one_have_finite_logits_and_gradients(dtype: torch.dtype) -> None:
    eps = torch.finfo(dtype).eps
    cos_BC = torch.tensor(
        [[1 + eps], [1.0], [1 - eps], [-1.0], [-1 - 2 * eps]], dtype=dtype, requires_grad=True
    )
    logits_BC = make_margin_logits(cos_BC, torch.zeros(5, dtype=torch.int64), Margin.arcface, 0.5, 64.0)
    logits_BC.sum().backward()
    assert cos_BC.grad is not None
    assert logits_BC.isfinite().all() and cos_BC.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("margin", list(Margin))
def test_gradients_are_finite_where_the_embedding_lies_on_or_against_its_centre(
    margin: Margin, dtype: torch.dtype
) -> None:
    head = IdentityHead(3, 2, margin, 0.5, 64.0).to(dtype)
    with torch.no_grad():
        head.weight.copy_(torch.eye(3)[:2])
    embedding = torch.tensor(
        [[2.0, 0, 0], [-2.0, 0, 0], [0, 1, 0], [0, 0, 1]], dtype=dtype, requires_grad=True
    )
    head(embedding, torch.zeros(4, dtype=torch.int64), torch.ones(4)).backward()
    assert embedding.grad is not None and head.weight.grad is not None
    assert embedding.grad.isfinite().all() and head.weight.grad.isfinite().all()


@pytest.mark.parametrize("margin", list(Margin))
def test_without_margin_the_loss_is_torch_cross_entropy_on_scaled_cosines(margin: Margin) -> None:
    torch.manual_seed(0)
    head = IdentityHead(8, 6, margin, 0.0, 16.0).double()
    embedding, label, weight = torch.randn(9, 8).double(), torch.randint(6, (9,)), torch.rand(9).double()
    cosines = F.cosine_similarity(embedding[:, None], head.weight[None], dim=2)
    expected = (weight * F.cross_entropy(16.0 * cosines, label, reduction="none")).sum()
    torch.testing.assert_close(head(embedding, label, weight), expected)


def test_arcface_loss_is_the_closed_form_of_the_paper() -> None:
    rng = np.random.default_rng(1)
    embedding, centre = rng.normal(size=(5, 4)), rng.normal(size=(3, 4))
    label, weight = np.array([0, 1, 2, -1, 0]), np.array([1.0, 1.0, 0.5, 1.0, 0.0])
    expected = 0.0
    for x, y, w in zip(embedding, label, weight, strict=True):
        if y < 0:
            continue
        cosines = [x @ c / np.linalg.norm(x) / np.linalg.norm(c) for c in centre]
        logits = [8.0 * (arcface_by_angle(c, 0.4) if j == y else c) for j, c in enumerate(cosines)]
        expected += w * (math.log(sum(math.exp(v) for v in logits)) - logits[y])
    head = IdentityHead(4, 3, Margin.arcface, 0.4, 8.0).double()
    with torch.no_grad():
        head.weight.copy_(torch.tensor(centre))
    loss = head(torch.tensor(embedding), torch.tensor(label), torch.tensor(weight))
    assert loss.item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("margin", list(Margin))
def test_identity_gradients_agree_with_finite_differences(margin: Margin) -> None:
    torch.manual_seed(2)
    head = IdentityHead(4, 3, margin, 0.5, 4.0).double()
    label, weight = torch.tensor([0, 2, -1, 1]), torch.tensor([1.0, 0.5, 1.0, 0.0]).double()

    def loss(embedding: Tensor, centre: Tensor) -> Tensor:
        value: Tensor = torch.func.functional_call(head, {"weight": centre}, (embedding, label, weight))
        return value

    inputs = (torch.randn(4, 4).double().requires_grad_(), torch.randn(3, 4).double().requires_grad_())
    assert torch.autograd.gradcheck(loss, inputs)


def test_behaviour_loss_is_the_mean_log_likelihood_of_the_labelled_samples() -> None:
    rng = np.random.default_rng(3)
    embedding, weight_KD, bias = rng.normal(size=(4, 5)), rng.normal(size=(2, 5)), rng.normal(size=2)
    label = np.array([[1.0, 0.0], [0.0, 0.0], [1.0, 1.0], [0.0, 1.0]])
    has, weight = np.array([1.0, 0.0, 1.0, 1.0]), np.array([1.0, 1.0, 0.5, 0.0])
    probability = 1 / (1 + np.exp(-(embedding @ weight_KD.T + bias)))
    likelihood = label * np.log(probability) + (1 - label) * np.log(1 - probability)
    expected = -(likelihood.mean(axis=1) * has * weight).sum()
    head = BehaviourHead(5, 2).double()
    with torch.no_grad():
        head.linear.weight.copy_(torch.tensor(weight_KD))
        head.linear.bias.copy_(torch.tensor(bias))
    loss = head(torch.tensor(embedding), torch.tensor(label), torch.tensor(has), torch.tensor(weight))
    assert loss.item() == pytest.approx(expected, rel=1e-12)


def test_behaviour_gradients_agree_with_finite_differences() -> None:
    torch.manual_seed(4)
    head = BehaviourHead(3, 2).double()
    label = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    loss: Callable[[Tensor], Tensor] = lambda embedding: head(  # noqa: E731
        embedding, label, torch.tensor([1.0, 0.0]), torch.ones(2)
    )
    assert torch.autograd.gradcheck(loss, (torch.randn(2, 3).double().requires_grad_(),))


def test_heads_compute_in_fp32_under_bf16_autocast() -> None:
    torch.manual_seed(5)
    identity, behaviour = IdentityHead(16, 4, Margin.arcface, 0.5, 64.0), BehaviourHead(16, 3)
    embedding, label = torch.randn(8, 16), torch.randint(4, (8,))
    labels, ones = torch.rand(8, 3).round(), torch.ones(8)
    expected = identity(embedding, label, ones), behaviour(embedding, labels, ones, ones)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = identity(embedding, label, ones), behaviour(embedding, labels, ones, ones)
    assert [v.dtype for v in found] == [torch.float32, torch.float32]
    assert [v.item() for v in found] == [v.item() for v in expected]
