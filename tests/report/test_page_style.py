"""The page's colours: they stand off their ground, and colour-blind people can tell neighbours apart."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import numpy as np
import pytest

import hpctrain.report

STYLE = (Path(hpctrain.report.__file__).parent / "page.css").read_text()
FILLS = "blue", "sky", "green", "orange", "red", "purple", "olive", "grey", "dark"
# What lies beside each other: kinds of memory, causes of a step, passes.
NEIGHBOURS = (
    (
        "weights",
        "gradients",
        "optimizer",
        "activations",
        "working",
        "gathered",
        "averages",
        "buffers",
        "slack",
    ),
    ("compute", "recompute", "tp", "dp", "pp", "bubble", "optimizer", "offload", "data"),
    ("compute", "dp", "classes", "optimizer", "data"),
    ("forward", "backward", "link", "forward"),
    ("backward2", "link", "forward2", "backward"),
    ("needed", "decode", "storage"),
)
APART = 5 * 2.3  # five times a difference that is just noticed (Mahy et al. 1994)
# Machado, Oliveira & Fernandes 2009, severity 1, linear RGB.
BLINDNESS = {
    "none": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritanopia": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}


def palettes() -> dict[str, dict[str, str]]:
    blocks = re.findall(r":root \{(.*?)\}", STYLE, re.DOTALL)
    light, dark, printed = (dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block)) for block in blocks)
    return {"light": light, "dark": dark, "print": printed}


def classes() -> dict[str, str]:
    rules = re.findall(r"^((?:\.\w+(?:, )?)+) \{ --c: var\(--(\w+)\); \}", STYLE, re.MULTILINE)
    return {name.strip(" ."): colour for names, colour in rules for name in names.split(",")}


def linear(colour: str) -> np.ndarray:
    """Linear RGB of a colour (IEC 61966-2-1)."""
    values = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def luminance(colour: str) -> float:
    return float(linear(colour) @ [0.2126, 0.7152, 0.0722])


def contrast(one: str, other: str) -> float:
    """WCAG 2.2."""
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def lab(colour: str, blindness: str) -> np.ndarray:
    """CIE L*a*b* as someone sees it (D65)."""
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    seen = np.clip(BLINDNESS[blindness] @ linear(colour), 0, 1)
    x, y, z = np.cbrt(np.maximum(to_xyz @ seen / [0.9505, 1.0, 1.089], 1e-6))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("mode", ["light", "dark", "print"])
def test_colours_stand_off_their_ground(mode: str) -> None:
    palette = palettes()[mode]
    for name in FILLS:  # WCAG 1.4.11
        assert contrast(palette[name], palette["page"]) >= 3, name
    for name, ground in itertools.product(("ink", "soft", "good", "bad"), ("page", "card")):  # WCAG 1.4.3
        assert contrast(palette[name], palette[ground]) >= 4.5, (name, ground)
    for name in ("blue", "green"):
        assert contrast(palette["in-bar"], palette[name]) >= 4.5, name


@pytest.mark.parametrize("mode", ["light", "dark", "print"])
@pytest.mark.parametrize("blindness", BLINDNESS)
def test_neighbours_can_be_told_apart(mode: str, blindness: str) -> None:
    palette, colours = palettes()[mode], classes()
    for row in NEIGHBOURS:
        for one, other in itertools.pairwise(row):
            seen = [lab(palette[colours[name]], blindness) for name in (one, other)]
            assert np.linalg.norm(seen[0] - seen[1]) > APART, (one, other)


def test_a_pair_that_colour_blind_people_confuse_is_found() -> None:
    red, green = lab("#c44500", "deuteranopia"), lab("#6a7f00", "deuteranopia")
    assert (
        np.linalg.norm(red - green) < APART < np.linalg.norm(lab("#c44500", "none") - lab("#6a7f00", "none"))
    )
