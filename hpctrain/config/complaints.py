"""What Hydra and OmegaConf complain about, in our form: what was asked, what is true, what to type."""

from __future__ import annotations

import dataclasses
import difflib
import re

from omegaconf.errors import OmegaConfBaseException

from hpctrain.config import schema
from hpctrain.errors import ConfigError


def explain(error: OmegaConfBaseException) -> ConfigError:
    """A value or key that does not fit the schema."""
    key = getattr(error, "full_key", None) or ""
    first_line = str(error).strip().splitlines()[0]
    missing = re.search(r"of type `(\w+)` has missing mandatory value: (\w+)", first_line)
    if missing:
        group = next((g for g, name in _groups().items() if name == missing[1]), "")
        key = f"{group}.{missing[2]}".lstrip(".")
        return ConfigError(f"{key} is not set", "it has no default", f"add {key}=VALUE")
    return ConfigError(f"bad value for {key}" if key else "bad config", first_line, _nearest(key))


def explain_hydra(error: Exception) -> ConfigError:
    """A composition that failed: unknown option, unknown key, wrong type, wrong syntax."""
    text = str(error).strip()
    option = re.search(r"Could not find '([\w.-]+)/([^']+)'", text)
    if option:
        group, name = option[1], option[2]
        options = [
            line.strip() for line in text.splitlines() if line.startswith("\t") and "provider=" not in line
        ]
        options = [o for o in options if not o.startswith("_")]
        prefix = "+" if group == "exp" else ""
        close = difflib.get_close_matches(name, options, n=1) or options[:1]
        return ConfigError(
            f"no {group} named {name!r}",
            f"there are: {', '.join(options)}",
            f"{prefix}{group}={close[0]}" if close else "",
        )
    key = re.search(r"Could not override '([^']+)'", text)
    if key:
        return ConfigError(f"no key {key[1]}", "the config has no such key", _nearest(key[1]))
    merged = re.search(r"Error merging override (\S+?)=(.*)", text)
    if merged:
        cause = str(error.__cause__ or "").strip().splitlines()
        return ConfigError(
            f"{merged[1]}={merged[2]}", cause[0] if cause else text, f"{merged[1]}=VALUE of that type"
        )
    syntax = re.search(r"Error parsing override '([^']*)'", text)
    if syntax:
        return ConfigError(
            f"{syntax[1]!r} is no override",
            text.splitlines()[1] if "\n" in text else "it cannot be parsed",
            "write key=value, and +exp=NAME; quote values with spaces or commas: 'key=\"a, b\"'",
        )
    repeated = re.search(r"Multiple values for (\w+)", text)
    if repeated:
        return ConfigError(f"{repeated[1]} is given twice", text.splitlines()[0], f"give one {repeated[1]}=")
    return ConfigError("the config cannot be composed", "; ".join(text.splitlines()[:3]), "hpctrain --help")


def _groups() -> dict[str, str]:
    """Group name to the name of its dataclass."""
    groups = {field.name: str(field.type) for field in dataclasses.fields(schema.Config)}
    return {**groups, "model": schema.VisionConfig.__name__}


def known_keys() -> list[str]:
    """Every dotted key of the schema."""
    keys = []
    for field in dataclasses.fields(schema.Config):
        group = getattr(schema, _groups()[field.name], None)
        if dataclasses.is_dataclass(group):
            keys += [f"{field.name}.{inner.name}" for inner in dataclasses.fields(group)]
        else:
            keys.append(field.name)
    return keys


def _nearest(key: str) -> str:
    """A suggestion for a mistyped key: nearest in spelling, or the same last word in another group."""
    keys = known_keys()
    same_word = [k for k in keys if k.rpartition(".")[2] == key.lstrip("+").rpartition(".")[2]]
    near = same_word or difflib.get_close_matches(key.lstrip("+"), keys, n=3, cutoff=0.6)
    return " or ".join(near[:3]) if near else "hpctrain/config/schema.py lists all keys"
