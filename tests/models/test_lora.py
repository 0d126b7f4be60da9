"""Adapters against `peft`, which puts its own on the same model of `transformers`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import get_peft_model
from torch import Tensor, nn

from hpctrain.config.schema import LoraConfig
from hpctrain.models.decoder import Decoder
from hpctrain.models.dropout import KeyedDropout
from hpctrain.models.init import init_weights
from hpctrain.models.lora import LORA_TARGETS, LoraLinear, apply_lora, merge_weight
from tests.models.reference import (
    CASES,
    gradients,
    make_decoder,
    make_reference,
    make_tokens,
    plain_nll,
    widened,
)

# peft asks transformers by an old name
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
EXACT = {"rtol": 1e-10, "atol": 1e-10}  # float64
SOME = ["q_proj", "v_proj", "down_proj"]


def make_pair(case: str, config: LoraConfig) -> tuple[Any, Decoder]:
    """Return peft's model and ours, with the same random adapters."""
    reference = make_reference(**CASES[case])
    decoder = make_decoder(reference)
    apply_lora(decoder, config)
    settings: dict[str, Any] = {"r": config.rank, "lora_alpha": config.alpha, "lora_dropout": config.dropout}
    peft_config = PeftConfig(target_modules=config.targets, task_type="CAUSAL_LM", **settings)
    theirs = get_peft_model(reference, peft_config, autocast_adapter_dtype=False)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.3)
                decoder.get_parameter(to_our_name(name)).copy_(parameter)
    return theirs, decoder


def to_our_name(name: str) -> str:
    return name.removeprefix("base_model.model.").replace(".default", "").replace(".base_layer", "")


@pytest.mark.parametrize("targets", [list(LORA_TARGETS), SOME])
@pytest.mark.parametrize("case", ["qwen2", "llama, tied"])
def test_loss_and_gradients_are_those_of_peft(case: str, targets: list[str]) -> None:
    theirs, decoder = make_pair(case, LoraConfig(rank=3, alpha=7.0, targets=targets))
    token_BL, position_BL, label_BL, weight_BL = make_tokens(2, 13)
    with widened():
        expected_B = plain_nll(theirs(input_ids=token_BL, use_cache=False).logits, label_BL, weight_BL)
        expected_B.sum().backward()
    nll_B = decoder(token_BL, position_BL, None, label_BL, weight_BL)
    torch.testing.assert_close(nll_B, expected_B, **EXACT)
    nll_B.sum().backward()
    expected = {to_our_name(name): gradient for name, gradient in gradients(theirs).items()}
    assert gradients(decoder).keys() == expected.keys()
    assert all(".lora_" in name for name in expected)
    for name, gradient in gradients(decoder).items():
        torch.testing.assert_close(gradient, expected[name], **EXACT)


def test_only_adapters_are_trained_and_names_of_the_rest_stay() -> None:
    reference = make_reference(**CASES["qwen2"])
    decoder = make_decoder(reference)
    before = set(decoder.state_dict())
    apply_lora(decoder, LoraConfig(rank=2, targets=SOME))
    trained = {name for name, p in decoder.named_parameters() if p.requires_grad}
    assert before | trained == set(decoder.state_dict()) and not before & trained
    assert len(trained) == 2 * len(SOME) * 3


def test_rank_0_changes_nothing() -> None:
    decoder = make_decoder(make_reference(**CASES["llama"]))
    apply_lora(decoder, LoraConfig(rank=0))
    assert all(p.requires_grad for p in decoder.parameters())
    assert not any(isinstance(module, LoraLinear) for module in decoder.modules())


def test_new_adapters_change_nothing_but_are_not_stuck() -> None:
    decoder = make_decoder(make_reference(**CASES["qwen3"]))
    token_BL, position_BL, label_BL, weight_BL = make_tokens(2, 13)
    before = decoder.logits(token_BL, position_BL)
    apply_lora(decoder, LoraConfig(rank=2))
    base = {name: p.clone() for name, p in decoder.named_parameters() if ".lora_" not in name}
    init_weights(decoder, seed=0)
    decoder.load_state_dict(base, strict=False)
    torch.testing.assert_close(decoder.logits(token_BL, position_BL), before, rtol=0, atol=0)
    decoder(token_BL, position_BL, None, label_BL, weight_BL).sum().backward()
    assert all(g.abs().max() > 0 for name, g in gradients(decoder).items() if "lora_B" in name)


def test_merged_weights_give_the_same_logits() -> None:
    config = LoraConfig(rank=3, alpha=7.0)
    reference_config = make_reference(**CASES["qwen2"])
    _, adapted = make_pair("qwen2", config)
    merged = make_decoder(reference_config)
    state = adapted.state_dict()
    for name, weight in merged.state_dict().items():
        path = name.removesuffix(".weight")
        if f"{path}.lora_A.weight" in state:
            a, b = state[f"{path}.lora_A.weight"], state[f"{path}.lora_B.weight"]
            weight.copy_(merge_weight(weight, a, b, config))
    token_BL, position_BL, *_ = make_tokens(2, 13)
    torch.testing.assert_close(
        merged.logits(token_BL, position_BL), adapted.logits(token_BL, position_BL), **EXACT
    )


def test_the_adapter_drops_its_own_input_only_and_every_one_otherwise() -> None:
    base = nn.Linear(6, 4, dtype=torch.float64)
    linear = LoraLinear(base, LoraConfig(rank=2, alpha=3.0, dropout=0.5), site=9)
    nn.init.normal_(linear.lora_B.weight)
    x, key_B = torch.rand(2, 5, 6, dtype=torch.float64), torch.tensor([1, 2])
    kept = KeyedDropout(0.5, 9).make_mask(key_B, 5, 6)
    expected: Tensor = base(x) + 1.5 * ((x * kept * 2) @ linear.lora_A.weight.T @ linear.lora_B.weight.T)
    torch.testing.assert_close(linear(x, key_B=key_B), expected, **EXACT)
    decoder = make_decoder(make_reference(**CASES["llama"]))
    apply_lora(decoder, LoraConfig(rank=2, dropout=0.5))
    sites = [module.site for module in decoder.modules() if isinstance(module, KeyedDropout)]
    assert len(set(sites)) == len(sites) == 3 * (2 + len(LORA_TARGETS))


def test_a_key_reaches_every_adapter() -> None:
    decoder = make_decoder(make_reference(**CASES["llama"]))
    apply_lora(decoder, LoraConfig(rank=2, dropout=0.5))
    seen: list[nn.Module] = []
    dropouts = [module.dropout for module in decoder.modules() if isinstance(module, LoraLinear)]
    for dropout in dropouts:
        dropout.register_forward_pre_hook(
            lambda module, args: seen.append(module) if args[1] is not None else None
        )
    token_BL, position_BL, label_BL, weight_BL = make_tokens(2, 13)
    decoder(token_BL, position_BL, None, label_BL, weight_BL, torch.tensor([1, 2]))
    assert len(seen) == len(dropouts)
