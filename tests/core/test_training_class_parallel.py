"""Whole runs with the identities shared out over ranks."""

from __future__ import annotations

from dataclasses import replace

import torch

from hpctrain.config.load import save_config
from hpctrain.export.trained import load_trained
from hpctrain.run.causes import CauseKind
from hpctrain.run.directory import RunDirectory
from tests.core.runs import make_config, read_final, run_training
from tests.core.test_resume import differing
from tests.helpers.ranks import run_ranks

STEPS = 6


def sharded_config(faces, ranks):
    config = make_config(faces, ranks)
    config.model = replace(config.model, class_parallel=True)
    return config


def test_a_run_with_shared_out_identities_equals_one_with_all_on_every_rank(faces, tmp_path):
    plain, sharded = tmp_path / "plain", tmp_path / "sharded"
    run_ranks(2, run_training, make_config(faces, 2), plain)
    run_ranks(2, run_training, sharded_config(faces, 2), sharded)
    (wanted, _), (found, _) = read_final(plain), read_final(sharded)
    assert found.keys() == wanted.keys()
    for name in wanted:
        # fp32: AdamW turns rounding of a tiny gradient into a part of its step, which is 1e-3.
        if name.startswith(("model", "ema")) and wanted[name].is_floating_point():
            torch.testing.assert_close(found[name], wanted[name], rtol=0, atol=2e-4, msg=name)


def test_a_stopped_run_goes_on_as_if_nothing_had_been(faces, tmp_path):
    config = sharded_config(faces, 2)
    run_ranks(2, run_training, config, tmp_path / "a")
    kinds = run_ranks(2, run_training, config, tmp_path / "b", "1_0_0", 2)
    assert {kind for kind, _ in kinds} == {CauseKind.preemption}
    assert run_ranks(2, run_training, config, tmp_path / "b", "1_0_1") == [(CauseKind.done, STEPS)] * 2
    assert differing(read_final(tmp_path / "a")[0], read_final(tmp_path / "b")[0]) == []


def test_a_stopped_run_goes_on_on_another_number_of_ranks_and_is_exported(faces, tmp_path):
    run = tmp_path / "run"
    run_ranks(2, run_training, sharded_config(faces, 2), run, "1_0_0", 2)
    config = sharded_config(faces, 3)
    assert run_ranks(3, run_training, config, run, "1_0_1") == [(CauseKind.done, STEPS)] * 3
    save_config(config, RunDirectory(run).config)
    state, _ = read_final(run)
    for ema, part in ((True, "ema"), (False, "model")):
        weight = load_trained(run, ema).model.identity_head.weight
        assert torch.equal(weight, state[f"{part}.identity_head.weight"])
