"""Evaluation of a whole split over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import nn

from hpctrain.core.mesh import Mesh
from hpctrain.core.stop import AgreedStop
from hpctrain.core.watchdog import Watchdog

Arrays = dict[str, np.ndarray[Any, Any]]


def evaluate(
    model: nn.Module,
    batches: Iterable[Any],
    metrics: Callable[[Arrays], dict[str, float]],
    mesh: Mesh,
    stop: AgreedStop,
    watchdog: Watchdog,
) -> dict[str, float] | None:
    """Run the model's `eval_outputs` over this rank's batches, gather, and compute metrics on rank 0.

    Returns the metrics on rank 0, an empty dict on the others, and None on all when a stop was agreed.
    Collective: every rank has the same number of batches.
    """
    collected: list[dict[str, torch.Tensor]] = []
    training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            for batch in batches:
                if stop.agreed() is not None:
                    return None
                outputs = model.eval_outputs(batch.to(mesh.device, non_blocking=True))  # type: ignore[operator]
                collected.append(outputs)
                stop.post()
                watchdog.beat()
    finally:
        model.train(training)
    own = {key: torch.cat([o[key] for o in collected]).cpu().numpy() for key in collected[0]}
    with watchdog.paused():  # collectives have their own time-out, and metrics of many images take a while
        gathered = mesh.gather_objects(own)
        if gathered is None:
            return {}
        parts: list[Any] = gathered
        return metrics({key: np.concatenate([part[key] for part in parts]) for key in own})
