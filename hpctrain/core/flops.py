"""Model FLOPs of a training sample, counted on the real module."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode


def count_training_flops(model: nn.Module, microbatch: Any) -> float:
    """FLOPs of forward and backward per sample: 3 × forward, 2 per multiply-add.

    The forward pass runs once on the given microbatch; matrix products and convolutions are counted.
    """
    training = model.training
    model.eval()
    try:
        # Attention as plain matrix products: fused kernels are not all known to the counter.
        plain_attention = sdpa_kernel(SDPBackend.MATH)
        eager = torch.compiler.set_stance("force_eager")  # operators inside a compiled graph are not seen
        with eager, torch.no_grad(), plain_attention, FlopCounterMode(display=False) as counter:
            model(microbatch)
    finally:
        model.train(training)
    return 3.0 * float(counter.get_total_flops()) / len(microbatch.weight_B)
