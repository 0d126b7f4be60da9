"""Evaluation of a whole split over all ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch

from hpctrain.core.mesh import Mesh
from hpctrain.core.parallel import Parallel
from hpctrain.core.stop import AgreedStop
from hpctrain.core.watchdog import Watchdog

Arrays = dict[str, np.ndarray[Any, Any]]


def evaluate(
    parallel: Parallel,
    batches: Iterable[Any],
    metrics: Callable[[Arrays], dict[str, float]],
    mesh: Mesh,
    stop: AgreedStop,
    watchdog: Watchdog,
) -> dict[str, float] | None:
    """Run a model over this rank's batches, gather its outputs, and compute metrics on rank 0.

    Returns the metrics on rank 0, an empty dict on the others, and None on all when a stop was agreed.
    Collective: every rank has the same number of batches.
    """
    collected: list[dict[str, torch.Tensor]] = []
    model = parallel.model
    training = model.training
    model.eval()
    try:
        for group in _in_groups(batches, parallel.eval_group):
            if stop.agreed() is not None:
                return None
            moved = [batch.to(mesh.device, non_blocking=True) for batch in group]
            collected += parallel.eval_outputs(moved)
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


def _in_groups(batches: Iterable[Any], size: int) -> Iterator[list[Any]]:
    iterator = iter(batches)
    while group := list(itertools.islice(iterator, size)):
        yield group
