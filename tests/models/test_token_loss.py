"""The chunked cross-entropy against torch's own, whole and over shards of the vocabulary."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hpctrain.models.token_loss import LmHead, VocabShard, token_losses

T, D, V = 11, 6, 29
EXACT = {"rtol": 1e-12, "atol": 1e-12}  # float64


def make_inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden_TD = torch.randn(T, D, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight_VD = torch.randn(V, D, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    return hidden_TD, weight_VD, torch.randint(V, (T,), generator=generator)


def take_gradients(losses_T: Tensor, *inputs: Tensor) -> list[Tensor]:
    scale_T = torch.linspace(-1, 2, len(losses_T), dtype=losses_T.dtype)
    return list(torch.autograd.grad((losses_T * scale_T).sum(), inputs))


@pytest.mark.parametrize("chunk_tokens", [0, 1, 4, T, T + 5])
def test_losses_and_gradients_are_those_of_cross_entropy(chunk_tokens: int) -> None:
    hidden_TD, weight_VD, label_T = make_inputs()
    expected_T = F.cross_entropy(hidden_TD @ weight_VD.T, label_T, reduction="none")
    losses_T = token_losses(hidden_TD, weight_VD, label_T, chunk_tokens)
    torch.testing.assert_close(losses_T, expected_T, **EXACT)
    theirs = take_gradients(expected_T, hidden_TD, weight_VD)
    for ours, reference in zip(take_gradients(losses_T, hidden_TD, weight_VD), theirs, strict=True):
        torch.testing.assert_close(ours, reference, **EXACT)


def test_gradients_are_the_derivatives() -> None:
    hidden_TD, weight_VD, label_T = make_inputs()
    assert torch.autograd.gradcheck(lambda h, w: token_losses(h, w, label_T, 3), (hidden_TD, weight_VD))


def test_a_frozen_matrix_gets_no_gradient() -> None:
    hidden_TD, weight_VD, label_T = make_inputs()
    token_losses(hidden_TD, weight_VD.detach(), label_T).sum().backward()
    assert hidden_TD.grad is not None and weight_VD.grad is None


def test_large_logits_do_not_overflow() -> None:
    hidden_TD, weight_VD, label_T = make_inputs(torch.float32)
    losses_T = token_losses(hidden_TD * 1e4, weight_VD, label_T, 4)
    expected_T = F.cross_entropy((hidden_TD * 1e4) @ weight_VD.T, label_T, reduction="none")
    torch.testing.assert_close(losses_T, expected_T, rtol=1e-6, atol=1e-2)  # fp32 of logits of 10⁵


def test_a_label_out_of_range_gives_a_finite_loss() -> None:
    hidden_TD, weight_VD, label_T = make_inputs()
    label_T[:2] = torch.tensor([-100, V + 3])
    losses_T = token_losses(hidden_TD, weight_VD, label_T, 4)
    assert losses_T.isfinite().all()


def test_bf16_losses_are_summed_in_fp32() -> None:
    hidden_TD, weight_VD, label_T = make_inputs(torch.bfloat16)
    losses_T = token_losses(hidden_TD, weight_VD, label_T, 4)
    assert losses_T.dtype is torch.float32
    expected_T = F.cross_entropy((hidden_TD @ weight_VD.T).float(), label_T, reduction="none")
    torch.testing.assert_close(losses_T, expected_T, rtol=1e-5, atol=1e-5)
    hidden_grad, weight_grad = take_gradients(losses_T, hidden_TD, weight_VD)
    assert hidden_grad.dtype is weight_grad.dtype is torch.bfloat16
    theirs = take_gradients(expected_T, hidden_TD, weight_VD)
    torch.testing.assert_close(hidden_grad, theirs[0], rtol=2**-7, atol=2**-6)  # bf16: 8 bits
    torch.testing.assert_close(weight_grad, theirs[1], rtol=2**-7, atol=2**-6)


class Ranks:
    """Threads that reduce with each other, each holding a part of the vocabulary."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes, self.barrier = sizes, threading.Barrier(len(sizes), timeout=30)
        self.parts: list[Tensor] = [torch.empty(0)] * len(sizes)
        self.reductions = 0

    def reducer(self, rank: int, combine: Callable[[Tensor], Tensor]) -> Callable[[Tensor], None]:
        def reduce(value: Tensor) -> None:
            self.parts[rank] = value.clone()
            self.barrier.wait()
            value.copy_(combine(torch.stack(self.parts)))
            self.reductions += 1
            self.barrier.wait()

        return reduce

    def run(self, work: Callable[[int, VocabShard], Any]) -> list[Any]:
        results: list[Any] = [None] * len(self.sizes)
        starts = torch.tensor([0, *self.sizes]).cumsum(0).tolist()

        def run_one(rank: int) -> None:
            shard = VocabShard(
                starts[rank], self.reducer(rank, lambda x: x.amax(0)), self.reducer(rank, lambda x: x.sum(0))
            )
            results[rank] = work(starts[rank], shard)

        threads = [threading.Thread(target=run_one, args=(rank,)) for rank in range(len(self.sizes))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
        return results


@pytest.mark.parametrize("sizes", [[15, 14], [10, 10, 9], [28, 1]])
@pytest.mark.parametrize("chunk_tokens", [0, 4])
def test_shards_of_the_vocabulary_are_the_whole(sizes: list[int], chunk_tokens: int) -> None:
    hidden_TD, weight_VD, label_T = make_inputs()
    label_T[0] = V - 1
    expected_T = F.cross_entropy(hidden_TD @ weight_VD.T, label_T, reduction="none")
    ranks = Ranks(sizes)

    def work(start: int, shard: VocabShard) -> tuple[Tensor, Tensor, Tensor]:
        size = sizes[0] if start == 0 else sizes[1] if start == sizes[0] else sizes[2]
        own_hidden = hidden_TD.detach().clone().requires_grad_()
        own_weight = weight_VD.detach()[start : start + size].clone().requires_grad_()
        losses_T = token_losses(own_hidden, own_weight, label_T, chunk_tokens, shard)
        return losses_T.detach(), *take_gradients(losses_T, own_hidden, own_weight)

    results = ranks.run(work)
    for losses_T, *_ in results:
        torch.testing.assert_close(losses_T, expected_T.detach(), **EXACT)
    grad_hidden, grad_weight = take_gradients(expected_T, hidden_TD, weight_VD)
    torch.testing.assert_close(torch.stack([part for _, part, _ in results]).sum(0), grad_hidden, **EXACT)
    torch.testing.assert_close(torch.cat([part for *_, part in results]), grad_weight, **EXACT)
    assert ranks.reductions == 2 * len(sizes)  # a max and a sum, whatever the number of chunks


class LargestTensor(TorchDispatchMode):
    """Notes the largest storage that any operation made."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple | list) else [result]:
            if isinstance(each, Tensor):
                self.num_bytes = max(self.num_bytes, each.untyped_storage().nbytes())
        return result


def measure(chunk_tokens: int, tokens: int, vocabulary: int) -> tuple[int, int]:
    """Return bytes of the largest tensor made in both directions, and bytes kept between them."""
    hidden_TD = torch.randn(tokens, 4, requires_grad=True)
    weight_VD = torch.randn(vocabulary, 4, requires_grad=True)
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with LargestTensor() as largest:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            losses_T = token_losses(
                hidden_TD, weight_VD, torch.zeros(tokens, dtype=torch.int64), chunk_tokens
            )
        losses_T.sum().backward()
    return largest.num_bytes, sum(kept.values())


def test_no_tensor_is_larger_than_the_logits_of_a_chunk() -> None:
    tokens, vocabulary = 256, 1000
    assert measure(16, tokens, vocabulary)[0] == 16 * vocabulary * 4
    assert measure(0, tokens, vocabulary)[0] == tokens * vocabulary * 4


def test_between_the_directions_chunks_keep_two_numbers_a_token_and_one_piece_its_logits() -> None:
    tokens, vocabulary = 256, 1000
    given = (tokens * 4 + vocabulary * 4) * 4
    numbers = tokens * (8 + 1 + 4 + 4)  # row, whether it is here, log Σ exp, largest logit
    assert measure(16, tokens, vocabulary)[1] <= given + numbers
    assert measure(0, tokens, vocabulary)[1] <= given + numbers + tokens * vocabulary * 4


def test_a_chunked_weight_gradient_is_summed_in_fp32() -> None:
    tokens = 4096
    hidden_TD = torch.ones(tokens, 2, dtype=torch.bfloat16)
    weight_VD = torch.zeros(2, 2, dtype=torch.bfloat16, requires_grad=True)
    token_losses(hidden_TD, weight_VD, torch.zeros(tokens, dtype=torch.int64), 1).sum().backward()
    assert weight_VD.grad is not None and weight_VD.grad.tolist() == [[-2048.0] * 2, [2048.0] * 2]


@pytest.mark.parametrize("is_tied", [False, True])
def test_the_head_sums_weighted_losses_of_each_sequence(is_tied: bool) -> None:
    torch.manual_seed(0)
    embedding = torch.nn.Embedding(V, D, dtype=torch.float64) if is_tied else None
    head = LmHead(V, D, 4, embedding)
    if embedding is None:
        head.to(torch.float64)
        torch.nn.init.normal_(head.parameter)
    hidden_BLD, weight_BL = torch.randn(3, 5, D, dtype=torch.float64), torch.rand(3, 5)
    label_BL = torch.randint(V, (3, 5))
    expected_BL = F.cross_entropy(head.logits(hidden_BLD).transpose(1, 2), label_BL, reduction="none")
    torch.testing.assert_close(
        head(hidden_BLD, label_BL, weight_BL), (expected_BL * weight_BL).sum(1), **EXACT
    )
    assert len(list(head.parameters())) == (0 if is_tied else 1)
