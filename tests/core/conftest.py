"""Drawn faces, once for the session."""

from __future__ import annotations

import pytest
import torch._dynamo  # noqa: F401  every optimizer imports it: once here, not in each forked rank

from hpctrain.data.synthetic import make_faces


@pytest.fixture(scope="session")
def faces(tmp_path_factory):
    """Six people to train on and two to verify, four small images each."""
    root = tmp_path_factory.mktemp("faces") / "packed"
    make_faces(root, num_identities=8, images_per_identity=4, size=(40, 32))
    return root
