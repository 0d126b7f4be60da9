"""The global order of samples: a pure function of (seed, epoch), whatever the ranks and workers.

Blocks of neighbouring samples are shuffled; then the samples of `window_blocks` blocks that follow each
other are shuffled among themselves, so that every stretch of a window takes evenly from all its blocks
(stratified sampling). Batches stay mixed, and each part of a window can be read by one rank alone (`share`).
Random bits are the raw output of Philox4x64-10 (Salmon et al., SC'11), which numpy keeps stable between
versions (NEP 19); a shuffle is a stable argsort of such keys, so no numpy distribution is involved.
"""

from __future__ import annotations

from collections import OrderedDict
from enum import IntEnum

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]

_MASK_64 = (1 << 64) - 1
_CACHED_WINDOWS = 4


class Stream(IntEnum):
    """What random bits are for; streams of different uses never meet."""

    blocks = 0
    window = 1
    augment = 2
    packing = 3
    split = 4


def random_bits(seed: int, epoch: int, stream: Stream, index: int, count: int) -> npt.NDArray[np.uint64]:
    """Returns `count` random 64-bit words, a pure function of the other arguments."""
    key = np.array([seed & _MASK_64, epoch & _MASK_64], dtype=np.uint64)
    counter = np.array([0, 0, index & _MASK_64, int(stream)], dtype=np.uint64)
    return np.asarray(np.random.Philox(key=key, counter=counter).random_raw(count), dtype=np.uint64)


def permutation(seed: int, epoch: int, stream: Stream, index: int, count: int) -> Int64Array:
    """Returns a random permutation of 0 … count-1, a pure function of the arguments."""
    return np.argsort(random_bits(seed, epoch, stream, index, count), kind="stable").astype(np.int64)


class EpochOrder:
    """The order in which one epoch visits the samples 0 … num_samples-1, each exactly once.

    Building costs O(num_samples / block_samples); a slice costs O(window) for each window it touches.

    Args:
        block_samples: Neighbouring samples that stay in the same window (the last block may be shorter).
        window_blocks: Blocks whose samples are mixed with each other.
    """

    def __init__(
        self, num_samples: int, seed: int, epoch: int, block_samples: int, window_blocks: int
    ) -> None:
        assert num_samples > 0 and block_samples > 0 and window_blocks > 0
        self.num_samples, self.seed, self.epoch = num_samples, seed, epoch
        self.block_samples, self.window_blocks = block_samples, window_blocks
        num_blocks = -(-num_samples // block_samples)
        self._blocks = permutation(seed, epoch, Stream.blocks, 0, num_blocks)
        lengths = np.minimum(block_samples, num_samples - self._blocks * block_samples)
        window_lengths = np.add.reduceat(lengths, np.arange(0, num_blocks, window_blocks))
        self._window_starts = np.concatenate([[0], np.cumsum(window_lengths)]).astype(np.int64)
        self._cache: OrderedDict[int, Int64Array] = OrderedDict()

    def __len__(self) -> int:
        return self.num_samples

    @property
    def num_windows(self) -> int:
        """Windows in the epoch."""
        return len(self._window_starts) - 1

    def window_at(self, position: int) -> int:
        """Returns the window that holds a position (0 … num_samples-1)."""
        return int(np.searchsorted(self._window_starts, position, side="right")) - 1

    def positions_of(self, window: int) -> tuple[int, int]:
        """Returns the first position of a window, and the one after its last."""
        return int(self._window_starts[window]), int(self._window_starts[window + 1])

    def blocks_of(self, window: int) -> list[tuple[int, int]]:
        """Returns the blocks of a window as ranges (first id, id after the last)."""
        chosen = self._blocks[window * self.window_blocks : (window + 1) * self.window_blocks]
        firsts = (chosen * self.block_samples).tolist()
        return [(first, min(first + self.block_samples, self.num_samples)) for first in firsts]

    def slice(self, start: int, stop: int) -> Int64Array:
        """Returns the sample ids at positions start … stop-1, clipped to the epoch."""
        start, stop = max(0, start), min(stop, self.num_samples)
        if start >= stop:
            return np.empty(0, dtype=np.int64)
        pieces = []
        for window in range(self.window_at(start), self.window_at(stop - 1) + 1):
            first = int(self._window_starts[window])
            pieces.append(self._window(window)[max(start - first, 0) : stop - first])
        return np.concatenate(pieces)

    def ids_at(self, positions: Int64Array) -> Int64Array:
        """Returns the sample ids at ascending positions; those past the end start again at the front."""
        inside = positions[positions < self.num_samples]
        ids = [self.slice(int(inside[0]), int(inside[-1]) + 1)[inside - inside[0]]] if len(inside) else []
        for position in positions[len(inside) :].tolist():
            wrapped = position % self.num_samples
            ids.append(self.slice(wrapped, wrapped + 1))
        return np.concatenate(ids) if ids else np.empty(0, dtype=np.int64)

    def _window(self, window: int) -> Int64Array:
        if window in self._cache:
            self._cache.move_to_end(window)
            return self._cache[window]
        blocks = self.blocks_of(window)
        ids = np.concatenate([np.arange(*each, dtype=np.int64) for each in blocks])
        lengths = np.array([after - first for first, after in blocks])
        block_of = np.repeat(np.arange(len(blocks)), lengths)
        bits = random_bits(self.seed, self.epoch, Stream.window, window, len(ids))
        uniforms = (bits >> np.uint64(11)) * 2.0**-53
        # A block's n samples, shuffled, go one each to n equal parts of the window, anywhere in the part.
        shuffled = np.lexsort((uniforms, block_of))
        parts = np.concatenate([np.arange(length) for length in lengths])
        places = (parts + uniforms[shuffled]) / lengths[block_of]
        ids = ids[shuffled][np.argsort(places, kind="stable")]
        self._cache[window] = ids
        if len(self._cache) > _CACHED_WINDOWS:
            self._cache.popitem(last=False)
        return ids


def steps_per_epoch(num_samples: int, global_batch_size: int) -> int:
    """Returns the steps of an epoch; the last one may be filled up with padding."""
    return -(-num_samples // global_batch_size)


def samples_after(num_steps: int, num_samples: int, global_batch_size: int) -> int:
    """Returns the real samples (padding does not count) that the first `num_steps` steps consume."""
    epochs, steps = divmod(num_steps, steps_per_epoch(num_samples, global_batch_size))
    return epochs * num_samples + steps * global_batch_size


def steps_before(samples_consumed: int, num_samples: int, global_batch_size: int) -> int | None:
    """Returns the steps that consume so many samples, the inverse of `samples_after`; None if none do."""
    epochs, samples = divmod(samples_consumed, num_samples)
    steps, rest = divmod(samples, global_batch_size)
    if rest:
        return None
    return epochs * steps_per_epoch(num_samples, global_batch_size) + steps


def rank_positions(step: int, global_batch_size: int, rank: int, world: int) -> Int64Array:
    """Returns the positions in the epoch of one rank's share of a step: a contiguous slice of its batch.

    Args:
        step: Step in the epoch, from 0.
        rank: Number of the data-parallel rank, 0 … world-1.
        world: Data-parallel ranks; they must divide `global_batch_size`.
    """
    assert global_batch_size % world == 0
    share = global_batch_size // world
    first = step * global_batch_size + rank * share
    return np.arange(first, first + share, dtype=np.int64)
