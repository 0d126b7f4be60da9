"""From Hydra's composed config to our typed one. Only the login node does this; a job reads the result."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from hpctrain.config.load import DATA_CONFIGS, MODEL_CONFIGS, to_config
from hpctrain.config.schema import (
    CheckpointConfig,
    ClusterConfig,
    Config,
    DataConfig,
    DecoderConfig,
    ModelConfig,
    OptimConfig,
    ParallelismConfig,
    VisionConfig,
)
from hpctrain.errors import ConfigError

WITHOUT_DATA = "not_given"  # stands for a data.root that the user has not got yet
SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=+-]{0,150}")


def register_schemas() -> None:
    """Tell Hydra the types; an option file of `model/` or `data/` begins with its kind's, such as
    `defaults: [_vision, _self_]`."""
    store = ConfigStore.instance()
    # With the base classes, into which every kind can be merged.
    store.store(name="schema", node=Config(model=ModelConfig(), data=DataConfig()))
    for kind, model in MODEL_CONFIGS.items():
        store.store(group="model", name=f"_{kind}", node=model)
    for kind, data in DATA_CONFIGS.items():
        store.store(group="data", name=f"_{kind}", node=data)
    groups: dict[str, type] = {
        "parallelism": ParallelismConfig,
        "cluster": ClusterConfig,
        "optim": OptimConfig,
        "checkpoint": CheckpointConfig,
    }
    for group, schema in groups.items():
        store.store(group=group, name=f"_{group}", node=schema)


def resolve_config(cfg: DictConfig, experiment: str | None, *, without_data: bool = False) -> Config:
    """The typed config of a run, with its name and absolute paths. Raises ConfigError.

    Args:
        without_data: put `WITHOUT_DATA` where `data.root` is not given.
    """
    if without_data and OmegaConf.is_missing(cfg.data, "root"):
        cfg.data.root = WITHOUT_DATA
    config = to_config(cfg)
    if config.name is None:
        config.name = experiment or config.model.kind
    check_name(config.name)
    config.run_root = str(Path(config.run_root).expanduser().resolve())
    check_root(config.run_root)
    config.data.root = str(Path(config.data.root).expanduser().resolve())
    if isinstance(config.model, DecoderConfig | VisionConfig) and config.model.pretrained is not None:
        config.model.pretrained = str(Path(config.model.pretrained).expanduser().resolve())
    return config


def check_name(name: str) -> None:
    """A run's name is a folder name and nothing else. Raises ConfigError."""
    if not SAFE_NAME.fullmatch(name):
        safe = re.sub(r"[^A-Za-z0-9._=+-]+", "_", name).strip("._=+-")[:150] or "run"
        raise ConfigError(
            f"name={name!r} cannot be a folder",
            "a name has letters, digits and . _ = + -, begins with a letter or digit, is at most 151 long",
            f"name={safe}",
        )


def check_root(run_root: str) -> None:
    """The batch script names log files under `run_root`, where Slurm expands %. Raises ConfigError."""
    if "%" in run_root or not run_root.isprintable():
        raise ConfigError(
            f"run_root={run_root!r}",
            "a % or a control character in a path means something else to Slurm",
            "run_root=FOLDER without them",
        )


def sweep_labels(points: list[list[str]]) -> list[str]:
    """A folder name for each point of a sweep, from the overrides in which the points differ.

    The last part of a key is enough where no other swept key ends in the same word.
    """
    common = set.intersection(*(set(point) for point in points)) if len(points) > 1 else set()
    swept = [[o.lstrip("+~").partition("=")[::2] for o in point if o not in common] for point in points]
    keys = {key for point in swept for key, _ in point}
    short = {key: key.rpartition(".")[2] for key in keys}
    ends = list(short.values())
    labels = []
    for point in swept:
        parts = [f"{short[k] if ends.count(short[k]) == 1 else k}={v}" for k, v in point]
        label = re.sub(r"[^A-Za-z0-9._=+-]+", "-", "_".join(parts) or "point").strip("-._")
        if len(label) > 150:
            label = f"{label[:140]}-{hashlib.sha256(label.encode()).hexdigest()[:8]}"
        labels.append(label)
    if len(set(labels)) != len(labels):
        raise ConfigError(
            "two points of the sweep would share a folder", f"{labels}", "sweep over simpler values"
        )
    return labels
