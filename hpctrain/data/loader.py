"""Batches for the ranks, from packed shards: the same samples and pixels for any ranks and workers.

The whole state is {seed, epoch, samples consumed}. Workers make whole microbatches; one set of them lives
from the first step to the last, so no epoch begins with a stall. Every real sample has weight 1 once an
epoch; padding at the end of an epoch, and samples whose image is damaged, have weight 0.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from hpctrain.config.schema import ImageDataConfig
from hpctrain.data.batch import Batch, ImageReader, label_counts, make_batch
from hpctrain.data.images import Augmentation
from hpctrain.data.order import rank_positions, steps_before, steps_per_epoch
from hpctrain.data.shards import ShardSet
from hpctrain.data.share import RankShare
from hpctrain.errors import ConfigError, DataError

# Slurm signals every process of a step; only the training process may answer (it saves and stops).
_WORKERS_IGNORE = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)


class TrainLoader:
    """Iterates over the remaining steps of the remaining epochs: a list of microbatches a step."""

    def __init__(self, items: _TrainItems, start: int, stop: int, loading: dict[str, Any]) -> None:
        self.steps_per_epoch = items.steps_per_epoch
        self._num_microbatches = items.num_microbatches
        self._items = range(start * self._num_microbatches, stop * self._num_microbatches)
        self._loader = _make_data_loader(items, self._items, **loading)

    def __len__(self) -> int:
        """Returns the steps that remain."""
        return len(self._items) // self._num_microbatches

    def __iter__(self) -> Iterator[list[Batch]]:
        batches = _iterate(self._loader)
        for first in batches:
            yield [first, *(next(batches) for _ in range(self._num_microbatches - 1))]


class EvalLoader:
    """Iterates over a whole split once, in id order: the same number of batches on every rank."""

    def __init__(self, items: _EvalItems, loading: dict[str, Any]) -> None:
        self._items = range(items.num_batches)
        self._loader = _make_data_loader(items, self._items, **loading)

    def __len__(self) -> int:
        """Returns the batches of a rank."""
        return len(self._items)

    def __iter__(self) -> Iterator[Batch]:
        return _iterate(self._loader)


def build_train_loader(
    shards: ShardSet,
    *,
    image_size: Sequence[int],
    data: ImageDataConfig,
    seed: int,
    global_batch_size: int,
    rank: int,
    world: int,
    samples_consumed: int,
    num_epochs: int,
    microbatch_size: int | None = None,
    pin_memory: bool = False,
) -> TrainLoader:
    """Builds the loader of one rank. It yields `list[Batch]`, the microbatches of a step.

    Args:
        image_size: Height and width, pixels.
        rank: Number of this data-parallel rank, 0 … world-1.
        samples_consumed: Real samples that all ranks together have trained on, over all epochs
            (`order.samples_after`); it must lie between two steps.
        microbatch_size: Samples of a microbatch; None takes the rank's whole share of the batch.
        pin_memory: Give batches in page-locked memory (needs a GPU).

    Ranks share a step in storage order (`share`), so a rank's microbatches hold samples that lie near each
    other. Packing has shuffled them: neighbours are as mixed as the data.

    Raises:
        ConfigError: the batch does not divide, or `samples_consumed` lies within a step.
        DataError: the split is empty.
    """
    microbatch_size = microbatch_size or global_batch_size // world
    if microbatch_size < 1 or global_batch_size % (world * microbatch_size):
        raise ConfigError(
            f"optim.global_batch_size={global_batch_size} must divide into microbatches for {world} ranks",
            f"{world} data-parallel ranks × parallelism.microbatch_size {microbatch_size} = "
            f"{world * microbatch_size}",
            "set optim.global_batch_size to a multiple of it",
        )
    _check_not_empty(shards)
    start = steps_before(samples_consumed, shards.num_samples, global_batch_size)
    if start is None:
        raise ConfigError(
            f"cannot go on after {samples_consumed} samples: that lies within a step",
            f"the split has {shards.num_samples} samples and optim.global_batch_size={global_batch_size}",
            "resume with the data and the global batch size that the run had",
        )
    stop = num_epochs * steps_per_epoch(shards.num_samples, global_batch_size)
    share = RankShare(shards.num_samples, data, seed, global_batch_size, rank, world, start, stop)
    items = _TrainItems(
        shards, _size(image_size), data, seed, share, global_batch_size // world // microbatch_size
    )
    loading = {"num_workers": data.num_workers, "prefetch": data.prefetch, "pin_memory": pin_memory}
    return TrainLoader(items, start, stop, loading)


def build_eval_loader(
    shards: ShardSet,
    *,
    image_size: Sequence[int],
    batch_size: int,
    rank: int,
    world: int,
    num_workers: int,
    prefetch: int = 2,
    scaled_decode: bool = False,
    pin_memory: bool = False,
) -> EvalLoader:
    """Builds the loader of one rank over a whole split, each image resized whole, none changed.

    Batch `i` of rank `r` holds the samples from (i × world + r) × batch_size on. The end is filled with
    padding of weight 0.

    Raises:
        DataError: the split is empty.
    """
    _check_not_empty(shards)
    items = _EvalItems(shards, _size(image_size), batch_size, rank, world, scaled_decode)
    return EvalLoader(items, {"num_workers": num_workers, "prefetch": prefetch, "pin_memory": pin_memory})


class _TrainItems(Dataset["Batch | DataError"]):
    """Item `t` is microbatch `t` of this rank, counted from the first step of epoch 0."""

    def __init__(
        self,
        shards: ShardSet,
        image_size: tuple[int, int],
        data: ImageDataConfig,
        seed: int,
        share: RankShare,
        num_microbatches: int,
    ) -> None:
        self.steps_per_epoch, self.num_microbatches = share.steps_per_epoch, num_microbatches
        self._shards, self._image_size, self._seed = shards, image_size, seed
        self._share, self._scaled_decode = share, data.scaled_decode
        self._augmentation = Augmentation(data.random_crop_min_scale, data.flip, data.color_jitter)

    def __getitem__(self, item: int) -> Batch | DataError:
        step, microbatch = divmod(item, self.num_microbatches)
        if microbatch == 0:  # whichever worker makes it: a rank asks once
            self._shards.prefetch(self._share.ahead(step))
        sample_ids, is_real = self._share.own(step)
        size = len(sample_ids) // self.num_microbatches
        own = slice(microbatch * size, (microbatch + 1) * size)
        epoch, step_in_epoch = divmod(step, self.steps_per_epoch)
        reader = ImageReader(
            self._shards, self._image_size, self._augmentation, self._seed, epoch, self._scaled_decode
        )
        counts = label_counts(self._shards, self._share.batch(step))
        return make_batch(self._shards, sample_ids[own], is_real[own], reader, step_in_epoch, counts)


class _EvalItems(Dataset["Batch | DataError"]):
    """Item `i` is batch `i` of this rank."""

    def __init__(
        self,
        shards: ShardSet,
        image_size: tuple[int, int],
        batch_size: int,
        rank: int,
        world: int,
        scaled_decode: bool,
    ) -> None:
        self.num_batches = steps_per_epoch(shards.num_samples, batch_size * world)
        self._shards, self._batch_size, self._rank, self._world = shards, batch_size, rank, world
        self._reader = ImageReader(shards, image_size, None, 0, 0, scaled_decode)

    def __getitem__(self, item: int) -> Batch | DataError:
        positions = rank_positions(item, self._batch_size * self._world, self._rank, self._world)
        first = item * self._batch_size * self._world
        everyone = np.arange(first, min(first + self._batch_size * self._world, self._shards.num_samples))
        return make_batch(
            self._shards,
            positions % self._shards.num_samples,
            positions < self._shards.num_samples,
            self._reader,
            item,
            label_counts(self._shards, everyone),
        )


def _make_data_loader(
    items: Dataset[Batch | DataError], order: range, *, num_workers: int, prefetch: int, pin_memory: bool
) -> DataLoader[Batch | DataError]:
    return DataLoader(
        items,
        batch_size=None,
        sampler=order,
        num_workers=num_workers,
        multiprocessing_context="fork" if num_workers else None,
        prefetch_factor=prefetch if num_workers else None,
        worker_init_fn=_start_worker,
        collate_fn=_unchanged,
        pin_memory=pin_memory,
        # Its own generator: otherwise each start draws from torch's global one, and a resumed run differs.
        generator=torch.Generator(),
    )


def _iterate(loader: DataLoader[Batch | DataError]) -> Iterator[Batch]:
    """Starts the workers and yields their batches in order."""
    # A signal between a worker's fork and its first line would run the training process's handler there.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _WORKERS_IGNORE)
    try:
        batches = iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    try:
        for batch in batches:
            if isinstance(batch, DataError):
                raise batch
            yield batch
    finally:
        del batches  # ends the workers, even while a traceback holds this frame


def _start_worker(worker: int) -> None:
    """Makes a worker deaf to the signals that are for the training process, and single-threaded."""
    for number in _WORKERS_IGNORE:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _WORKERS_IGNORE)
    torch.set_num_threads(1)


def _unchanged(batch: Any) -> Any:
    return batch


def _check_not_empty(shards: ShardSet) -> None:
    if not shards.num_samples:
        raise DataError(f"{shards.folder} holds no samples", "", "pack images into it")


def _size(image_size: Sequence[int]) -> tuple[int, int]:
    height, width = image_size
    return height, width
