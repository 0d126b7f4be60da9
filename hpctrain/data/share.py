"""Which samples a data-parallel rank takes of every step, and which it has read ahead.

The samples of a global batch are sorted by id, which is their place in storage, before they are cut into
the ranks' shares. A window's batches are spread evenly over its blocks (`order`), so a rank meets the same
part of the window in each of them: together, whole blocks that no other rank reads. A rank's samples of a
step lie near each other, and are as mixed as the data: they were shuffled when they were packed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from hpctrain.config.schema import DataConfig
from hpctrain.data.order import EpochOrder, Int64Array, rank_positions, steps_before, steps_per_epoch
from hpctrain.errors import ConfigError, DataError

IdRange = tuple[int, int]  #: first sample id, and the id after the last

_GAP_SHARE = 16  #: up to this part of a block is read in vain rather than asked for around


class Samples(Protocol):
    """A split, as loaders see it."""

    folder: Path

    @property
    def num_samples(self) -> int:
        """Samples in the split."""


class RankShare:
    """One rank's part of the steps `start` … `stop`-1, counted from the first step of epoch 0.

    Args:
        start: First step that this process trains.
        stop: A whole number of epochs; nothing beyond it is read ahead.
    """

    def __init__(
        self,
        num_samples: int,
        data: DataConfig,
        seed: int,
        global_batch_size: int,
        rank: int,
        world: int,
        start: int,
        stop: int,
    ) -> None:
        self.steps_per_epoch = steps_per_epoch(num_samples, global_batch_size)
        assert stop % self.steps_per_epoch == 0
        self._num_samples, self._data, self._seed = num_samples, data, seed
        self._global_batch_size, self._start, self._stop = global_batch_size, start, stop
        positions = rank_positions(0, global_batch_size, rank, world)
        self._slice = slice(int(positions[0]), int(positions[-1]) + 1)
        self._orders: dict[int, EpochOrder] = {}
        self._ranges_of: tuple[range, list[IdRange]] = (range(0), [])

    def batch(self, step: int) -> Int64Array:
        """Returns the real samples of the whole global batch, ascending."""
        epoch, step = divmod(step, self.steps_per_epoch)
        first = step * self._global_batch_size
        return np.sort(self._order(epoch).slice(first, first + self._global_batch_size))

    def own(self, step: int) -> tuple[Int64Array, npt.NDArray[np.bool_]]:
        """Returns this rank's sample ids, and which are real.

        Padding comes after all real samples of the batch: the samples at the front of the epoch again.
        """
        ids = self.batch(step)
        is_real = np.arange(self._global_batch_size) < len(ids)
        missing = np.arange(self._global_batch_size - len(ids)) % self._num_samples
        padding = self._order(step // self.steps_per_epoch).ids_at(missing)
        return np.concatenate([ids, padding])[self._slice], is_real[self._slice]

    def ahead(self, step: int) -> list[IdRange]:
        """Returns what to read ahead when the rank makes this step.

        The steps of a window ask, a part each, for the rank's samples of the next window; the first step asks
        for all that nobody asked for before it. So each block is asked for once, at an even pace.
        """
        steps = self._window_steps(step)
        part = step - steps.start
        following = self._ranges(self._window_steps(steps.stop)) if steps.stop < self._stop else []
        if step != self._start:
            return following[part :: len(steps)]
        late = [each for i, each in enumerate(following) if i % len(steps) <= part]
        return self._find_ranges(range(step, steps.stop)) + late

    def _window_steps(self, step: int) -> range:
        """Returns the steps, `step` among them, whose first samples lie in the same window."""
        epoch, within = divmod(step, self.steps_per_epoch)
        order, size = self._order(epoch), self._global_batch_size
        start, stop = order.positions_of(order.window_at(within * size))
        base = epoch * self.steps_per_epoch
        return range(base + -(-start // size), base + -(-stop // size))

    def _ranges(self, steps: range) -> list[IdRange]:
        if self._ranges_of[0] != steps:
            self._ranges_of = (steps, self._find_ranges(steps))
        return self._ranges_of[1]

    def _find_ranges(self, steps: range) -> list[IdRange]:
        """Returns ranges of ids, each within a block, that hold this rank's samples of some steps."""
        ids = np.unique(np.concatenate([self.own(step)[0] for step in steps]))
        block = self._data.block_samples
        is_cut = (np.diff(ids) > 1 + block // _GAP_SHARE) | (np.diff(ids // block) > 0)
        firsts = ids[np.concatenate([[True], is_cut])].tolist()
        lasts = ids[np.concatenate([is_cut, [True]])].tolist()
        return [(first, last + 1) for first, last in zip(firsts, lasts, strict=True)]

    def _order(self, epoch: int) -> EpochOrder:
        if epoch not in self._orders:
            self._orders = {kept: order for kept, order in self._orders.items() if kept == epoch - 1}
            self._orders[epoch] = EpochOrder(
                self._num_samples, self._seed, epoch, self._data.block_samples, self._data.window_blocks
            )
        return self._orders[epoch]


def count_microbatches(global_batch_size: int, world: int, microbatch_size: int | None) -> int:
    """Returns the microbatches of a rank's share; None takes the whole share as one.

    Raises:
        ConfigError: the batch does not divide.
    """
    microbatch_size = microbatch_size or global_batch_size // world
    if microbatch_size < 1 or global_batch_size % (world * microbatch_size):
        raise ConfigError(
            f"optim.global_batch_size={global_batch_size} must divide into microbatches for {world} ranks",
            f"{world} data-parallel ranks × parallelism.microbatch_size {microbatch_size} = "
            f"{world * microbatch_size}",
            "set optim.global_batch_size to a multiple of it",
        )
    return global_batch_size // world // microbatch_size


def remaining_steps(
    samples: Samples, global_batch_size: int, samples_consumed: int, num_epochs: int
) -> range:
    """Returns the steps that remain, counted from the first step of epoch 0.

    Raises:
        ConfigError: `samples_consumed` lies within a step.
        DataError: the split is empty.
    """
    check_not_empty(samples)
    start = steps_before(samples_consumed, samples.num_samples, global_batch_size)
    if start is None:
        raise ConfigError(
            f"cannot go on after {samples_consumed} samples: that lies within a step",
            f"the split has {samples.num_samples} samples and optim.global_batch_size={global_batch_size}",
            "resume with the data and the global batch size that the run had",
        )
    return range(start, num_epochs * steps_per_epoch(samples.num_samples, global_batch_size))


def check_not_empty(samples: Samples) -> None:
    """Raises DataError when there is nothing to load."""
    if not samples.num_samples:
        raise DataError(f"{samples.folder} holds no samples", "", "pack data into it")
