"""Computation and memory traffic of blocks, by hand and counted on a real block."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hpctrain.config.hardware import Hardware, find_hardware
from hpctrain.config.schema import Checkpointing, DecoderConfig, DecoderFamily, LoraConfig, OptimConfig
from hpctrain.models import attention
from hpctrain.models.rope import make_rotation
from hpctrain.plan.compute import EAGER, Work, block_passes, head_passes, update_bytes

MODEL = DecoderConfig(
    family=DecoderFamily.qwen3,
    vocab_size=1000,
    hidden_size=512,
    intermediate_size=1536,
    num_hidden_layers=1,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=128,
)
STREAM, QUERIES, KEYS, INNER = 512, 1024, 256, 1536
LENGTH = 4096


def make_work(hardware: Hardware, model: DecoderConfig = MODEL, tp: int = 1, **changes: Any) -> Work:
    work = Work(
        model=model,
        tokens=LENGTH,
        length=LENGTH,
        tp=tp,
        token_shards=1,
        element=2,
        product_flops=100e12,
        hardware=hardware,
        kernels=EAGER,
    )
    return replace(work, **changes)


@pytest.fixture
def no_traffic() -> Hardware:
    """Memory that takes no time, and operators that start at once."""
    return find_hardware("rtx4090").with_value("memory_gbps", 1e12).with_value("launch_us", 1e-9)


class Norm(torch.autograd.Function):
    """As the fused kernel of a GPU: without operators in between."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return tuple(torch.empty_like(value) for value in ctx.saved_tensors)


class Scores(torch.autograd.Function):
    """As the fused kernel of a GPU: its result lies token by token."""

    @staticmethod
    def forward(ctx: Any, *qkv: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*qkv)
        return torch.empty_like(qkv[0].transpose(1, 2)).transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return tuple(torch.empty_like(value) for value in ctx.saved_tensors)


MOVE_NOTHING = ("mm", "t", "view", "transpose", "unsqueeze", "expand", "_unsafe_view", "slice", "split")
MOVE_NOTHING += ("detach", "alias", "empty_like", "reshape", "permute", "squeeze", "promote_types")


class Traffic(TorchDispatchMode):
    """Bytes that operators other than products read and write."""

    moved = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ not in MOVE_NOTHING:
            for value in torch.utils._pytree.tree_leaves((args, result)):
                if isinstance(value, torch.Tensor):
                    sizes = zip(value.shape, value.stride(), strict=True)
                    stored = [size for size, stride in sizes if stride]
                    self.moved += value.element_size() * torch.Size(stored).numel()
        return result


