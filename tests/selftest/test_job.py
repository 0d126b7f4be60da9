"""The selftest where tensor parallelism is broken: red where it takes part, green elsewhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpctrain.run.directory import RunDirectory
from hpctrain.run.ledger import Ledger
from hpctrain.selftest.table import PREEMPTED, UNDISTURBED
from tests.helpers.runs import ROOT

# The partial results of row-split matrices are taken for the whole; and one check ends its ranks.
BROKEN = """
import sys
if "hpctrain.launch.rank" in " ".join(sys.orig_argv):
    import os
    from torch.distributed.tensor import Partial
    from hpctrain.core import tensor
    from hpctrain.selftest import job
    rows = tensor._STYLES["rowwise"]
    tensor._STYLES["rowwise"] = lambda module, mesh, tokens: rows(module, mesh, Partial())
    compare = job.compare
    def dies(cell, *args):
        if cell.offload:
            os._exit(9)
        return compare(cell, *args)
    job.compare = dies
"""
SMALL = ["data.synthetic_documents=160", "data.num_workers=0", "budget.crash=1"]


def selftest(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "hpctrain", "selftest", *SMALL, *overrides, "--json"]
    env = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)


pytestmark = pytest.mark.long  # a whole selftest on four ranks; its cells are in tests/parity


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    folder = tmp_path_factory.mktemp("broken")
    (folder / "sitecustomize.py").write_text(BROKEN)
    return folder, selftest(folder)


def test_the_table_is_red_where_the_broken_part_is_and_green_elsewhere(
    broken: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    _, done = broken
    table = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 1 and table["passed"] is False, done.stderr[-3000:]
    wrong = {each["check"] for each in table["checks"] if each["error"]}
    assert {each["check"] for each in table["checks"] if each["error"] is None} == set()
    names = [each["check"] for each in table["checks"]]
    with_tp = {name for name in names if "tp=2" in name}
    assert with_tp and with_tp <= wrong
    # A run that goes on from a wrong state is wrong itself.
    others = wrong - with_tp
    assert {name for name in others if not name.startswith("saved in")} == {
        n for n in names if "offload" in n
    }
    assert "saved in dp_shard 2, gone on in pp 2" not in wrong
    assert {UNDISTURBED, PREEMPTED} <= set(names) - wrong


def test_a_check_that_ended_the_ranks_is_told_and_not_repeated(
    broken: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    folder, done = broken
    table = json.loads(done.stdout.splitlines()[-1])
    (died,) = [each for each in table["checks"] if "offload" in each["check"]]
    assert "it ended the ranks: killed" in died["error"]
    ledger = Ledger(RunDirectory(folder / "runs" / "selftest-1").ledger)
    assert [a.end["cause"] for a in ledger.attempts() if a.end] == ["killed", "preemption", "done"]
    begun = [e["check"] for e in ledger.events() if e["event"] == "begun"]
    assert len(begun) == len(set(begun))


def test_a_finished_selftest_shows_its_table_again(
    broken: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    folder, done = broken
    again = selftest(folder, "name=selftest-1")
    assert again.returncode == 1
    assert json.loads(again.stdout.splitlines()[-1]) == json.loads(done.stdout.splitlines()[-1])
