from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpctrain.data.prepare import pack_images
from tests.helpers.runs import FACES, Cluster, Run
from tests.helpers.sandbox import Sandbox


@pytest.fixture(scope="session")
def packed_faces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ORL: people s1–s30 to train on, s31–s40 to verify."""
    if not FACES.is_dir():
        reason = "the ORL faces are not here (../shared/data/orl_faces)"
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)
    out = tmp_path_factory.mktemp("orl") / "packed"
    pack_images(FACES, out, val_identities=[f"s{n}" for n in range(31, 41)])
    return out


@pytest.fixture
def cluster(sandbox: Sandbox, packed_faces: Path, tmp_path: Path) -> Iterator[Cluster]:
    yield Cluster(sandbox, tmp_path, packed_faces)


NUM_STEPS = 40


@pytest.fixture(scope="session")
def undisturbed(sandbox: Sandbox, packed_faces: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of 40 steps on 2 nodes that nobody interrupts: what interrupted ones must equal."""
    cluster = Cluster(sandbox, tmp_path_factory.mktemp("undisturbed"), packed_faces)
    run = cluster.submit("undisturbed", "optim.num_epochs=4")
    assert run.wait_until_over() == "COMPLETED", run.story()
    return run
