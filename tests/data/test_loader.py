from __future__ import annotations

import hashlib
import os
import signal
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpctrain.config.schema import ImageDataConfig
from hpctrain.data import loader as loader_module
from hpctrain.data.batch import Batch
from hpctrain.data.loader import TrainLoader, build_eval_loader, build_train_loader
from hpctrain.data.order import EpochOrder, samples_after
from hpctrain.data.shards import ShardSet
from hpctrain.errors import ConfigError, DataError
from tests.data.conftest import NUM_IMAGES
from tests.helpers.ranks import run_ranks

# More workers than this machine may have cores is what some of these tests are about.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

GLOBAL_BATCH = 24
SEED = 5
STEPS = 4  # 90 samples in batches of 24
SIZE = [16, 14]


def _data(num_workers: int = 0, **changed: Any) -> ImageDataConfig:
    return ImageDataConfig(num_workers=num_workers, prefetch=2, block_samples=8, window_blocks=3, **changed)


def _loader(shards: ShardSet, rank: int = 0, world: int = 1, **changed: Any) -> TrainLoader:
    arguments: dict[str, Any] = {
        "image_size": SIZE,
        "data": _data(),
        "seed": SEED,
        "global_batch_size": GLOBAL_BATCH,
        "samples_consumed": 0,
        "num_epochs": 2,
    }
    return build_train_loader(shards, rank=rank, world=world, **{**arguments, **changed})


@dataclass
class _Seen:
    """What all ranks together saw, in the global order."""

    ids: dict[tuple[int, int], list[int]] = field(default_factory=dict)  #: by epoch and step
    weights: dict[tuple[int, int], list[float]] = field(default_factory=dict)
    pixels: dict[tuple[int, int], str] = field(default_factory=dict)  #: hash, by epoch and sample

    def add(self, batch: Batch) -> None:
        at = (batch.epoch, batch.step)
        self.ids.setdefault(at, []).extend(batch.sample_id_B.tolist())
        self.weights.setdefault(at, []).extend(batch.weight_B.tolist())
        for sample_id, image_CHW in zip(batch.sample_id_B.tolist(), batch.image_BCHW, strict=True):
            digest = hashlib.sha256(image_CHW.numpy().tobytes()).hexdigest()
            assert self.pixels.setdefault((batch.epoch, sample_id), digest) == digest


def _see(shards: ShardSet, world: int, **changed: Any) -> _Seen:
    seen = _Seen()
    for rank in range(world):
        for step in _loader(shards, rank, world, **changed):
            for batch in step:
                seen.add(batch)
    return seen


@pytest.fixture(scope="module")
def reference(shards: ShardSet) -> _Seen:
    """One rank, no worker, undisturbed."""
    return _see(shards, 1)


def test_a_step_is_its_stretch_of_the_epoch_order_as_stored_and_padding_has_no_weight(
    reference: _Seen,
) -> None:
    for epoch in range(2):
        order = EpochOrder(NUM_IMAGES, SEED, epoch, 8, 3)
        for step in range(STEPS):
            expected = sorted(order.slice(step * GLOBAL_BATCH, (step + 1) * GLOBAL_BATCH).tolist())
            padding = GLOBAL_BATCH - len(expected)
            assert reference.ids[epoch, step] == expected + order.slice(0, padding).tolist()
            assert reference.weights[epoch, step] == [1.0] * len(expected) + [0.0] * padding


def test_every_sample_has_weight_one_exactly_once_an_epoch(reference: _Seen) -> None:
    for epoch in range(2):
        counted: Counter[int] = Counter()
        for step in range(STEPS):
            for sample_id, weight in zip(
                reference.ids[epoch, step], reference.weights[epoch, step], strict=True
            ):
                counted[sample_id] += round(weight)
        assert counted == Counter(range(NUM_IMAGES))


@pytest.mark.parametrize("num_workers", [0, 1, 2, 3])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_ranks_and_workers_change_neither_samples_nor_pixels(
    shards: ShardSet, reference: _Seen, world: int, num_workers: int
) -> None:
    assert _see(shards, world, data=_data(num_workers), microbatch_size=2) == reference


def test_epochs_differ_in_order_and_in_pixels(reference: _Seen) -> None:
    assert reference.ids[0, 0] != reference.ids[1, 0]
    same = [reference.pixels[0, i] == reference.pixels[1, i] for i in range(NUM_IMAGES)]
    assert sum(same) < NUM_IMAGES // 10


