"""Evaluation over ranks gives the metrics of one process; a stop abandons it on all."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hpctrain.config.schema import OptimConfig
from hpctrain.core.evaluate import evaluate
from hpctrain.core.mesh import Mesh
from hpctrain.core.replicated import Replicated
from hpctrain.core.stop import AgreedStop, SignalFlag
from hpctrain.core.watchdog import Watchdog
from hpctrain.run.causes import CauseKind
from tests.core.toy import build_toy, make_batch
from tests.helpers.ranks import run_ranks

SPLIT = make_batch(0, size=30, padding=0)


def make_metrics(outputs):
    kept = outputs["weight_B"] > 0
    order = np.argsort(outputs["sample_id_B"][kept])
    right = outputs["logits_BC"].argmax(1) == outputs["identity_B"]
    return {
        "count": float(kept.sum()),
        "accuracy": float(right[kept].mean()),
        "first": float(outputs["logits_BC"][kept][order][0, 0]),
    }


def share_of(rank, world, size=4):
    """Batch i of rank r holds the samples from (i · world + r) · size on; the end is padding of weight 0."""
    for first in range(0, 30, size * world):
        index = torch.arange(first + rank * size, first + (rank + 1) * size)
        batch = SPLIT.cut(index % 30)
        batch.weight_B = (index < 30).float()
        yield batch


def evaluate_on(rank, world, stop_at=None):
    flag = SignalFlag()
    mesh = Mesh(rank, rank, world, torch.device("cpu"), dist.group.WORLD)
    stop = AgreedStop(flag, dist.group.WORLD, stop_file=None, timeout_s=20, stop_timeouts_s={})
    model = build_toy("batch", drop_rate=0.5)
    watchdog = Watchdog(flag, lambda kind, message: None, timeout_s=60, stop_timeouts_s={})

    def batches():
        for index, batch in enumerate(Moving(b) for b in share_of(rank, world)):
            if index == stop_at and rank == world - 1:
                flag.cause = CauseKind.time_limit
            yield batch

    parallel = Replicated(model, OptimConfig(), rank, world, mesh.device, 25)
    result = evaluate(parallel, batches(), make_metrics, mesh, stop, watchdog)
    return result, model.training


class Moving:
    """A batch that can be sent to a device."""

    def __init__(self, batch):
        self.batch = batch

    def to(self, device, non_blocking):
        return self.batch


def test_any_number_of_ranks_gives_the_metrics_of_one_process():
    model = build_toy("batch").eval()
    logits_BC, _ = model.logits(SPLIT.image_BCHW)
    right_B = (logits_BC.argmax(1) == SPLIT.identity_B).float()
    for world in (1, 2, 3):
        (first, training), *others = run_ranks(world, evaluate_on)
        assert training
        assert first == pytest.approx(
            {"count": 30.0, "accuracy": float(right_B.mean()), "first": float(logits_BC[0, 0].detach())}
        )
        assert others == [({}, True)] * (world - 1)


def test_a_stop_abandons_the_evaluation_on_all_ranks():
    assert run_ranks(2, evaluate_on, 1) == [(None, True)] * 2
