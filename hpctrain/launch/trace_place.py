"""Traces a step on one place of the pipeline, in a process of its own: a door into torch.

    python -m hpctrain.launch.trace_place FOLDER PLACE

FOLDER holds config.yaml and plan.json; place_<PLACE>.json is written there.
"""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from hpctrain.config.load import load_config
from hpctrain.config.schema import VisionConfig
from hpctrain.core.backbone_costs import measure_backbone
from hpctrain.core.trace import trace_step
from hpctrain.errors import HpctrainError
from hpctrain.plan.backbones import backbone_costs
from hpctrain.plan.plan import RunPlan
from hpctrain.run.directory import write_json


def trace_place(folder: Path, place: int) -> dict[str, Any]:
    """What a step does at a place, and the costs of the backbone if no plan knew them. Raises ConfigError."""
    config = load_config(folder / "config.yaml")
    plan = RunPlan.from_json((folder / "plan.json").read_text())
    begun, costs = time.monotonic(), None
    if isinstance(config.model, VisionConfig) and backbone_costs(config.model) is None:
        costs = asdict(measure_backbone(config.model))
    traced = trace_step(config, plan, place, plan.num_identities)
    return {
        "place": place,
        "peak_bytes": traced.peak_bytes,
        "state_bytes": traced.state_bytes,
        "collectives": [
            {"axis": axis, "kind": kind, "count": traffic.count, "size_bytes": traffic.size_bytes}
            for (axis, kind), traffic in sorted(traced.collectives.items())
        ],
        "costs": costs,
        "seconds": time.monotonic() - begun,
    }


def main() -> int:
    folder, place = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    try:
        result = trace_place(folder, place)
    except HpctrainError as error:
        result = {"error": [error.asked, error.found, error.change]}
    write_json(folder / f"place_{place}.json", result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
