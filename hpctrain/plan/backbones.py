"""What timm's backbones cost: parameters, operations and memory of an image.

`backbones.json` has common ones at a few image sizes (made by bench/backbone_costs.py); what
`hpctrain plan --trace` measures of others comes into the user's cache and is read from there. Between sizes
convolutions grow with the area of the image, attention's operations with its square.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, astuple, dataclass, fields
from functools import cache
from pathlib import Path

from hpctrain.config.schema import VisionConfig

SHIPPED = Path(__file__).with_name("backbones.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class BackboneCosts:
    """Of one backbone at one image size."""

    parameters: int
    buffers: int  #: numbers of running statistics
    num_features: int  #: width of what it returns
    cast_parameters: int  #: those of which bf16 autocast makes copies
    is_transformer: bool  #: it has attention: its time goes into large matrix products
    forward_flops: int  #: of an image; a multiply-add counts as two
    activation_bytes: int  #: kept for backward, of an image, computing in bf16
    activation_bytes_fp32: int  #: the same, computing in fp32
    largest_bytes: int  #: of the largest moment beyond all that is kept, of an image, in bf16
    largest_bytes_fp32: int


Sizes = dict[tuple[int, int], BackboneCosts]  # by height and width of the image


def backbone_costs(model: VisionConfig) -> BackboneCosts | None:
    """The costs of a model's backbone; None where they are unknown: `hpctrain plan --trace` measures them."""
    name, (height, width) = model.backbone.partition(".")[0], model.image_size
    own = read_costs(cache_path()).get(name, {})
    if (height, width) in own:
        return own[height, width]
    known = _shipped().get(name)
    return None if known is None else at_area(known, height * width)


def at_area(sizes: Sizes, area: int) -> BackboneCosts | None:
    """Costs at an image's area: as measured, or from the line through the two nearest sizes, if there are."""
    known = sorted((height * width, costs) for (height, width), costs in sizes.items())
    for measured, costs in known:
        if measured == area:
            return costs
    if len(known) < 2:
        return None
    (low, below), (high, above) = sorted(sorted(known, key=lambda pair: abs(pair[0] - area))[:2])
    share = (area - low) / (high - low)
    names = [field.name for field in fields(BackboneCosts)]
    values = {
        name: before + round(share * (after - before))
        for name, before, after in zip(names, astuple(below), astuple(above), strict=True)
    }
    values["is_transformer"] = below.is_transformer
    if below.is_transformer:
        values["forward_flops"] = _parabola([(area, costs.forward_flops) for area, costs in known], area)
    return BackboneCosts(**values)


def _parabola(points: list[tuple[int, int]], x: int) -> int:
    """Through three points, by Lagrange's formula."""
    total = 0.0
    for i, (own, value) in enumerate(points):
        term = float(value)
        for j, (other, _) in enumerate(points):
            term *= 1.0 if i == j else (x - other) / (own - other)
        total += term
    return round(total)


def read_costs(path: Path) -> dict[str, Sizes]:
    """The table in a file; empty where there is none."""
    try:
        table = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return {
        name: {_size(size): BackboneCosts(**costs) for size, costs in sizes.items()}
        for name, sizes in table.items()
    }


def write_costs(path: Path, table: dict[str, Sizes]) -> None:
    """Write a table, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.write_text(costs_text(table))
    partial.replace(path)


def costs_text(table: dict[str, Sizes]) -> str:
    """A table as JSON, a line for each size."""
    blocks = []
    for name, sizes in sorted(table.items()):
        rows = [
            f'  "{height}x{width}": {json.dumps(asdict(costs))}'
            for (height, width), costs in sorted(sizes.items())
        ]
        blocks.append(f' "{name}": {{\n' + ",\n".join(rows) + "\n }")
    return "{\n" + ",\n".join(blocks) + "\n}\n"


def cache_path() -> Path:
    """Where measured costs are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hpctrain" / "backbones.json"


@cache
def _shipped() -> dict[str, Sizes]:
    return read_costs(SHIPPED)


def _size(text: str) -> tuple[int, int]:
    height, _, width = text.partition("x")
    return int(height), int(width)
