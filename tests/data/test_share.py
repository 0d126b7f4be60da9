from __future__ import annotations

import io
import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hpctrain.config.schema import ImageDataConfig
from hpctrain.data.loader import build_train_loader
from hpctrain.data.shards import INDEX_DTYPE, INDEX_NAME, META_NAME, ShardInfo, ShardSet, SplitMeta
from hpctrain.data.share import RankShare

SAMPLE_BYTES = 32 << 10
NUM_SAMPLES = 4096 - 10  # the last block is shorter
BATCH = 128
# 16 blocks of 2 MiB are mixed: 8 batches.
DATA = ImageDataConfig(num_workers=0, block_samples=64, window_blocks=16, color_jitter=0.0)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> ShardSet:
    """128 MiB of small pictures, each with a hole behind it that stands for the rest of a large one."""
    folder = tmp_path_factory.mktemp("large")
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), (200, 120, 40)).save(buffer, "JPEG")
    index = np.zeros(NUM_SAMPLES, dtype=INDEX_DTYPE)
    half = NUM_SAMPLES // 2
    index["shard"] = np.arange(NUM_SAMPLES) // half
    index["offset"] = np.arange(NUM_SAMPLES) % half * SAMPLE_BYTES
    index["size"] = SAMPLE_BYTES
    shards = [ShardInfo(f"train-{number:06d}.tar", half * SAMPLE_BYTES, half) for number in range(2)]
    for shard in shards:
        with open(folder / shard.name, "wb") as file:
            for at in range(0, shard.size_bytes, SAMPLE_BYTES):
                file.seek(at)
                file.write(buffer.getvalue())
            file.truncate(shard.size_bytes)
    np.save(folder / INDEX_NAME, index)
    (folder / META_NAME).write_text(SplitMeta(NUM_SAMPLES, [], [], shards).to_json())
    return ShardSet(folder)


@dataclass
class _Storage:
    """What was asked of it."""

    advised: list[tuple[str, int, int]] = field(default_factory=list)  #: file, first byte, bytes
    read: list[tuple[str, int, int]] = field(default_factory=list)


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> _Storage:
    """The true storage, with a note of each request."""
    seen, fadvise, pread = _Storage(), os.posix_fadvise, os.pread

    def name(fd: int) -> str:
        return Path(os.readlink(f"/proc/self/fd/{fd}")).name

    def noted_fadvise(fd: int, offset: int, length: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_WILLNEED
        seen.advised.append((name(fd), offset, length))
        fadvise(fd, offset, length, advice)

    def noted_pread(fd: int, length: int, offset: int) -> bytes:
        seen.read.append((name(fd), offset, length))
        return pread(fd, length, offset)

    monkeypatch.setattr(os, "posix_fadvise", noted_fadvise)
    monkeypatch.setattr(os, "pread", noted_pread)
    return seen


def _samples(requests: list[tuple[str, int, int]]) -> set[tuple[str, int]]:
    """Returns the samples that requests touch."""
    return {
        (name, number)
        for name, offset, length in requests
        for number in range(offset // SAMPLE_BYTES, -(-(offset + length) // SAMPLE_BYTES))
    }


@pytest.mark.parametrize("world", [1, 4, 8])
def test_a_rank_asks_storage_for_its_share_of_an_epoch_in_large_requests(
    large: ShardSet, storage: _Storage, world: int
) -> None:
    for rank in range(world):
        loader = build_train_loader(
            large,
            image_size=[8, 8],
            data=DATA,
            seed=3,
            global_batch_size=BATCH,
            rank=rank,
            world=world,
            samples_consumed=0,
            num_epochs=1,
        )
        storage.advised.clear()
        storage.read.clear()
        for _ in loader:
            pass
        share_bytes = NUM_SAMPLES * SAMPLE_BYTES / world
        sizes = [length for _, _, length in storage.advised]
        assert sum(sizes) < 1.1 * share_bytes
        assert sum(size for size in sizes if size >= 3 << 19) > 0.9 * sum(sizes)  # a block is 2 MiB
        assert sum(sizes) / len(sizes) > (2 << 20) / 3  # some single samples at the edges of a share
        delivered = _samples(storage.advised) | _samples(storage.read)  # the rest comes from the page cache
        # Reads go across gaps of up to 128 KiB: here 4 samples, so they reach a little into other shares.
        assert len(delivered) * SAMPLE_BYTES < 1.1 * share_bytes


def _share(rank: int, start: int, stop: int) -> RankShare:
    return RankShare(NUM_SAMPLES, DATA, 3, BATCH, rank, 4, start, stop)


@pytest.mark.parametrize("start", [0, 5, 8, 30, 31])
@pytest.mark.parametrize("rank", [0, 3])
def test_what_a_step_reads_was_asked_for_by_then_and_hardly_anything_twice(rank: int, start: int) -> None:
    share = _share(rank, start, 32)  # an epoch has 32 steps, a window 8
    asked: Counter[int] = Counter()
    for step in range(start, 32):
        asked.update(i for first, after in share.ahead(step) for i in range(first, after))
        assert set(share.own(step)[0].tolist()) <= set(asked)
    # Holes that steps before `start` have left in their window are read too.
    windows = {i for step in range(start // 8 * 8, 32) for i in share.own(step)[0].tolist()}
    assert sum(asked.values()) <= 1.05 * len(windows)


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_the_last_window_of_an_epoch_asks_for_the_first_of_the_next(rank: int) -> None:
    share = _share(rank, 0, 64)
    asked = {i for step in range(24, 32) for first, after in share.ahead(step) for i in range(first, after)}
    assert all(set(share.own(step)[0].tolist()) <= asked for step in range(32, 40))
    assert all(share.ahead(step) == [] for step in range(56, 64))


def test_the_ranks_of_a_large_run_read_whole_blocks_that_no_other_reads() -> None:
    # vision_city: 20 million samples, 32 ranks, batches of 4096, windows of 256 blocks × 256 samples.
    data = ImageDataConfig(block_samples=256, window_blocks=256)
    asked: Counter[int] = Counter()
    for rank in (0, 1, 17, 31):
        share = _large_share(data, rank)
        own = {i for step in range(16, 32) for i in share.own(step)[0].tolist()}
        # The first step asks for the rest of its own window, and for the first part of the next.
        ranges = [each for each in share.ahead(16) if each[0] in own]
        assert len(ranges) == 8 and all(after - first == 256 for first, after in ranges)
        asked.update(i for first, after in ranges for i in range(first, after))
        assert own <= set(asked)
    assert max(asked.values()) == 1


def _large_share(data: ImageDataConfig, rank: int) -> RankShare:
    return RankShare(20_000_000, data, 0, 4096, rank, 32, 16, 4883)
