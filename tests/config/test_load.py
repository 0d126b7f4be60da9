"""Typed configs: from YAML and back, names, labels, and what the schema says of its keys."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from hpctrain.config.complaints import expected, known_keys, nearest
from hpctrain.config.compose import check_name, sweep_labels
from hpctrain.config.load import conf_dir, load_config, save_config, to_dict
from hpctrain.config.schema import (
    ClusterKind,
    Config,
    DecoderConfig,
    ImageDataConfig,
    Margin,
    TokenDataConfig,
    VisionConfig,
)
from hpctrain.errors import ConfigError


def make_config() -> Config:
    config = Config(name="x", model=VisionConfig(margin=Margin.cosface, image_size=[64, 56]))
    config.cluster.kind = ClusterKind.slurm
    config.cluster.env = {"A": "1", "B": "a: b"}
    config.cluster.extra_srun = ["--mpi=none"]
    config.data.root = "/data"
    config.optim.clip_norm = 5.0
    return config


def test_a_config_survives_its_file(tmp_path: Path) -> None:
    save_config(make_config(), tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == make_config()


def test_a_file_of_an_older_version_takes_the_defaults_of_new_keys(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    save_config(make_config(), path)
    raw = OmegaConf.load(path)
    del raw.optim["clip_norm"]
    OmegaConf.save(raw, path)
    assert load_config(path).optim.clip_norm is None


def test_overrides_go_on_top_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    save_config(make_config(), path)
    changed = load_config(path, ["cluster.num_nodes=3", "+cluster.env.C=2"])
    assert changed.cluster.num_nodes == 3
    assert changed.cluster.env == {"A": "1", "B": "a: b", "C": "2"}


@pytest.mark.parametrize("text", ["model: {kind: alchemy}", "model: {kind: vision, depth: 3}", "seed: many"])
def test_a_damaged_file_is_a_config_error(text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text if "model" in text else f"model: {{kind: vision}}\n{text}")
    with pytest.raises(ConfigError):
        load_config(path)


def test_plain_dicts_hold_enums_by_name() -> None:
    assert to_dict(make_config())["model"]["margin"] == "cosface"
    assert to_dict(make_config())["cluster"]["kind"] == "slurm"


@pytest.mark.parametrize("name", ["a", "vision_city", "lr=1e-3_seed=0", "a" * 151, "A.b+c-d"])
def test_names_that_are_folders_pass(name: str) -> None:
    check_name(name)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "-x", ".x", "a b", "a\nb", "$(x)", "ả", "a" * 152])
def test_other_names_are_refused_with_one_that_passes(name: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        check_name(name)
    check_name(refusal.value.change.removeprefix("name="))


@pytest.mark.parametrize(
    ("points", "labels"),
    [
        ([["+exp=x", "optim.lr=1", "seed=0"], ["+exp=x", "optim.lr=2", "seed=0"]], ["lr=1", "lr=2"]),
        ([["optim.lr=1", "seed=0"], ["optim.lr=2", "seed=1"]], ["lr=1_seed=0", "lr=2_seed=1"]),
        ([["model.kind=a", "optim.kind=b"], ["model.kind=b", "optim.kind=a"]],
         ["model.kind=a_optim.kind=b", "model.kind=b_optim.kind=a"]),
        ([["+exp=x", "seed=3"]], ["exp=x_seed=3"]),
        ([["optim.betas=[0.9,0.99]"], ["optim.betas=[0.9,0.999]"]], ["betas=-0.9-0.99", "betas=-0.9-0.999"]),
    ],
)  # fmt: skip
def test_points_of_a_sweep_are_named_by_what_was_swept(points: list[list[str]], labels: list[str]) -> None:
    assert sweep_labels(points) == labels
    for label in labels:
        check_name(label)


def test_points_that_would_share_a_folder_are_refused() -> None:
    with pytest.raises(ConfigError, match="share a folder"):
        sweep_labels([["data.root=/a"], ["data.root=:a"]])


def test_long_points_keep_names_that_fit_and_differ() -> None:
    long = "x" * 300
    first, second = sweep_labels([[f"data.root={long}1"], [f"data.root={long}2"]])
    assert first != second
    check_name(first)
    check_name(second)


def walk(value: object, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The paths to the leaves of nested dicts."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from walk(inner, (*path, key))
    else:
        yield path


def test_every_key_of_the_schema_can_be_explained() -> None:
    keys = set(known_keys())
    for model, data in ((VisionConfig(), ImageDataConfig()), (DecoderConfig(), TokenDataConfig())):
        plain = to_dict(Config(model=model, data=data))
        leaves = {
            ".".join(path)
            for path in walk(plain)
            if path[:2] not in (("cluster", "env"), ("cluster", "extra_sbatch"))
        }
        assert leaves <= keys
    assert all(expected(key) for key in keys)


@pytest.mark.parametrize(
    ("key", "near"),
    [("lr", "optim.lr"), ("optim.lrr", "optim.lr"), ("cluster.nodes", "cluster.num_nodes"), ("sed", "seed")],
)
def test_a_mistyped_key_finds_its_neighbour(key: str, near: str) -> None:
    assert near in nearest(key)


@pytest.mark.parametrize(
    "path", sorted(conf_dir().glob("*/*.yaml")), ids=lambda p: f"{p.parent.name}/{p.stem}"
)
def test_every_shipped_option_says_what_it_is_or_is_short(path: Path) -> None:
    text = path.read_text()
    assert text.startswith("#") or len(text.splitlines()) <= 5
    assert path.parent.name != "exp" or text.startswith("# @package _global_\n")
