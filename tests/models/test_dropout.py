"""Dropout by key: its rate, its independence, and that the layout does not matter."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from hpctrain.models.dropout import KeyedDropout, hash32


def mask_of(site: int = 3, key: int = 12345, p: float = 0.5, shape: tuple[int, int] = (64, 256)) -> Tensor:
    return KeyedDropout(p, site).make_mask(torch.tensor([key]), *shape)[0]


def correlation(a: Tensor, b: Tensor) -> float:
    """Return how often two fair coins agree, in standard errors from one half."""
    agree = (a == b).double()
    return float((agree.mean() - 0.5).abs() * 2 * agree.numel() ** 0.5)


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_the_rate_is_p(p: float) -> None:
    kept = mask_of(p=p, shape=(512, 512)).double().mean().item()
    error = (p * (1 - p)) ** 0.5 / 512
    assert abs(kept - (1 - p)) < 5 * error
    rows = mask_of(p=p, shape=(512, 512)).double().mean(dim=1)
    assert rows.std().item() == pytest.approx((p * (1 - p) / 512) ** 0.5, rel=0.2)  # as independent features


def test_what_is_kept_is_scaled_and_what_is_dropped_gets_no_gradient() -> None:
    x = torch.rand(2, 5, 7, dtype=torch.float64, requires_grad=True)
    dropout, key_B = KeyedDropout(0.25, 0), torch.tensor([1, 2])
    y = dropout(x, key_B)
    kept = dropout.make_mask(key_B, 5, 7)
    torch.testing.assert_close(y, x * kept / 0.75)
    y.sum().backward()
    torch.testing.assert_close(x.grad, kept / torch.tensor(0.75, dtype=torch.float64))
    assert 0 < kept.double().mean() < 1


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_without_a_key_or_a_rate_it_is_the_input(p: float) -> None:
    x = torch.rand(1, 2, 3)
    assert KeyedDropout(p, 0)(x, None if p else torch.tensor([1])) is x


def test_the_mask_does_not_depend_on_how_tokens_and_features_are_cut() -> None:
    key_B = torch.tensor([7, -8])
    whole = KeyedDropout(0.3, 5).make_mask(key_B, 12, 20)
    for tokens, features in ((1, 1), (3, 20), (12, 5), (4, 4)):
        for t, f in itertools.product(range(0, 12, tokens), range(0, 20, features)):
            part = KeyedDropout(0.3, 5)
            part.token_start, part.feature_start = t, f
            mask = part.make_mask(key_B, tokens, features)
            assert torch.equal(mask, whole[:, t : t + tokens, f : f + features])


def test_the_mask_does_not_depend_on_the_other_sequences() -> None:
    dropout = KeyedDropout(0.3, 5)
    together = dropout.make_mask(torch.tensor([7, 2**40, -3]), 6, 6)
    alone = [dropout.make_mask(torch.tensor([key]), 6, 6)[0] for key in (7, 2**40, -3)]
    assert torch.equal(together, torch.stack(alone))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"site": 3}, {"site": 4}),
        ({"site": 0}, {"site": 16}),
        ({"key": 0}, {"key": 1}),
        ({"key": 1}, {"key": 1 + 2**32}),  # the upper half counts
        ({"key": 5}, {"key": -5}),
        ({"key": 3, "site": 4}, {"key": 4, "site": 3}),
    ],
)
def test_other_keys_and_sites_have_independent_masks(first: dict[str, int], second: dict[str, int]) -> None:
    assert correlation(mask_of(**first), mask_of(**second)) < 4


def test_neighbouring_tokens_and_features_are_independent() -> None:
    mask = mask_of(shape=(512, 512))
    for shift in (1, 2, 3, 8, 64, 128, 256):
        assert correlation(mask[shift:], mask[:-shift]) < 4.5
        assert correlation(mask[:, shift:], mask[:, :-shift]) < 4.5
        assert correlation(mask[shift:, shift:], mask[:-shift, :-shift]) < 4.5


def test_the_hash_is_one_to_one_and_flips_half_of_the_bits() -> None:
    x = torch.randint(2**32, (1 << 16,), generator=torch.Generator().manual_seed(0))
    h = hash32(x)
    assert (h >= 0).all() and (h < 2**32).all()
    assert len(h.unique()) == len(x.unique())
    bits = torch.arange(32)
    for bit in range(32):
        flipped = (h ^ hash32(x ^ (1 << bit)))[:, None] >> bits & 1
        assert (flipped.double().mean(dim=0) - 0.5).abs().max() < 0.02  # 5 standard errors are 0.0098


def test_the_mask_is_what_unbounded_integers_give() -> None:
    """Nothing overflows; and a resumed run goes on with the masks it would have had in an older version."""

    def mix(x: int) -> int:
        x = (x ^ x >> 16) * 0x21F0AAAD % 2**32
        x = (x ^ x >> 15) * 0x735A2D97 % 2**32
        return x ^ x >> 15

    key, site = 2**62 + 11, 17
    row = mix(mix(mix(key % 2**32 ^ 0x9E3779B9) ^ key >> 32) ^ site)
    expected = [[mix(mix(row ^ token) ^ mix(f + 1)) >= 2**31 for f in range(12)] for token in range(2)]
    assert KeyedDropout(0.5, site).make_mask(torch.tensor([key]), 2, 12)[0].tolist() == expected
    assert "".join(str(int(kept)) for kept in expected[0]) == "000011100101"
