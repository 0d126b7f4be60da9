"""What makes a run the same run."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from hpctrain.config.load import to_dict
from hpctrain.config.schema import Config, OptimizerKind
from hpctrain.run.identity import differences, digest


def config_with(key: str, value: Any) -> dict[str, Any]:
    config = copy.deepcopy(BASE)
    *groups, name = key.split(".")
    owner = config
    for group in groups:
        owner = owner[group]
    assert name in owner and owner[name] != value
    owner[name] = value
    return config


def make_base() -> dict[str, Any]:
    config = Config()
    config.data.root = "/data"
    return to_dict(config)


BASE = make_base()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("cluster.num_nodes", 4),
        ("cluster.ranks_per_node", 8),
        ("cluster.time_limit_min", 10),
        ("cluster.env", {"A": "1"}),
        ("parallelism.dp_replicate", 4),
        ("parallelism.microbatch_size", 4),
        ("parallelism.compile", True),
        ("checkpoint.every_steps", 7),
        ("budget.crash", 9),
        ("profile.steps", [10, 13]),
        ("log_every_steps", 1),
        ("eval_every_epochs", 3),
        ("hang_timeout_s", 1.0),
        ("name", "other"),
        ("run_root", "elsewhere"),
        ("data.num_workers", 0),
        ("data.prefetch", 9),
    ],
)
def test_shape_is_not_identity(key: str, value: Any) -> None:
    other = config_with(key, value)
    assert differences(BASE, other) == []
    assert digest(BASE) == digest(other)


@pytest.mark.parametrize(
    ("key", "value", "line"),
    [
        ("model.backbone", "resnet10t", "model.backbone: convnext_base → resnet10t"),
        ("model.image_size", [64, 56], "model.image_size: [224, 224] → [64, 56]"),
        ("model.pretrained", "w.safetensors", "model.pretrained: None → w.safetensors"),
        ("data.root", "/other", "data.root: /data → /other"),
        ("data.block_samples", 8, "data.block_samples: 256 → 8"),
        ("optim.lr", 1.0, "optim.lr: 0.001 → 1.0"),
        ("optim.global_batch_size", 8, "optim.global_batch_size: 64 → 8"),
        ("optim.num_epochs", 3, "optim.num_epochs: 10 → 3"),
        ("seed", 1, "seed: 0 → 1"),
    ],
)
def test_model_data_optimisation_and_seed_are_identity(key: str, value: Any, line: str) -> None:
    other = config_with(key, value)
    assert differences(BASE, other) == [line]
    assert digest(BASE) != digest(other)


def test_all_differences_are_shown_in_order_of_their_keys() -> None:
    other = to_dict(Config(seed=2))
    other["data"]["root"] = "/data"
    other["optim"]["kind"] = OptimizerKind.sgd.name
    assert differences(BASE, other) == ["optim.kind: adamw → sgd", "seed: 0 → 2"]


def test_a_key_that_is_new_in_the_schema_shows_as_a_difference() -> None:
    older = copy.deepcopy(BASE)
    del older["optim"]["ema_decay"]
    assert differences(older, config_with("optim.ema_decay", 0.9)) == ["optim.ema_decay: None → 0.9"]
    assert differences(older, BASE) == [], "its default is what the older run had"


def test_digest_is_eight_hex_digits_and_the_same_everywhere() -> None:
    assert len(digest(BASE)) == 8 and int(digest(BASE), 16) >= 0
    shuffled = dict(reversed(BASE.items()))
    assert digest(shuffled) == digest(BASE)
