"""Parameters and operations of decoders against published totals and counts by hand."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from hpctrain.config.schema import DecoderConfig, DecoderFamily, LoraConfig
from hpctrain.models.decoder import Decoder
from hpctrain.models.lora import apply_lora
from hpctrain.plan.costs import (
    adapter_parameters,
    forward_flops,
    parameters,
    stage_parameters,
    trainable_parameters,
)
from tests.plan.large import QWEN_32B

LLAMA3_8B = DecoderConfig(vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_key_value_heads=8)
QWEN3_32B = DecoderConfig(
    family=DecoderFamily.qwen3,
    vocab_size=151936,
    hidden_size=5120,
    intermediate_size=25600,
    num_hidden_layers=64,
    num_attention_heads=64,
    num_key_value_heads=8,
    head_dim=128,
)
QWEN2_5_HALF_B = DecoderConfig(
    family=DecoderFamily.qwen2,
    vocab_size=151936,
    hidden_size=896,
    intermediate_size=4864,
    num_hidden_layers=24,
    num_attention_heads=14,
    num_key_value_heads=2,
    tie_word_embeddings=True,
)


@pytest.mark.parametrize(
    ("model", "published"),
    [
        (QWEN_32B, 32_763_876_352),
        (QWEN3_32B, 32_762_123_264),
        (LLAMA3_8B, 8_030_261_248),
        (QWEN2_5_HALF_B, 494_032_768),
    ],
)
def test_parameters_are_those_that_hugging_face_shows(model: DecoderConfig, published: int) -> None:
    assert parameters(model) == published


def test_adapters_are_counted_by_target() -> None:
    """Rank 8 on q (4096 → 4096) and v (4096 → 1024), over 32 layers: PEFT's 3,407,872 for Llama 3 8B."""
    model = DecoderConfig(**{**vars(LLAMA3_8B), "lora": LoraConfig(rank=8, targets=["q_proj", "v_proj"])})
    assert adapter_parameters(model) == 8 * (4096 + 4096) + 8 * (4096 + 1024)
    assert trainable_parameters(model) == 3_407_872
    assert parameters(model) == 8_030_261_248 + 3_407_872


def test_forward_operations_by_hand() -> None:
    """2 per weight of a matrix and token, 4 per query-key pair and feature of the heads."""
    model = DecoderConfig(
        vocab_size=10,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    length = 5
    matrices = 8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 12
    pairs = 1 + 2 + 3 + 4 + 5
    assert forward_flops(model, length) == 3 * (2 * length * matrices + 4 * pairs * 8) + 2 * length * 8 * 10


def every_family(**values: object) -> list[DecoderConfig]:
    """Small decoders with what their family may have."""
    sizes = {
        "vocab_size": 33,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
    }
    biased = (DecoderFamily.llama, DecoderFamily.qwen3)
    return [
        DecoderConfig(family=family, attention_bias=family in biased, **sizes, **values)  # type: ignore[arg-type]
        for family in DecoderFamily
    ]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("rank", [0, 2])
def test_the_real_module_has_as_many_parameters_on_every_stage(tied: bool, rank: int) -> None:
    lora = LoraConfig(rank=rank, targets=["k_proj", "down_proj"])
    for model in every_family(tie_word_embeddings=tied, lora=lora):
        for layers, first, last in ((3, True, True), (1, True, False), (2, False, False), (1, False, True)):
            with torch.device("meta"):
                stage = Decoder(model, range(layers), first, last)
                apply_lora(stage, model.lora)
            count = sum(p.numel() for p in stage.parameters())
            assert count == stage_parameters(model, layers, first, last), (model.family, layers, first, last)
        with torch.device("meta"):
            whole = Decoder(model)
            apply_lora(whole, model.lora)
        trained = sum(p.numel() for p in whole.parameters() if p.requires_grad)
        assert trained == trainable_parameters(model)


def test_torch_counts_the_same_operations_in_the_matrices() -> None:
    """It does not count the CPU's attention: 4 a pair and feature; 55 pairs, 4 heads of 6, 3 blocks."""
    for model in every_family(lora=LoraConfig(rank=2)):
        decoder = Decoder(model)
        apply_lora(decoder, model.lora)
        with FlopCounterMode(display=False) as counter:
            decoder.logits(torch.zeros(1, 10, dtype=torch.int64), torch.arange(10)[None])
        assert counter.get_total_flops() == forward_flops(model, 10) - 4 * 55 * 4 * 6 * 3
