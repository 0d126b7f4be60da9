"""Which kinds of model there are. A kind's module is imported only when it is asked for."""

from __future__ import annotations

import importlib

from hpctrain.errors import ConfigError
from hpctrain.models.spec import ModelSpec

# Each module has a SPEC.
_MODULES = {"vision": "hpctrain.models.vision", "decoder": "hpctrain.models.decoder_spec"}


def resolve_spec(kind: str) -> ModelSpec:
    """Return the spec of a kind of model.

    Raises:
        ConfigError: there is no such kind.
    """
    if kind not in _MODULES:
        raise ConfigError(
            f"model.kind={kind} is not a kind of model",
            found=f"known kinds: {', '.join(sorted(_MODULES))}",
            change="set model.kind to one of them",
        )
    spec = importlib.import_module(_MODULES[kind]).SPEC
    assert isinstance(spec, ModelSpec)
    return spec
