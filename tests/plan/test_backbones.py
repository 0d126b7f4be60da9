"""The table of backbones: against published numbers, and against a measurement made anew."""

from __future__ import annotations

from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

import pytest

from hpctrain.config.schema import VisionConfig
from hpctrain.core.backbone_costs import measure_backbone
from hpctrain.plan.backbones import (
    SHIPPED,
    BackboneCosts,
    at_area,
    backbone_costs,
    cache_path,
    read_costs,
    write_costs,
)

# Millions of parameters and GMACs at 224 × 224, with a classifier of 1,000 classes, which is left out here:
# He et al. 2016 (table 1) and torchvision's page of ResNet-50; Liu et al. 2022 (table 1); Dosovitskiy et al.
# 2021 (table 1) and Steiner et al. 2022; Liu et al. 2021 (table 1); Tan & Le 2019 (table 2).
PUBLISHED = {
    "resnet18": (11.7, 1.8),
    "resnet50": (25.6, 4.1),
    "resnet101": (44.5, 7.8),
    "convnext_tiny": (28.6, 4.5),
    "convnext_base": (88.6, 15.4),
    "convnext_large": (197.8, 34.4),
    "vit_base_patch16_224": (86.6, 17.6),
    "swin_tiny_patch4_window7_224": (28.3, 4.5),
    "swin_base_patch4_window7_224": (87.8, 15.4),
    "efficientnet_b0": (5.3, 0.39),
}


def costs_of(name: str, size: int) -> BackboneCosts:
    costs = backbone_costs(VisionConfig(backbone=name, image_size=[size, size]))
    assert costs is not None
    return costs


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_and_operations_are_the_published_ones(name: str) -> None:
    costs, (parameters, macs) = costs_of(name, 224), PUBLISHED[name]
    classifier = costs.num_features * 1000 + 1000
    assert costs.parameters + classifier == pytest.approx(parameters * 1e6, rel=0.01)
    assert costs.forward_flops / 2 == pytest.approx(macs * 1e9, rel=0.025)


@pytest.mark.parametrize("name", ["resnet18", "vit_tiny_patch16_224"])
def test_an_entry_is_what_its_script_measures(name: str) -> None:
    """Another version of torch or timm may keep a little more or less."""
    measured = measure_backbone(VisionConfig(backbone=name, image_size=[112, 112]))
    assert asdict(costs_of(name, 112)) == pytest.approx(asdict(measured), rel=0.01)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("vit_tiny_patch16_224", 320),
        pytest.param("resnet50", 160, marks=pytest.mark.long),
        pytest.param("convnext_tiny", 320, marks=pytest.mark.long),
    ],
)
def test_between_the_sizes_costs_are_near_a_measurement(name: str, size: int) -> None:
    measured, told = (
        measure_backbone(VisionConfig(backbone=name, image_size=[size, size])),
        costs_of(name, size),
    )
    assert told.parameters == pytest.approx(measured.parameters, rel=1e-3)
    assert told.forward_flops == pytest.approx(measured.forward_flops, rel=0.03)
    assert told.activation_bytes == pytest.approx(measured.activation_bytes, rel=0.03)


def test_attention_grows_with_the_square_of_the_image() -> None:
    """ViT-B/16: 12 blocks of 4·d² + 8·d² a token and 2·d a pair of tokens, multiply-adds; the patches; the
    class token."""

    def macs(size: int) -> int:
        patches, width = (size // 16) ** 2, 768
        tokens = patches + 1
        return 12 * (12 * width**2 * tokens + 2 * width * tokens**2) + patches * width * 3 * 16 * 16

    for size in (224, 512):
        assert costs_of("vit_base_patch16_224", size).forward_flops / 2 == pytest.approx(macs(size), rel=0.01)


def test_a_backbone_that_nobody_measured_is_unknown_until_it_is_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = VisionConfig(backbone="resnet14t.c3_in1k", image_size=[64, 32])
    assert backbone_costs(model) is None
    costs = costs_of("resnet18", 112)
    write_costs(cache_path(), {"resnet14t": {(64, 32): costs}})
    assert backbone_costs(model) == costs
    assert backbone_costs(VisionConfig(backbone="resnet14t", image_size=[128, 128])) is None
    cache_path().write_text("{ half a fi")
    assert backbone_costs(model) is None


def test_one_measured_size_tells_of_no_other() -> None:
    costs = costs_of("resnet18", 112)
    assert at_area({(112, 112): costs}, 112 * 112) == costs
    assert at_area({(112, 112): costs}, 224 * 224) is None


def test_the_table_is_whole() -> None:
    for name, sizes in read_costs(SHIPPED).items():
        areas = sorted(sizes)
        assert len(areas) >= 2, name
        for small, large in pairwise(areas):
            assert sizes[small].activation_bytes < sizes[small].activation_bytes_fp32
            assert sizes[small].activation_bytes < sizes[large].activation_bytes
