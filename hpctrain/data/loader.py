"""Batches for the ranks, from packed shards: the same samples and pixels for any ranks and workers.

The whole state is {seed, epoch, samples consumed}. Workers make whole microbatches; one set of them lives
from the first step to the last, so no epoch begins with a stall. Every real sample has weight 1 once an
epoch; padding at the end of an epoch, and samples whose image is damaged, have weight 0.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset

from hpctrain.config.schema import ImageDataConfig
from hpctrain.data.batch import Batch, ImageReader, TensorFields, label_counts, make_batch
from hpctrain.data.images import Augmentation
from hpctrain.data.order import Int64Array, rank_positions, steps_per_epoch
from hpctrain.data.shards import ShardSet
from hpctrain.data.share import (
    IdRange,
    RankShare,
    Samples,
    check_not_empty,
    count_microbatches,
    remaining_steps,
)
from hpctrain.errors import DataError

# Slurm signals every process of a step; only the training process may answer (it saves and stops).
_WORKERS_IGNORE = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)


AnyBatch = TypeVar("AnyBatch", bound=TensorFields)
#: Makes a batch of sample ids, of which some are real, for a step of an epoch; the last argument are the
#: real samples of the whole global batch. Errors are returned: raised in a worker, they would come out as
#: tracebacks.
MakeBatch = Callable[[Int64Array, npt.NDArray[np.bool_], int, int, Int64Array], AnyBatch | DataError]


class TrainLoader(Generic[AnyBatch]):
    """Iterates over the remaining steps of the remaining epochs: a list of microbatches a step."""

    def __init__(
        self,
        make: MakeBatch[AnyBatch],
        share: RankShare,
        steps: range,
        num_microbatches: int,
        loading: dict[str, Any],
        read_ahead: Callable[[list[IdRange]], None] | None = None,
    ) -> None:
        items = _TrainItems(make, share, num_microbatches, read_ahead)
        self.steps_per_epoch = share.steps_per_epoch
        self._num_microbatches = num_microbatches
        self._items = range(steps.start * num_microbatches, steps.stop * num_microbatches)
        self._loader = _make_data_loader(items, self._items, **loading)

    def __len__(self) -> int:
        """Returns the steps that remain."""
        return len(self._items) // self._num_microbatches

    def __iter__(self) -> Iterator[list[AnyBatch]]:
        batches = _iterate(self._loader)
        for first in batches:
            yield [first, *(next(batches) for _ in range(self._num_microbatches - 1))]


class EvalLoader(Generic[AnyBatch]):
    """Iterates over a whole split once, in id order: the same number of batches on every rank."""

    def __init__(
        self,
        make: MakeBatch[AnyBatch],
        samples: Samples,
        batch_size: int,
        rank: int,
        world: int,
        loading: dict[str, Any],
    ) -> None:
        """Raises DataError when the split is empty."""
        check_not_empty(samples)
        items = _EvalItems(make, samples.num_samples, batch_size, rank, world)
        self._items = range(steps_per_epoch(samples.num_samples, batch_size * world))
        self._loader = _make_data_loader(items, self._items, **loading)

    def __len__(self) -> int:
        """Returns the batches of a rank."""
        return len(self._items)

    def __iter__(self) -> Iterator[AnyBatch]:
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
) -> TrainLoader[Batch]:
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
    size = _size(image_size)
    augmentation = Augmentation(data.random_crop_min_scale, data.flip, data.color_jitter)

    def make(
        ids: Int64Array, is_real: npt.NDArray[np.bool_], epoch: int, step: int, batch_ids: Int64Array
    ) -> Batch | DataError:
        reader = ImageReader(shards, size, augmentation, seed, epoch, data.scaled_decode)
        return make_batch(shards, ids, is_real, reader, step, label_counts(shards, batch_ids))

    num_microbatches = count_microbatches(global_batch_size, world, microbatch_size)
    steps = remaining_steps(shards, global_batch_size, samples_consumed, num_epochs)
    share = RankShare(shards.num_samples, data, seed, global_batch_size, rank, world, steps.start, steps.stop)
    loading = {"num_workers": data.num_workers, "prefetch": data.prefetch, "pin_memory": pin_memory}
    return TrainLoader(make, share, steps, num_microbatches, loading, shards.prefetch)


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
) -> EvalLoader[Batch]:
    """Builds the loader of one rank over a whole split, each image resized whole, none changed.

    Batch `i` of rank `r` holds the samples from (i × world + r) × batch_size on. The end is filled with
    padding of weight 0.

    Raises:
        DataError: the split is empty.
    """
    reader = ImageReader(shards, _size(image_size), None, 0, 0, scaled_decode)

    def make(
        ids: Int64Array, is_real: npt.NDArray[np.bool_], epoch: int, step: int, batch_ids: Int64Array
    ) -> Batch | DataError:
        return make_batch(shards, ids, is_real, reader, step, label_counts(shards, batch_ids))

    loading = {"num_workers": num_workers, "prefetch": prefetch, "pin_memory": pin_memory}
    return EvalLoader(make, shards, batch_size, rank, world, loading)


class _TrainItems(Dataset["AnyBatch | DataError"]):
    """Item `t` is microbatch `t` of this rank, counted from the first step of epoch 0."""

    def __init__(
        self,
        make: MakeBatch[AnyBatch],
        share: RankShare,
        num_microbatches: int,
        read_ahead: Callable[[list[IdRange]], None] | None,
    ) -> None:
        self._make, self._share, self._num_microbatches = make, share, num_microbatches
        self._read_ahead = read_ahead

    def __getitem__(self, item: int) -> AnyBatch | DataError:
        step, microbatch = divmod(item, self._num_microbatches)
        if microbatch == 0 and self._read_ahead:  # whichever worker makes it: a rank asks once
            self._read_ahead(self._share.ahead(step))
        sample_ids, is_real = self._share.own(step)
        size = len(sample_ids) // self._num_microbatches
        own = slice(microbatch * size, (microbatch + 1) * size)
        epoch, step_in_epoch = divmod(step, self._share.steps_per_epoch)
        return self._make(sample_ids[own], is_real[own], epoch, step_in_epoch, self._share.batch(step))


class _EvalItems(Dataset["AnyBatch | DataError"]):
    """Item `i` is batch `i` of this rank."""

    def __init__(
        self, make: MakeBatch[AnyBatch], num_samples: int, batch_size: int, rank: int, world: int
    ) -> None:
        self._make, self._num_samples = make, num_samples
        self._batch_size, self._rank, self._world = batch_size, rank, world

    def __getitem__(self, item: int) -> AnyBatch | DataError:
        everyones = self._batch_size * self._world
        positions = rank_positions(item, everyones, self._rank, self._world)
        batch_ids = np.arange(item * everyones, min((item + 1) * everyones, self._num_samples))
        is_real = positions < self._num_samples
        return self._make(positions % self._num_samples, is_real, 0, item, batch_ids)


def _make_data_loader(
    items: Dataset[AnyBatch | DataError], order: range, *, num_workers: int, prefetch: int, pin_memory: bool
) -> DataLoader[AnyBatch | DataError]:
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


def _iterate(loader: DataLoader[AnyBatch | DataError]) -> Iterator[AnyBatch]:
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


def _size(image_size: Sequence[int]) -> tuple[int, int]:
    height, width = image_size
    return height, width