def test_a_block_moves_between_products_what_a_real_one_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted on a real block without data; norms and attention, one kernel each on a GPU, are added by hand:
    2 and 3 for a norm, q, k, v and the result in forward, those and four gradients in backward."""
    monkeypatch.setattr(attention.F, "rms_norm", lambda x, shape, weight, eps: Norm.apply(x, weight))
    monkeypatch.setattr(
        attention.F, "scaled_dot_product_attention", lambda q, k, v, **options: Scores.apply(q, k, v)
    )

    with torch.device("meta"):
        block = attention.Block(MODEL, 128, 0).to(torch.bfloat16)
        x = torch.empty(1, LENGTH, STREAM, dtype=torch.bfloat16, requires_grad=True)
        rotation = make_rotation(torch.empty(1, LENGTH, dtype=torch.long), MODEL, 128, torch.bfloat16)
        with Traffic() as forward:
            y = block(x, *rotation, None, None)
        with Traffic() as backward:
            y.backward(torch.empty_like(y))
    norms = 2 * STREAM + QUERIES + KEYS
    counts = [
        forward.moved / LENGTH / 2 + 2 * norms + 4 * QUERIES,
        backward.moved / LENGTH / 2 + 3 * norms + 8 * QUERIES,
    ]
    for index, counted in enumerate(counts):
        expected = (
            EAGER.residual[index] * STREAM
            + EAGER.queries[index] * QUERIES
            + EAGER.keys[index] * KEYS
            + EAGER.mlp[index] * INNER
            + EAGER.head_norms[index] * (QUERIES + KEYS)
        )
        assert counted == pytest.approx(expected, rel=0.04)  # cosines and sines are not in the sum


def test_backward_is_two_products_for_each_of_forward(no_traffic: Hardware) -> None:
    """By hand: 2 · tokens · parameters, and the whole square of attention, which backward does 2.5 times."""
    passes = block_passes(make_work(no_traffic), Checkpointing.none)
    matrices = 2 * LENGTH * (2 * STREAM * QUERIES + 2 * STREAM * KEYS + 3 * STREAM * INNER) / 100e12
    square = 4 * LENGTH**2 * QUERIES / (165.2e12 * no_traffic["attention_efficiency"])
    assert passes.forward == pytest.approx(matrices + square, rel=1e-3)
    assert passes.backward == pytest.approx(2 * matrices + 2.5 * square, rel=1e-3)
    assert passes.recompute == 0


def test_frozen_matrices_have_no_gradient_of_their_own(no_traffic: Hardware) -> None:
    frozen = replace(MODEL, lora=LoraConfig(rank=8, targets=["q_proj"]))
    plain, adapted = (
        block_passes(make_work(no_traffic, model, length=1), Checkpointing.none) for model in (MODEL, frozen)
    )
    assert plain.backward / plain.forward == pytest.approx(2, rel=0.01)
    assert adapted.backward / adapted.forward == pytest.approx(1, rel=0.01)


def test_full_checkpointing_computes_all_but_the_last_product_again(no_traffic: Hardware) -> None:
    passes = block_passes(make_work(no_traffic), Checkpointing.full)
    last = 2 * LENGTH * STREAM * INNER / 100e12
    assert passes.recompute == pytest.approx(passes.forward - last, rel=1e-6)


def test_selective_checkpointing_computes_no_product_again(no_traffic: Hardware) -> None:
    assert block_passes(make_work(no_traffic), Checkpointing.selective).recompute < 1e-9
    normal = block_passes(make_work(find_hardware("rtx4090")), Checkpointing.selective)
    assert 0 < normal.recompute < normal.forward


def test_a_product_is_at_its_roofline_at_both_ends() -> None:
    """A vector times a matrix takes the time of reading it, large matrices that of their operations."""
    hardware = find_hardware("rtx4090")
    work = make_work(hardware)
    assert work.product_s(1, 8192, 8192) == pytest.approx(2 * 8192**2 / 1008e9, rel=0.01)
    assert work.product_s(2**16, 2**14, 2**14) == pytest.approx(2 * 2**16 * 2**28 / 100e12, rel=0.01)


def test_an_eighth_of_a_matrix_takes_more_than_an_eighth_of_the_time() -> None:
    work = make_work(find_hardware("rtx4090"))
    assert work.product_s(LENGTH, 2048, 256) > 1.05 * work.product_s(LENGTH, 2048, 2048) / 8


def test_small_blocks_take_the_time_of_starting_their_operators() -> None:
    hardware = find_hardware("rtx4090").with_value("launch_us", 10)
    passes = block_passes(make_work(hardware, tokens=16, length=16), Checkpointing.none)
    assert passes.forward == pytest.approx(EAGER.operators[0] * 10e-6)


def test_chunks_of_the_loss_make_the_logits_twice(no_traffic: Hardware) -> None:
    product = 2 * LENGTH * 512 * 1000 / 100e12
    whole = head_passes(make_work(no_traffic))
    chunked = head_passes(make_work(no_traffic, replace(MODEL, loss_chunk_tokens=1024)))
    assert (whole.forward, whole.backward, whole.recompute) == pytest.approx(
        (product, 2 * product, 0), rel=1e-3
    )
    assert chunked.recompute == pytest.approx(product, rel=1e-3)


def test_adamw_moves_seven_numbers_a_parameter_and_the_norm_one() -> None:
    """Weight, gradient, two moments read; weight and moments written; the norm reads the gradient again."""
    assert update_bytes(OptimConfig(), 10) == 10 * 4 * 8
    assert update_bytes(OptimConfig(clip_norm=1.0), 10) == 10 * 4 * 10
