"""What timm's backbones cost: parameters, operations and memory of an image."""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.config.schema import VisionConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class BackboneCosts:
    """Of one backbone at one image size."""

    parameters: int
    forward_flops: int  #: of an image; a multiply-add counts as two
    is_transformer: bool  #: its time goes into large matrix products
    activation_bytes: int  #: kept for backward, of an image, computing in bf16
    activation_bytes_fp32: int  #: the same, computing in fp32
    largest_bytes: int  #: of the largest moment beyond what is kept, of an image, in bf16


def backbone_costs(model: VisionConfig) -> BackboneCosts | None:
    """The costs of a model's backbone; None where the table does not have it."""
    return None
