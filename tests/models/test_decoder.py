"""The decoder against `transformers`, in float64: both compute the same, up to the order of sums."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from hpctrain.config.schema import DecoderConfig, DecoderFamily
from hpctrain.errors import ConfigError
from hpctrain.models.decoder import BLOCKS, TP_PLAN, Decoder
from hpctrain.models.init import init_weights, make_initial
from tests.models.reference import (
    CASES,
    gradients,
    make_decoder,
    make_reference,
    make_tokens,
    plain_nll,
    widened,
)

EXACT = {"rtol": 1e-10, "atol": 1e-10}  # float64, sums of at most a few thousand terms


def tiny(**settings: Any) -> DecoderConfig:
    base: dict[str, Any] = {
        "vocab_size": 67,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    return DecoderConfig(**(base | settings))


def build(config: DecoderConfig, dtype: torch.dtype = torch.float64) -> Decoder:
    model = Decoder(config).to(dtype)
    init_weights(model, seed=0)
    return model


@pytest.mark.parametrize("case", CASES)
def test_logits_loss_and_every_gradient_are_those_of_transformers(case: str) -> None:
    reference = make_reference(**CASES[case])
    decoder = make_decoder(reference)
    token_BL, position_BL, label_BL, weight_BL = make_tokens(2, 19)
    with widened():
        expected_BLV = reference(token_BL, use_cache=False).logits
        expected_B = plain_nll(expected_BLV, label_BL, weight_BL)
        (expected_B * torch.tensor([1.0, 2.0])).sum().backward()
    torch.testing.assert_close(decoder.logits(token_BL, position_BL), expected_BLV, **EXACT)
    nll_B = decoder(token_BL, position_BL, None, label_BL, weight_BL)
    torch.testing.assert_close(nll_B, expected_B, **EXACT)
    (nll_B * torch.tensor([1.0, 2.0])).sum().backward()
    ours, theirs = gradients(decoder), gradients(reference)
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert gradient.abs().max() > 0, name
        torch.testing.assert_close(
            ours[name], gradient, msg=lambda text, name=name: f"{name}: {text}", **EXACT
        )


@pytest.mark.parametrize("setting", ["rms_norm_eps", "rope_theta", "num_key_value_heads"])
def test_the_comparison_sees_a_wrong_setting(setting: str) -> None:
    reference = make_reference(**CASES["llama, as many heads of keys"])
    decoder = make_decoder(reference)
    token_BL, position_BL, *_ = make_tokens(1, 19)
    before = decoder.logits(token_BL, position_BL)
    if setting == "num_key_value_heads":  # whose keys a query sees
        for block in decoder.model.layers.values():
            block.self_attn.k_proj.weight.data = block.self_attn.k_proj.weight.data.roll(8, 0)
    elif setting == "rope_theta":
        decoder.config.rope_theta = 1235.0
    else:
        decoder.model.norm.eps = 2e-4  # type: ignore[union-attr]
    assert (decoder.logits(token_BL, position_BL) - before).abs().max() > 1e-6


def test_bf16_stays_as_near_to_float64_as_that_of_transformers() -> None:
    exact = make_reference(**CASES["qwen3"])
    token_BL, position_BL, *_ = make_tokens(2, 19)
    with widened(), torch.no_grad():
        expected = exact(token_BL, use_cache=False).logits
    rounded = make_reference(torch.bfloat16, **CASES["qwen3"])
    decoder = make_decoder(rounded)
    with torch.no_grad():
        theirs = (rounded(token_BL, use_cache=False).logits.double() - expected).norm()
        ours = (decoder.logits(token_BL, position_BL).double() - expected).norm()
    assert ours < 1.2 * theirs  # both are rounding noise; ours rounds less often


@pytest.mark.parametrize(
    "case", ["llama, llama3", "mistral, window", "qwen2, window from layer 1 on", "qwen3"]
)
def test_packed_documents_are_as_if_alone(case: str) -> None:
    decoder = make_decoder(make_reference(**CASES[case]))
    lengths = (7, 1, 11)
    token_BL, _, label_BL, weight_BL = make_tokens(1, sum(lengths) + 4)
    position_BL = torch.cat([*(torch.arange(n) for n in lengths), torch.zeros(4, dtype=torch.int64)])[None]
    document_BL = torch.repeat_interleave(torch.arange(4), torch.tensor([*lengths, 4])).int()[None]
    weight_BL[:, sum(lengths) :] = 0.0  # padding
    packed = decoder.logits(token_BL, position_BL, document_BL)
    total = decoder(token_BL, position_BL, document_BL, label_BL, weight_BL).sum()
    total.backward()
    together = {name: gradient.clone() for name, gradient in gradients(decoder).items()}
    decoder.zero_grad()
    losses = []
    for part in torch.arange(sum(lengths)).split(lengths):
        arguments = (token_BL[:, part], torch.arange(len(part))[None])
        torch.testing.assert_close(packed[:, part], decoder.logits(*arguments), **EXACT)
        losses.append(decoder(*arguments, None, label_BL[:, part], weight_BL[:, part]).sum())
        losses[-1].backward()
    torch.testing.assert_close(total, torch.stack(losses).sum(), **EXACT)
    for name, gradient in gradients(decoder).items():
        torch.testing.assert_close(together[name], gradient, **EXACT)


@pytest.mark.parametrize("is_tied", [False, True])
def test_stages_in_a_row_are_the_whole_decoder(is_tied: bool) -> None:
    config = tiny(tie_word_embeddings=is_tied, num_hidden_layers=3, residual_dropout=0.2)
    whole = build(config)
    parts = [
        Decoder(config, range(0, 2), has_head=False),
        Decoder(config, range(2, 2), has_embedding=False, has_head=False),
        Decoder(config, range(2, 3), has_embedding=False),
    ]
    names = {name for part in parts for name, _ in part.named_parameters()}
    assert names == {name for name, _ in whole.named_parameters()}
    token_BL, position_BL, label_BL, weight_BL = make_tokens(2, 9)
    key_B = torch.tensor([5, 6])
    x = token_BL
    for part in parts:
        part.to(torch.float64)
        init_weights(part, seed=0)
        x = part(x, position_BL, None, label_BL, weight_BL, key_B)
    torch.testing.assert_close(
        x, whole(token_BL, position_BL, None, label_BL, weight_BL, key_B), rtol=0, atol=0
    )


def test_a_tied_head_has_one_matrix_under_one_name() -> None:
    model = build(tiny(tie_word_embeddings=True))
    assert "lm_head.weight" not in model.state_dict()
    assert "lm_head.weight" not in dict(model.named_parameters(remove_duplicate=False))


def test_blocks_compile_without_a_break_and_give_the_same() -> None:
    config = tiny(family=DecoderFamily.qwen3, num_hidden_layers=1, residual_dropout=0.1, sliding_window=5)
    model = build(config, torch.float32)
    token_BL, position_BL, label_BL, weight_BL = make_tokens(2, 9)
    arguments = (token_BL, position_BL, None, label_BL, weight_BL, torch.tensor([1, 2]))
    model(*arguments).sum().backward()
    plain = {name: gradient.clone() for name, gradient in gradients(model).items()}
    model.zero_grad()
    for block in model.model.layers.values():
        block.compile(fullgraph=True, backend="aot_eager")
    model(*arguments).sum().backward()
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, plain[name], rtol=1e-5, atol=1e-6)  # fp32
    torch.compiler.reset()


def test_dynamic_scaling_is_refused_where_it_would_begin() -> None:
    config = tiny(rope_scaling={"rope_type": "dynamic", "factor": 2.0}, max_position_embeddings=8)
    model = build(config)
    token_BL, position_BL, *_ = make_tokens(1, 9)
    model.logits(token_BL[:, :8], position_BL[:, :8])
    with pytest.raises(ConfigError, match="max_position_embeddings=8"):
        model.logits(token_BL, position_BL)


def test_initial_weights_follow_from_seed_and_name_alone() -> None:
    config = tiny(num_hidden_layers=3, attention_bias=True)
    whole, stage = build(config), Decoder(config, range(1, 2), has_embedding=False, has_head=False).double()
    init_weights(stage, seed=0)
    for name, value in stage.state_dict().items():
        assert torch.equal(value, whole.state_dict()[name]), name
    other = Decoder(config).double()
    init_weights(other, seed=1)
    matrices = [name for name, p in whole.named_parameters() if p.ndim == 2]
    assert all(not torch.equal(whole.state_dict()[n], other.state_dict()[n]) for n in matrices)


def test_initial_weights_are_distributed_as_in_hugging_face() -> None:
    config = tiny(initializer_range=0.05)
    matrix = make_initial("model.layers.0.mlp.up_proj.weight", (300, 400), torch.float32, 0, config)
    assert abs(matrix.std().item() - 0.05) < 0.05 * 5 / (2 * 120_000) ** 0.5  # five standard errors
    assert abs(matrix.mean().item()) < 5 * 0.05 / 120_000**0.5
    a = make_initial("model.layers.0.mlp.up_proj.lora_A.weight", (300, 400), torch.float32, 0, config)
    assert a.abs().max() <= 1 / 20 and abs(a.std().item() - 1 / 20 / 3**0.5) < 1e-4
    for name, expected in (
        ("q_norm.weight", 1.0),
        ("model.norm.weight", 1.0),
        ("x.bias", 0.0),
        ("x.lora_B.weight", 0.0),
    ):
        assert torch.equal(
            make_initial(name, (4,), torch.float64, 0, config), torch.full((4,), expected).double()
        )


def test_the_plan_names_every_module_with_parameters_of_its_own() -> None:
    for family in DecoderFamily:
        model = Decoder(tiny(family=family))
        owners = {name.rpartition(".")[0] for name, _ in model.named_parameters()}
        for owner in owners:
            assert sum(fnmatchcase(owner, pattern) for pattern in TP_PLAN) == 1, owner
    assert isinstance(model.get_submodule(BLOCKS), torch.nn.ModuleDict)


def test_nothing_waits_for_the_device() -> None:
    """Of a fake tensor every read of a value raises, where it would stall a GPU."""
    with FakeTensorMode():
        model = Decoder(
            tiny(family=DecoderFamily.qwen3, sliding_window=4, residual_dropout=0.1, loss_chunk_tokens=4)
        )
        token_BL = torch.zeros(2, 9, dtype=torch.int64)
        weight_BL: Tensor = torch.ones(2, 9)
        nll_B = model(token_BL, token_BL, token_BL, token_BL, weight_BL, token_BL[:, 0])
        nll_B.sum().backward()
    assert nll_B.shape == (2,)
