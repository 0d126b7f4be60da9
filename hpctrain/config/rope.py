"""`rope_scaling` of a decoder: which types there are, and what each one is told."""

from __future__ import annotations

from typing import Any

#: keys of `rope_scaling` that each type reads, beside the type itself: required, optional
ROPE_KEYS: dict[str, tuple[set[str], set[str]]] = {
    "default": (set(), set()),
    "linear": ({"factor"}, set()),
    "dynamic": ({"factor"}, set()),
    "yarn": (
        {"factor"},
        {
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        },
    ),
    "llama3": (
        {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
        set(),
    ),
}


def get_rope_type(scaling: dict[str, Any] | None) -> str:
    """Return the type of `rope_scaling`; old configs call the key `type`, and none at all is `default`."""
    scaling = scaling or {}
    return str(scaling.get("rope_type", scaling.get("type", "default")))


def rope_findings(scaling: dict[str, Any] | None) -> list[str]:
    """What is wrong with it: an unknown type, a key that is missing or that the type does not have."""
    scaling = scaling or {}
    kind = get_rope_type(scaling)
    if kind not in ROPE_KEYS:
        return [f"model.rope_scaling: rope_type={kind} is not supported; known: {', '.join(ROPE_KEYS)}"]
    required, optional = ROPE_KEYS[kind]
    keys = {key for key, value in scaling.items() if value is not None} - {"rope_type", "type"}
    found = []
    if missing := required - keys:
        found.append(f"model.rope_scaling: {kind} needs {', '.join(sorted(missing))}")
    if unknown := keys - required - optional:
        found.append(f"model.rope_scaling: {kind} does not know {', '.join(sorted(unknown))}")
    return found
