"""Model FLOPs against published numbers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import timm
import torch
from torch import nn

from hpctrain.core.flops import count_training_flops


class OnImages(nn.Module):
    def __init__(self, backbone):
        super().__init__()
        self.backbone = backbone

    def forward(self, batch):
        return self.backbone(batch.image_BCHW)


def make_images(size, batch_size=1):
    return SimpleNamespace(image_BCHW=torch.zeros(batch_size, 3, size, size), weight_B=torch.ones(batch_size))


@pytest.mark.parametrize(
    ("name", "macs"),
    [
        ("resnet50", 4.09e9),  # torchvision's model page
        ("vit_tiny_patch16_224", 1.26e9),  # timm's results table; 1.07 without attention's own products
    ],
)
def test_flops_of_known_networks(name, macs):
    # Tables round to three digits, 0.25 % here; some count pooling and norms, which are below 1 %.
    flops = count_training_flops(OnImages(timm.create_model(name)), make_images(224))
    assert flops == pytest.approx(3 * 2 * macs, rel=0.01)


def test_flops_are_per_sample_and_the_model_is_as_before():
    model = OnImages(
        nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.Dropout())
    )
    state = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    # Every output pixel costs 3·3·3 multiply-adds a channel.
    assert count_training_flops(model, make_images(16, 4)) == 3 * 2 * 16 * 16 * 8 * 27
    assert model.training
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
