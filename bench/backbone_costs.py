"""The planner's table of backbones: runs each once on fakes and prints hpctrain/plan/backbones.json.

python bench/backbone_costs.py > hpctrain/plan/backbones.json      about 6 min
python bench/backbone_costs.py resnet18                            one of them
"""

from __future__ import annotations

import argparse
import sys

import torch

from hpctrain.config.schema import VisionConfig
from hpctrain.core.backbone_costs import measure_backbone
from hpctrain.errors import ConfigError
from hpctrain.plan.backbones import Sizes, costs_text

BACKBONES = """
resnet10t resnet18 resnet26t resnet34 resnet50 resnet50d resnet101 resnet152 wide_resnet50_2
resnext50_32x4d seresnet50 convnext_atto convnext_nano convnext_tiny convnext_small convnext_base
convnext_large mobilenetv3_small_100 mobilenetv3_large_100 mobilenetv4_conv_small
mobilenetv4_conv_medium efficientnet_b0 efficientnet_b3 efficientnetv2_s regnety_004 regnety_016
regnety_032 regnety_080 regnety_160 vit_tiny_patch16_224 vit_small_patch16_224 vit_base_patch16_224
vit_large_patch16_224 deit3_base_patch16_224 swin_tiny_patch4_window7_224 swin_small_patch4_window7_224
swin_base_patch4_window7_224
"""
SIZES = 112, 224, 384  # pixels, square


def measure(names: list[str]) -> dict[str, Sizes]:
    """The costs of these backbones at the sizes that they take."""
    table: dict[str, Sizes] = {}
    for name in names:
        for size in SIZES:
            try:
                costs = measure_backbone(VisionConfig(backbone=name, image_size=[size, size]))
            except ConfigError as error:
                print(error, file=sys.stderr)
                continue
            table.setdefault(name, {})[size, size] = costs
            print(name, size, file=sys.stderr)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=BACKBONES.split())
    torch.set_num_threads(1)
    print(costs_text(measure(parser.parse_args().names)), end="")


if __name__ == "__main__":
    main()
