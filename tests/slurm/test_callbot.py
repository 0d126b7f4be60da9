"""finance_callbot, as large as a laptop carries, on the real cluster: pp 2 × dp_shard 2 × tp 2, preempted."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest

from hpctrain.data.calls import make_calls
from hpctrain.run.ledger import Ledger
from tests.helpers.runs import ROOT, Cluster, Run, assert_every_step_once, differing_tensors
from tests.helpers.sandbox import Sandbox
from tests.slurm.test_stop_and_go_on import paced

pytestmark = pytest.mark.slurm
TEXT = ROOT.parent / "shared" / "data" / "vietnamese.jsonl"
CALLBOT = [
    "+exp=finance_callbot_laptop",
    "cluster=sandbox",
    "cluster.num_nodes=2",
    "cluster.ranks_per_node=4",
    "data=tokens",
    "data.num_workers=0",
    "data.sequence_length=64",
    "parallelism.pp=2",
    "parallelism.dp_shard=2",
    "parallelism.dp_replicate=1",
    "parallelism.tp=2",
    "parallelism.sequence_parallel=true",
    "parallelism.checkpointing=full",
    "parallelism.microbatch_size=4",
    "optim.global_batch_size=32",
    "optim.num_epochs=1",
    "log_every_steps=1",
    "eval_every_epochs=0",
]


@pytest.fixture(scope="module")
def packed_text(tmp_path_factory: pytest.TempPathFactory, sandbox: Sandbox) -> Path:
    """Real Vietnamese paragraphs, packed as a user packs them, with a tokenizer of 512 tokens."""
    if not TEXT.exists():
        reason = "the Vietnamese text is not here (../shared/data/vietnamese.jsonl)"
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)
    folder = tmp_path_factory.mktemp("text")
    with TEXT.open() as lines:
        (folder / "some.jsonl").write_text("".join(itertools.islice(lines, 400)))
    make_calls(folder / "calls", num_documents=200)
    cluster = Cluster(sandbox, folder, folder / "packed")
    tokenizer = ["--tokenizer", str(folder / "calls" / "tokenizer"), "--val-fraction", "0.05"]
    cluster.cli("data", "tokens", str(folder / "some.jsonl"), str(cluster.data), *tokenizer)
    return cluster.data


def submit(cluster: Cluster, data: Path, name: str, *overrides: str) -> Run:
    return cluster.submit_exactly(*CALLBOT, f"data.root={data}", f"name={name}", *overrides)


def test_a_preempted_hybrid_run_equals_the_undisturbed_one_bit_for_bit(
    cluster: Cluster, packed_text: Path
) -> None:
    undisturbed = submit(cluster, packed_text, "undisturbed")
    assert undisturbed.wait_until_over(300) == "COMPLETED", undisturbed.story()
    num_steps = undisturbed.steps()[-1]
    assert num_steps > 12 and undisturbed.steps() == list(range(1, num_steps + 1))
    first, last = (undisturbed.metrics("train")[i]["loss"] for i in (0, -1))
    assert last < first - 0.5, f"nothing was learnt: {first} → {last}"
    assert undisturbed.metrics("eval")[-1]["perplexity"] > 1

    run = submit(cluster, packed_text, "preempted", paced(cluster, 0.1))
    run.wait_for_step(5, 180)
    cluster.preempt()
    run.wait(lambda: run.state() == "PENDING", 60, "the preempted run waits again")
    cluster.sandbox.speed_up_requeue(run.job)
    assert run.wait_until_over(300) == "COMPLETED", run.story()
    attempts = run.attempts()
    assert [a.end["cause"] for a in attempts if a.end] == ["preemption", "done"]
    assert attempts[-1].restored_step and attempts[-1].restored_step >= 5
    assert_every_step_once(attempts, num_steps)
    assert run.steps() == list(range(1, num_steps + 1))
    assert run.samples_hash() == undisturbed.samples_hash()
    assert differing_tensors(run.final(), undisturbed.final()) == []
    assert Ledger(run.directory.ledger).last("saved") is not None
