"""Low-rank adapters (Hu et al. 2021): y = W x + (alpha / rank) · B A x, where only A and B are trained.

Shapes: B sequences, L tokens, I inputs, O outputs, R rank.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hpctrain.config.schema import LoraConfig
from hpctrain.models.dropout import SITES_PER_LAYER, KeyedDropout

#: linear layers of a block that can carry an adapter; their order numbers the dropout sites
LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class LoraLinear(nn.Linear):
    """A frozen linear layer with an adapter. The layer's own parameters keep their names.

    `lora_A.weight` is (R, I), `lora_B.weight` (O, R), as in PEFT.
    """

    def __init__(self, base: nn.Linear, config: LoraConfig, site: int) -> None:
        super().__init__(base.in_features, base.out_features, base.bias is not None, device="meta")
        self.weight, self.bias = base.weight, base.bias
        like = {"device": base.weight.device, "dtype": base.weight.dtype}
        self.lora_A = nn.Linear(base.in_features, config.rank, bias=False, **like)
        self.lora_B = nn.Linear(config.rank, base.out_features, bias=False, **like)
        nn.init.zeros_(self.lora_B.weight)
        self.dropout = KeyedDropout(config.dropout, site)
        self.scale = config.alpha / config.rank

    def forward(self, input: Tensor, key_B: Tensor | None = None) -> Tensor:
        """Return W x + (alpha / rank) · B A dropout(x), [B, L, O]; no dropout without a key."""
        adapted_BLO: Tensor = self.lora_B(self.lora_A(self.dropout(input, key_B)))
        return super().forward(input) + adapted_BLO * self.scale


def apply_linear(linear: nn.Linear, x_BLI: Tensor, key_B: Tensor | None) -> Tensor:
    """Call a linear layer that may have an adapter. The key goes by name: hooks replace the rest."""
    if isinstance(linear, LoraLinear):
        return linear(x_BLI, key_B=key_B)  # type: ignore[no-any-return]
    return linear(x_BLI)  # type: ignore[no-any-return]


def apply_lora(model: nn.Module, config: LoraConfig) -> None:
    """Freeze the model and put adapters on the linear layers that are named as targets; rank 0 does nothing.

    A stage without blocks has no target, and that is no error.
    What the config may ask for is in `plan.decoder_legality`.
    """
    if config.rank == 0:
        return
    model.requires_grad_(False)
    for path, linear in list(model.named_modules()):
        parent, _, name = path.rpartition(".")
        if name in config.targets:
            assert isinstance(linear, nn.Linear)
            layer = int(path.split(".layers.")[1].split(".")[0])
            site = layer * SITES_PER_LAYER + 2 + LORA_TARGETS.index(name)
            setattr(model.get_submodule(parent), name, LoraLinear(linear, config, site))


def merge_weight(weight_OI: Tensor, a_RI: Tensor, b_OR: Tensor, config: LoraConfig) -> Tensor:
    """Return W + (alpha / rank) · B A, summed in at least fp32, in W's dtype."""
    wide = torch.promote_types(weight_OI.dtype, torch.float32)
    change_OI = b_OR.to(wide) @ a_RI.to(wide) * (config.alpha / config.rank)
    return (weight_OI.to(wide) + change_OI).to(weight_OI.dtype)
