"""What a backbone costs, measured on fakes: for the planner's table, and for `plan --trace`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from hpctrain.config.schema import VisionConfig
from hpctrain.core.pretend import CudaAutocast, OnMeta, fill_with_fakes
from hpctrain.core.tracker import Tracker
from hpctrain.models.registry import resolve_spec
from hpctrain.models.spec import DataFacts
from hpctrain.plan.backbones import BackboneCosts

BATCH = 128  # so that weight gradients on their way are little beside what images take


def measure_backbone(model: VisionConfig) -> BackboneCosts:
    """The costs of a model's backbone at its image size. Takes seconds, and no memory.

    Raises:
        ConfigError: the backbone cannot be built, or takes no images of this size.
    """
    spec = resolve_spec(model.kind)
    assert spec.build is not None
    with OnMeta():
        whole = spec.build(model, DataFacts(2, []))
    (name,) = spec.compiled_modules
    backbone, fakes = whole.get_submodule(name), FakeTensorMode(allow_non_fake_inputs=True)
    fill_with_fakes(backbone, fakes)
    height, width = model.image_size
    with fakes:
        flops, has_attention, num_features = _count_flops(backbone, height, width)
        for parameter in backbone.parameters():
            parameter.grad = torch.zeros_like(parameter)
        kept, largest, cast = _run(backbone, height, width, bf16=True)
        kept_fp32, largest_fp32, _ = _run(backbone, height, width, bf16=False)
    return BackboneCosts(
        parameters=sum(p.numel() for p in backbone.parameters()),
        buffers=sum(b.numel() for b in backbone.buffers() if b.is_floating_point()),
        num_features=num_features,
        cast_parameters=cast,
        is_transformer=has_attention,
        forward_flops=flops,
        activation_bytes=kept,
        activation_bytes_fp32=kept_fp32,
        largest_bytes=largest,
        largest_bytes_fp32=largest_fp32,
    )


def _count_flops(backbone: nn.Module, height: int, width: int) -> tuple[int, bool, int]:
    """Forward operations of an image, whether it has attention (products of batches), number of features."""
    # Attention as plain matrix products: fused kernels are not all known to the counter.
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter:
        feature_BF = backbone(torch.empty(2, 3, height, width))
    by_operator: dict[Any, int] = counter.get_flop_counts()["Global"]
    has_attention = any("bmm" in str(operator) for operator in by_operator)
    return counter.get_total_flops() // 2, has_attention, int(feature_BF.shape[1])


def _run(backbone: nn.Module, height: int, width: int, bf16: bool) -> tuple[int, int, int]:
    """Bytes that an image keeps for backward, those of its largest moment beyond, and how many weights are
    cast."""
    tracker = _Casts()
    tracker.watch([*backbone.parameters(), *backbone.buffers(), *(p.grad for p in backbone.parameters())])
    before = tracker.now
    with tracker, CudaAutocast():
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            feature_BF = backbone(torch.empty(BATCH, 3, height, width))
        kept = tracker.alive() - before - tracker.copied
        feature_BF.sum().backward()
    largest = tracker.peak - before - tracker.copied - kept
    return kept // BATCH, largest // BATCH, tracker.copied // 2


class _Casts(Tracker):  # type: ignore[no-untyped-call]
    """Counts the bytes of copies that autocast makes of weights."""

    copied = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func is torch.ops.aten._to_copy.default and isinstance(args[0], nn.Parameter):
            self.copied += result.nbytes
        return result
