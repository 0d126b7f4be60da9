"""What is saved comes back, on the same and on other numbers of ranks."""

from __future__ import annotations

import json
import subprocess

import pytest
import torch
import torch.distributed as dist

from hpctrain.checkpoint import store
from hpctrain.checkpoint.reader import load, load_full
from hpctrain.checkpoint.writer import save
from hpctrain.errors import CheckpointError
from tests.checkpoint.training import ATTEMPT, Training, assert_equal
from tests.helpers.ranks import run_ranks


def train_save_train(rank, world, root, shard):
    training = Training(shard=shard)
    training.train(2)
    path, saved = training.save(root, step=2), training.values()
    training.train(2)
    return path, saved, training.values()


def load_train(rank, world, root, shard, num_steps):
    training = Training(seed=1, shard=shard)  # other weights, other learning rate, other random numbers
    loaded = training.load(root)
    restored = training.values()
    training.train(num_steps)
    return loaded, restored, training.values()


@pytest.mark.parametrize("shard", [False, True], ids=["replicated", "sharded"])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_a_resumed_run_equals_the_undisturbed_one_bit_for_bit(tmp_path, world, shard):
    undisturbed = run_ranks(world, train_save_train, tmp_path, shard)
    resumed = run_ranks(world, load_train, tmp_path, shard, 2)
    for rank in range(world):
        loaded, restored, final = resumed[rank]
        assert (loaded.step, loaded.facts, loaded.skipped) == (2, {"samples_consumed": 8}, [])
        assert loaded.path == undisturbed[rank][0] == tmp_path / f"step_00000002.{ATTEMPT}"
        assert_equal(restored, undisturbed[rank][1])
        assert_equal(final, undisturbed[rank][2])


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("shard", [False, True], ids=["replicated", "sharded"])
@pytest.mark.parametrize("saved_sharded", [False, True], ids=["from_replicated", "from_sharded"])
def test_a_checkpoint_of_two_ranks_loads_on_other_numbers_of_ranks(tmp_path, saved_sharded, shard, world):
    saved = run_ranks(2, train_save_train, tmp_path, saved_sharded)[0][1]
    for loaded, restored, _ in run_ranks(world, load_train, tmp_path, shard, 0):
        assert_equal(restored, saved)
        assert (loaded.per_rank is None) == (world != 2)


def test_ranks_do_not_overwrite_each_others_state(tmp_path):
    def save_and_load(rank, world):
        group = dist.group.WORLD
        state = {"same": torch.ones(3), "per_rank": {"rng": torch.tensor(100 * rank), "text": f"r{rank}"}}
        save(tmp_path, step=1, attempt="a", state=state, facts={}, group=group, timeout_s=20, layout={})
        return load(tmp_path, state={"same": torch.zeros(3)}, group=group, timeout_s=20).per_rank

    own = run_ranks(3, save_and_load)
    assert [(o["rng"].item(), o["text"]) for o in own] == [(0, "r0"), (100, "r1"), (200, "r2")]


def test_state_that_all_ranks_share_is_written_once(tmp_path):
    def save_replicated(rank, world):
        state = {"weights": {str(i): torch.zeros(25_000) for i in range(8)}}
        group = dist.group.WORLD
        save(tmp_path, step=1, attempt="a", state=state, facts={}, group=group, timeout_s=20, layout={})

    run_ranks(4, save_replicated)
    sizes_bytes = [r.size_bytes for r in store.find(tmp_path)[0].manifest.files.values()]
    assert 800_000 < sum(sizes_bytes) < 850_000  # 8 × 25,000 × 4 bytes, and zip headers
    assert max(sizes_bytes) < 220_000  # each rank wrote a fair share


def test_the_manifest_agrees_with_sha256sum(tmp_path):
    path = run_ranks(2, train_save_train, tmp_path, False)[0][0]
    manifest = json.loads((path / "manifest.json").read_text())
    lines = "".join(f"{record['sha256']}  {name}\n" for name, record in manifest["files"].items())
    subprocess.run(["sha256sum", "--check", "--strict"], input=lines, text=True, cwd=path, check=True)
    assert set(manifest["files"]) == {".metadata", "__0_0.distcp", "__1_0.distcp"}
    assert manifest["layout"] == {"dp_replicate": 2, "world_size": 2}


def test_a_whole_checkpoint_is_read_without_a_process_group(tmp_path):
    path, saved, _ = run_ranks(2, train_save_train, tmp_path, True)[0]
    assert not dist.is_initialized()
    whole = load_full(path)
    assert whole.keys() == {"model", "optim", "per_rank"}
    assert whole["per_rank"]["rank_00001"]["notes"] == (1, b"own")
    assert_equal({name: torch.as_tensor(whole["model"][name]) for name in whole["model"]}, {
        name: saved[name] for name in whole["model"]
    })  # fmt: skip
    assert load_full(path, parts={"model"}).keys() == {"model"}
    with pytest.raises(CheckpointError, match=r"ema.*\n.*model, optim"):
        load_full(path, parts={"ema"})


def test_nothing_saved_yet_is_no_error(tmp_path):
    assert run_ranks(2, load_train, tmp_path / "none", False, 0)[1][0] is None


def test_saving_leaves_the_callers_state_and_the_groups_timeout_alone(tmp_path):
    def save_and_look(rank, world):
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        before = backend.options._timeout
        state = {"w": torch.ones(1), "nested": {"n": 1}, "per_rank": {"r": rank}}
        group = dist.group.WORLD
        save(tmp_path, step=1, attempt="a", state=state, facts={}, group=group, timeout_s=3, layout={})
        return backend.options._timeout == before, list(state), state["nested"], state["per_rank"]

    for rank, (same, *rest) in enumerate(run_ranks(2, save_and_look)):
        assert same
        assert rest == [["w", "nested", "per_rank"], {"n": 1}, {"r": rank}]
