"""Whole runs: to the end, stopped and continued, diverged, on damaged data, compiled."""

from __future__ import annotations

import json
import os
import shutil
import threading
from dataclasses import replace

import pytest
import torch

from hpctrain.checkpoint import store
from hpctrain.data import source
from hpctrain.data.shards import ShardSet
from hpctrain.run.causes import CauseKind
from hpctrain.run.directory import RunDirectory
from hpctrain.run.ledger import Ledger
from tests.core.runs import make_config, read_final, run_training
from tests.core.test_resume import differing
from tests.helpers.polling import wait_until
from tests.helpers.processes import children
from tests.helpers.ranks import run_ranks

STEPS = 6  # 24 samples, less those without a readable label: two steps of 12 an epoch, three epochs


def events_of(folder, kind):
    return [event for event in Ledger(RunDirectory(folder).ledger).events() if event["event"] == kind]


def records_of(folder, kind):
    lines = RunDirectory(folder).metrics.read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


@pytest.fixture(scope="module")
def undisturbed(faces, tmp_path_factory):
    """A run of two ranks from beginning to end."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    assert run_ranks(2, run_training, make_config(faces, 2), folder) == [(CauseKind.done, STEPS)] * 2
    return folder


def test_a_run_trains_evaluates_saves_and_says_so(undisturbed, faces):
    assert [record["step"] for record in records_of(undisturbed, "train")] == list(range(1, STEPS + 1))
    assert [record["step"] for record in records_of(undisturbed, "eval")] == [2, 4, 6]
    assert records_of(undisturbed, "eval")[0].keys() >= {"rank1", "verification_auc", "behaviour_map"}
    (restored,) = events_of(undisturbed, "restored")
    (saved,) = events_of(undisturbed, "saved")
    assert (restored["step"], restored["checkpoint"]) == (0, None)
    num_samples = ShardSet(faces / "train").num_samples
    assert (saved["step"], saved["samples_consumed"]) == (STEPS, 3 * num_samples)
    assert 0 < saved["save_s"] < 120  # doctor holds it against the grace of a preemption


def test_adam_counts_as_many_steps_as_were_done(undisturbed):
    state, _ = read_final(undisturbed)
    counts = {float(value) for name, value in state.items() if name.endswith(".step")}
    assert counts == {float(STEPS)}


@pytest.mark.parametrize(("stop_at", "stopped_after"), [(1, 2), (2, 3)])
def test_a_stopped_and_continued_run_equals_the_undisturbed_one(
    undisturbed, faces, tmp_path, stop_at, stopped_after
):
    config = make_config(faces, 2)
    first = run_ranks(2, run_training, config, tmp_path / "run", "1_0_0", stop_at)
    assert first == [(CauseKind.preemption, stopped_after)] * 2
    second = run_ranks(2, run_training, config, tmp_path / "run", "1_1_0")
    assert second == [(CauseKind.done, STEPS)] * 2
    (found, facts), (wanted, wanted_facts) = read_final(tmp_path / "run"), read_final(undisturbed)
    assert differing(found, wanted) == []
    assert facts == wanted_facts
    assert [event["step"] for event in events_of(tmp_path / "run", "restored")] == [0, stopped_after]
    losses = [record["loss"] for record in records_of(tmp_path / "run", "train")]
    assert losses == [record["loss"] for record in records_of(undisturbed, "train")]


def test_a_run_goes_on_with_another_number_of_ranks_and_sees_the_same_samples(undisturbed, faces, tmp_path):
    run_ranks(2, run_training, make_config(faces, 2), tmp_path / "run", "1_0_0", 2)
    (end,) = run_ranks(1, run_training, make_config(faces, 1), tmp_path / "run", "1_1_0")
    assert end == (CauseKind.done, STEPS)
    assert read_final(tmp_path / "run")[1] == read_final(undisturbed)[1]


def stop_in_evaluation(training):
    source.EVAL_BATCH_SIZE = 1
    evaluate = training._evaluate

    def interrupted():
        if training.finished:
            training.stop.flag.cause = CauseKind.time_limit
        return evaluate()

    training._evaluate = interrupted


def test_an_evaluation_cut_short_by_a_stop_is_done_by_the_next_start(undisturbed, faces, tmp_path):
    config, folder = make_config(faces, 2), tmp_path / "run"
    config.eval_every_epochs = 0
    first = run_ranks(2, run_training, config, folder, "1_0_0", None, stop_in_evaluation)
    assert first == [(CauseKind.time_limit, STEPS)] * 2
    assert records_of(folder, "eval") == []
    assert run_ranks(2, run_training, config, folder, "1_1_0") == [(CauseKind.done, STEPS)] * 2
    (found,), wanted = records_of(folder, "eval"), records_of(undisturbed, "eval")[-1]
    for record in (found, wanted):
        del record["time"], record["attempt"]
    assert found == wanted


def spoil(training):
    with torch.no_grad():
        training.model.embedding.linear.weight.fill_(torch.nan)


def test_a_loss_that_is_not_a_number_ends_the_run(faces, tmp_path):
    with pytest.raises(FloatingPointError, match="the loss is nan at step 1"):
        run_ranks(1, run_training, make_config(faces, 1), tmp_path / "run", "1_0_0", None, spoil)


def test_a_diverged_state_is_not_saved(faces, tmp_path):
    config = make_config(faces, 1)
    config.checkpoint.every_steps, config.log_every_steps = 1, 100
    with pytest.raises(FloatingPointError, match="at step 1: not saved"):
        run_ranks(1, run_training, config, tmp_path / "run", "1_0_0", None, spoil)
    assert store.find(RunDirectory(tmp_path / "run").checkpoints) == []


def test_a_damaged_sample_is_in_the_ledger_and_the_run_goes_on(faces, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(faces, data)
    (damaged,) = ShardSet(data / "train").read([5])
    (shard,) = [path for path in (data / "train").rglob("*.tar") if damaged in path.read_bytes()]
    shard.write_bytes(shard.read_bytes().replace(damaged, bytes(len(damaged))))
    ends = run_ranks(2, run_training, make_config(data, 2, num_epochs=1), tmp_path / "run")
    assert ends == [(CauseKind.done, 2)] * 2
    (event,) = events_of(tmp_path / "run", "damaged")
    assert [number for number, _ in event["samples"]] == [5]


def test_workers_and_threads_end_with_the_run(faces, tmp_path):
    def run(rank, world):
        config = make_config(faces, 1, num_epochs=1)
        config.data.num_workers = 2
        before = threading.active_count()
        end = run_training(rank, world, config, tmp_path / "run")
        # Threads that feed the workers' queues end just after them.
        wait_until(lambda: threading.active_count() <= before, 10, "the run's threads have ended")
        return end, children(os.getpid())

    assert run_ranks(1, run) == [((CauseKind.done, 2), set())]


def test_flops_utilisation_is_reported_where_the_hardware_has_a_peak(faces, tmp_path):
    config = make_config(faces, 1, num_epochs=1)
    config.cluster.hardware = "rtx4090"
    run_ranks(1, run_training, config, tmp_path / "run")
    assert all(0 < record["mfu"] < 0.1 for record in records_of(tmp_path / "run", "train"))


def losses_and_keys(rank, world, faces, folder, compiled):
    config = make_config(faces, world, num_epochs=2)
    config.model = replace(config.model, drop_rate=0.0)
    config.cluster.hardware = "rtx4090"
    config.parallelism.compile = compiled
    run_training(rank, world, config, folder)
    return [(record["loss"], record["mfu"] > 0) for record in records_of(folder, "train")]


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on the CPU needs g++")
@pytest.mark.long  # a compiled replica is held to plain PyTorch in test_parity
def test_a_compiled_backbone_trains_the_same_and_keeps_its_names(faces, tmp_path):
    plain = run_ranks(1, losses_and_keys, faces, tmp_path / "plain", False)[0]
    compiled = run_ranks(1, losses_and_keys, faces, tmp_path / "compiled", True, timeout_s=300)[0]
    # fp32 sums in another order: 1e-7 a step, which AdamW's first steps (sign of the gradient) amplify.
    assert [loss for loss, _ in compiled] == pytest.approx([loss for loss, _ in plain], rel=2e-3)
    assert all(counted for _, counted in compiled)
    assert list(read_final(tmp_path / "compiled")[0]) == list(read_final(tmp_path / "plain")[0])