@pytest.mark.parametrize("step", range(2 * STEPS + 1))
def test_resuming_gives_the_rest_of_the_undisturbed_run(
    shards: ShardSet, reference: _Seen, step: int
) -> None:
    consumed = samples_after(step, NUM_IMAGES, GLOBAL_BATCH)
    rest = _see(shards, 2, samples_consumed=consumed, data=_data(step % 3))
    keys = list(reference.ids)[step:]
    assert rest.ids == {key: reference.ids[key] for key in keys}
    assert rest.weights == {key: reference.weights[key] for key in keys}
    assert all(reference.pixels[key] == digest for key, digest in rest.pixels.items())
    assert len(_loader(shards, samples_consumed=consumed)) == 2 * STEPS - step


def test_microbatches_are_equal_and_keep_the_order(shards: ShardSet) -> None:
    whole = next(iter(_loader(shards)))
    pieces = next(iter(_loader(shards, microbatch_size=8)))
    assert [len(batch.weight_B) for batch in pieces] == [8, 8, 8] and len(whole) == 1
    assert torch.equal(torch.cat([batch.image_BCHW for batch in pieces]), whole[0].image_BCHW)


def test_labels_are_those_of_the_list(shards: ShardSet) -> None:
    [batch] = next(iter(_loader(shards)))
    names = [*shards.meta.identities, ""]
    for i, sample_id in enumerate(batch.sample_id_B.tolist()):
        # Sources are numbered 0 … 89; packing has shuffled them, so ask the label file of the sample.
        source = int(_source(shards, sample_id))
        assert names[int(batch.identity_B[i])] == ("" if source % 5 == 0 else f"p{source % 7}")
        labelled = source % 3 != 1 or source % 2 == 1
        assert bool(batch.has_behaviour_B[i]) == labelled
        expected = [["-"], ["smile"], ["smile", "run"]][source % 3] if labelled else []
        assert batch.behaviour_BK[i].tolist() == [float(name in expected) for name in ("run", "smile")]


def _source(shards: ShardSet, sample_id: int) -> str:
    record = shards.index[sample_id]
    tar = (shards.folder / shards.meta.shards[record["shard"]].name).read_bytes()
    return tar[int(record["offset"]) :].split(b'"source": "', 1)[1].split(b".jpg", 1)[0].decode()


def test_counts_are_those_of_the_whole_global_batch_without_padding(shards: ShardSet) -> None:
    per_rank = [list(_loader(shards, rank, 2, microbatch_size=4)) for rank in range(2)]
    for steps in zip(*per_rank, strict=True):
        batches = [batch for step in steps for batch in step]
        real = [batch.weight_B > 0 for batch in batches]
        expected = {
            "identity": sum(
                float((batch.identity_B[keep] >= 0).sum()) for batch, keep in zip(batches, real, strict=True)
            ),
            "behaviour": sum(
                float(batch.has_behaviour_B[keep].sum()) for batch, keep in zip(batches, real, strict=True)
            ),
        }
        assert all(batch.counts == expected for batch in batches)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_torch_random_numbers_are_left_alone(shards: ShardSet, num_workers: int) -> None:
    before = torch.get_rng_state()
    for _ in _loader(shards, data=_data(num_workers), num_epochs=1):
        assert torch.equal(torch.get_rng_state(), before)


def test_a_batch_moves_with_all_its_tensors(shards: ShardSet) -> None:
    [batch] = next(iter(_loader(shards)))
    moved = batch.to("meta", non_blocking=True)
    tensors = [value for value in vars(moved).values() if isinstance(value, torch.Tensor)]
    assert len(tensors) == 6 and all(tensor.is_meta for tensor in tensors)
    assert (moved.counts, moved.step, batch.image_BCHW.is_meta) == (batch.counts, batch.step, False)
    assert batch.image_BCHW.dtype == torch.uint8 and batch.image_BCHW.shape == (24, 3, *SIZE)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="page-locked memory needs a GPU")
def test_pinned_batches_are_pinned(shards: ShardSet) -> None:
    [batch] = next(iter(_loader(shards, data=_data(2), pin_memory=True)))
    assert batch.image_BCHW.is_pinned() and batch.weight_B.is_pinned()


@pytest.mark.parametrize(("world", "microbatch_size"), [(5, None), (2, 5), (1, 48)])
def test_a_batch_that_does_not_divide_is_refused(
    shards: ShardSet, world: int, microbatch_size: int | None
) -> None:
    with pytest.raises(ConfigError, match="global_batch_size=24"):
        _loader(shards, world=world, microbatch_size=microbatch_size)


