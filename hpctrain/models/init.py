"""Random weights that do not depend on the layout: a tensor's values follow from the seed and its name.

Each whole tensor has a generator of its own, on the CPU; who holds a part of it cuts that part out.
"""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hpctrain.config.schema import DecoderConfig

if TYPE_CHECKING:
    from hpctrain.models.decoder import Decoder


def make_initial(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, seed: int, config: DecoderConfig
) -> Tensor:
    """Return the initial value of a whole parameter, on the CPU.

    Norms are 1, biases 0, matrices normal with standard deviation `initializer_range`, as in Hugging Face;
    of LoRA, A is uniform in ±1/sqrt(inputs) and B zero, as in PEFT. Drawn in fp32, whatever the dtype.

    Args:
        name: name of the parameter in the whole decoder.
        shape: its whole shape.
        dtype: of the result.
        seed: of the run.
        config: for `initializer_range`.
    """
    if name.endswith("norm.weight"):
        return torch.ones(shape, dtype=dtype)
    if name.endswith((".bias", ".lora_B.weight")):
        return torch.zeros(shape, dtype=dtype)
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
    value = torch.empty(shape, dtype=torch.float32)
    if name.endswith(".lora_A.weight"):
        bound = 1 / math.sqrt(shape[1])
        return value.uniform_(-bound, bound, generator=generator).to(dtype)
    return value.normal_(0.0, config.initializer_range, generator=generator).to(dtype)


@torch.no_grad()
def init_weights(model: Decoder, seed: int) -> None:
    """Fill every parameter of a decoder, or of a stage of one, in place; none may be cut over ranks."""
    for name, parameter in model.named_parameters():
        parameter.copy_(make_initial(name, tuple(parameter.shape), parameter.dtype, seed, model.config))
