"""Typed configs from YAML and back: `to_config` is the only way out of OmegaConf's containers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hpctrain.config.complaints import explain, nearest
from hpctrain.config.schema import (
    Config,
    DataConfig,
    DecoderConfig,
    ImageDataConfig,
    ModelConfig,
    TokenDataConfig,
    VisionConfig,
)
from hpctrain.errors import ConfigError

T = TypeVar("T")
MODEL_CONFIGS: dict[str, type[ModelConfig]] = {"vision": VisionConfig, "decoder": DecoderConfig}
DATA_CONFIGS: dict[str, type[DataConfig]] = {"images": ImageDataConfig, "tokens": TokenDataConfig}


def conf_dir() -> Path:
    """Directory of the shipped configs: inside an installed wheel, else beside the package in a checkout."""
    package = Path(__file__).resolve().parents[1]
    installed, checkout = package / "conf", package.parent / "conf"
    return installed if installed.is_dir() else checkout


def user_conf_dir() -> Path:
    """Directory of the user's own configs."""
    return Path.home() / ".config" / "hpctrain"


def to_config(cfg: DictConfig) -> Config:
    """The typed config behind a composed one, everything resolved. Raises ConfigError."""
    try:
        config = OmegaConf.to_object(cfg)
    except OmegaConfBaseException as error:
        raise explain(error) from error
    assert isinstance(config, Config)
    unknown = _unknown_keys(OmegaConf.to_container(cfg), config)
    if unknown:
        raise ConfigError(f"no key {', '.join(unknown)}", "nothing would read it", nearest(unknown[0]))
    return config


def _unknown_keys(given: Any, config: Any, prefix: str = "") -> list[str]:
    """Keys that were added to a config and that its dataclasses do not have."""
    if not (isinstance(given, dict) and dataclasses.is_dataclass(config)):
        return []
    unknown = []
    known = {field.name for field in dataclasses.fields(config)}
    for key, value in given.items():
        if key in known:
            unknown += _unknown_keys(value, getattr(config, str(key)), f"{prefix}{key}.")
        else:
            unknown.append(f"{prefix}{key}")
    return unknown


def to_dict(config: Config) -> dict[str, Any]:
    """Plain dicts, lists and strings (enums by name)."""
    plain = OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def read_yaml(path: Path) -> Any:
    """What a file holds, as it stands there."""
    return OmegaConf.to_container(OmegaConf.load(path))


def save_config(config: Config, path: Path) -> None:
    path.write_text(OmegaConf.to_yaml(OmegaConf.structured(config)))


def check_overrides(overrides: list[str]) -> None:
    """Overrides of a frozen config are plain `key=value`: it has no groups to choose from."""
    groups = {field.name for field in dataclasses.fields(Config) if str(field.type).endswith("Config")}
    for override in overrides:
        key, equals, _ = override.partition("=")
        if not equals:
            raise ConfigError(f"{override!r} is no override", "it has no =", "write key=value")
        if key.lstrip("+") in groups:
            raise ConfigError(
                override,
                "a run that exists has no options to choose from, only keys",
                f"{key.lstrip('+')}.KEY=VALUE, or submit it again with {override}",
            )


def _class_of(known: dict[str, type[T]], kind: str, where: str) -> type[T]:
    if kind not in known:
        raise ConfigError(f"{where}={kind}", f"known kinds: {', '.join(known)}")
    return known[kind]


def load_config(path: Path, overrides: list[str] | None = None) -> Config:
    """Read a frozen config.yaml, with `key=value` overrides on top. Raises ConfigError."""
    if not path.exists():
        raise ConfigError(
            f"no config at {path}", "a run folder holds config.yaml", "name the folder of a run"
        )
    check_overrides(overrides or [])
    try:
        raw = OmegaConf.load(path)
        model = _class_of(MODEL_CONFIGS, raw.model.kind, f"{path}: model.kind")
        data = _class_of(DATA_CONFIGS, raw.data.kind, f"{path}: data.kind")
        base = OmegaConf.structured(Config(model=model(), data=data()))
        merged = OmegaConf.merge(base, raw, OmegaConf.from_dotlist([o.lstrip("+") for o in overrides or []]))
    except OmegaConfBaseException as error:
        raise explain(error) from error
    assert isinstance(merged, DictConfig)
    return to_config(merged)
