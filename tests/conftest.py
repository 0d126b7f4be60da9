"""The sandbox cluster, once a session, and the check that a test leaves nothing behind."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.helpers.leaks import Surroundings
from tests.helpers.sandbox import Sandbox
from tests.helpers.sandbox_config import missing_programs

# A second thread spins while others use the cores; ranks of tests have one each.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# The pool of compile workers would outlive the test that starts it.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="run the tests marked `long` as well")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "long: takes minutes; runs with --long (make test-long)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--long"):
        for item in items:
            if item.get_closest_marker("long"):
                item.add_marker(pytest.mark.skip(reason="takes long: --long"))


@pytest.fixture(scope="session")
def slurm_programs() -> None:
    """Skips where Slurm is not installed; in CI that is a failure."""
    if missing := missing_programs():
        reason = f"Slurm is not installed here (missing: {', '.join(missing)}); see docs/install.md"
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)


@pytest.fixture(scope="session")
def sandbox(slurm_programs: None) -> Iterator[Sandbox]:
    """The cluster: started on first use, ended with the session however that ends."""
    with Sandbox() as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def _ends_its_jobs(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "sandbox" in request.fixturenames:
        request.getfixturevalue("sandbox").cancel_all()


@pytest.fixture(autouse=True)
def _leaves_nothing_behind() -> Iterator[None]:
    before = Surroundings()
    yield
    if leaks := before.leaks():
        pytest.fail(f"the test left behind: {'; '.join(leaks)}")
