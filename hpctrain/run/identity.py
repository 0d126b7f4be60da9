"""Which keys make a run the same run. Model, data, optimisation and seed do; shape and bookkeeping do not."""

from __future__ import annotations

import hashlib
import json
from typing import Any

IDENTITY_KEYS = ("model", "data", "optim", "seed")
# How data are fetched does not decide what is learnt.
SHAPE_KEYS = ("data.num_workers", "data.prefetch")


def identity(config: dict[str, Any]) -> dict[str, Any]:
    """The identity as flat `key: value` pairs, from a plain config dict."""
    flat: dict[str, Any] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                walk(f"{prefix}.{key}" if prefix else key, inner)
        elif prefix not in SHAPE_KEYS:
            flat[prefix] = value

    walk("", {key: config[key] for key in IDENTITY_KEYS})
    return flat


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """`key: old → new` for each key of the identity in which two plain configs differ."""
    before, after = identity(old), identity(new)
    keys = sorted(before.keys() | after.keys())
    return [f"{k}: {before.get(k)} → {after.get(k)}" for k in keys if before.get(k) != after.get(k)]


def digest(config: dict[str, Any]) -> str:
    """Eight hex digits of the identity: enough to propose another name."""
    text = json.dumps(identity(config), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]
