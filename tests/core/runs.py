"""Whole training runs of a tiny model on a few drawn faces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hpctrain.checkpoint import reader, store
from hpctrain.config.schema import (
    CheckpointConfig,
    ClusterConfig,
    Config,
    ImageDataConfig,
    OptimConfig,
    VisionConfig,
)
from hpctrain.core.mesh import Mesh
from hpctrain.core.stop import SignalFlag
from hpctrain.core.train import train
from hpctrain.core.training import Training
from hpctrain.plan.plan import make_plan
from hpctrain.run.causes import CauseKind
from hpctrain.run.directory import RunDirectory


def make_config(root: Path, ranks: int, **optim: Any) -> Config:
    """Dropout, EMA, clipping, padding in the last batch, three epochs."""
    return Config(
        model=VisionConfig(backbone="test_resnet", embedding_dim=16, image_size=[32, 32], drop_rate=0.2),
        cluster=ClusterConfig(ranks_per_node=ranks),
        data=ImageDataConfig(root=str(root), num_workers=0),
        optim=OptimConfig(
            **{"global_batch_size": 12, "num_epochs": 3, "ema_decay": 0.9, "clip_norm": 1.0, **optim}
        ),
        checkpoint=CheckpointConfig(every_steps=0, keep_last=10, timeout_s=60),
        log_every_steps=1,
    )


def build_training(
    rank: int, world: int, config: Config, folder: Path, attempt: str, flag: SignalFlag
) -> Training:
    run = RunDirectory(folder)
    if rank == 0:
        run.create()
    dist.barrier()
    mesh = Mesh(rank, rank, world, torch.device("cpu"), dist.new_group(backend="gloo"))
    return Training(config, make_plan(config), run, attempt, mesh, flag, lambda kind, message: None)


def run_training(
    rank: int,
    world: int,
    config: Config,
    folder: Path,
    attempt: str = "1_0_0",
    stop_at: int | None = None,
    prepare: Any = None,
) -> tuple[CauseKind, int]:
    """Trains until the end, or until rank `world - 1` is signalled in the step with number `stop_at`.

    Returns why it ended, and the finished steps.
    """
    flag = SignalFlag()
    training = build_training(rank, world, config, folder, attempt, flag)
    if prepare is not None:
        prepare(training)
    step = training.step

    def signalled_step(microbatches: list[Any], index: int) -> dict[str, torch.Tensor]:
        if index == stop_at and rank == world - 1:
            flag.cause = CauseKind.preemption
        return step(microbatches, index)

    training.step = signalled_step  # type: ignore[assignment]
    kind = train(training)
    training.close()
    return kind, training.progress.step


def read_final(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The newest checkpoint, flat, and its facts."""
    checkpoint = store.find(RunDirectory(folder).checkpoints)[0]
    flat: dict[str, Any] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                walk(f"{prefix}{key}.", inner)
        else:
            flat[prefix[:-1]] = value

    walk("", reader.load_full(checkpoint.path))
    return flat, checkpoint.manifest.facts