def test_resuming_within_a_step_is_refused(shards: ShardSet) -> None:
    with pytest.raises(ConfigError, match="lies within a step"):
        _loader(shards, samples_consumed=25)


def _truncate_images(folder: Path, sample_ids: list[int]) -> ShardSet:
    index = np.load(folder / "index.npy")
    index["size"][sample_ids] //= 2
    np.save(folder / "index.npy", index)
    return ShardSet(folder)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_truncated_jpeg_is_replaced_by_the_next_readable_sample(
    own_copy: Path, reference: _Seen, num_workers: int
) -> None:
    damaged = _truncate_images(own_copy, [40, 41, 89])
    plain = {"random_crop_min_scale": 1.0, "flip": False, "color_jitter": 0.0}
    pixels: dict[int, torch.Tensor] = {}
    weights: dict[int, list[float]] = {}
    noted: dict[int, str] = {}
    for [batch] in _loader(damaged, data=_data(num_workers, **plain), num_epochs=1):
        assert batch.sample_id_B.tolist() == reference.ids[0, batch.step]
        for i, sample_id in enumerate(batch.sample_id_B.tolist()):
            pixels[sample_id] = batch.image_BCHW[i]
            weights.setdefault(sample_id, []).append(float(batch.weight_B[i]))
        noted.update(batch.damaged)
    assert set(noted) == {40, 41, 89} and all("truncated" in reason for reason in noted.values())
    for sample_id, replacement in ((40, 42), (41, 42), (89, 0)):
        assert torch.equal(pixels[sample_id], pixels[replacement])
    assert {i for i in range(NUM_IMAGES) if sum(weights[i]) == 0} == {40, 41, 89}
    assert all(sum(weights[i]) == 1 for i in range(NUM_IMAGES) if i not in noted)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_split_without_readable_images_ends_with_a_data_error(own_copy: Path, num_workers: int) -> None:
    damaged = _truncate_images(own_copy, list(range(NUM_IMAGES)))
    with pytest.raises(DataError, match="in a row") as error:
        list(_loader(damaged, data=_data(num_workers)))
    assert "Traceback" not in str(error.value)


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_evaluation_covers_the_split_once_in_id_order(shards: ShardSet, world: int, num_workers: int) -> None:
    per_rank = [
        list(
            build_eval_loader(
                shards, image_size=SIZE, batch_size=16, rank=rank, world=world, num_workers=num_workers
            )
        )
        for rank in range(world)
    ]
    assert len({len(batches) for batches in per_rank}) == 1
    ids, weights = [], []
    for batches in zip(*per_rank, strict=True):
        for batch in batches:
            ids += batch.sample_id_B.tolist()
            weights += batch.weight_B.tolist()
            assert len(batch.weight_B) == 16
    assert [i for i, weight in zip(ids, weights, strict=True) if weight] == list(range(NUM_IMAGES))
    assert set(weights) == {0.0, 1.0}


def _run_under_signals(shards: ShardSet) -> tuple[int, list[int]]:
    """Reads an epoch while the whole process group gets both signals; returns steps and signals seen."""
    seen: list[int] = []
    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, lambda received, frame: seen.append(received))
    steps = 0
    for _ in _loader(shards, data=_data(2), num_epochs=12, microbatch_size=6):
        steps += 1
        if steps in (1, 7):
            os.killpg(0, signal.SIGTERM)
            os.killpg(0, signal.SIGUSR2)
    return steps, seen


def test_signals_to_the_whole_group_reach_the_trainer_and_leave_its_workers_alone(shards: ShardSet) -> None:
    # A rank of its own, because it has a process group of its own.
    steps, seen = run_ranks(1, lambda rank, world: _run_under_signals(shards))[0]
    assert steps == 12 * STEPS
    assert sorted(seen) == sorted([signal.SIGTERM, signal.SIGUSR2] * 2)


def test_without_deaf_workers_the_same_signals_break_the_run(
    shards: ShardSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start_with_ears(worker: int) -> None:
        for number in (signal.SIGTERM, signal.SIGUSR2):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM, signal.SIGUSR2, signal.SIGINT])

    monkeypatch.setattr(loader_module, "_start_worker", start_with_ears)
    # torch's handler raises wherever the trainer is when a worker dies, even as it reports that very error.
    with pytest.raises((RuntimeError, ChildProcessError), match=r"DataLoader worker|without a result"):
        run_ranks(1, lambda rank, world: _run_under_signals(shards))[0]
