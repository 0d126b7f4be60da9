import subprocess
import sys

import pytest

from hpctrain.errors import ConfigError
from hpctrain.models.registry import resolve_spec


def test_vision_is_a_kind_of_model() -> None:
    spec = resolve_spec("vision")
    assert spec.kind == "vision" and spec.compiled_modules == ("backbone",)


def test_unknown_kind_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"model.kind=visoin(.|\n)*known kinds: decoder, vision"):
        resolve_spec("visoin")


def test_metrics_and_registry_import_no_timm() -> None:
    code = "import sys, hpctrain.models.registry, hpctrain.models.metrics; sys.exit('timm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
