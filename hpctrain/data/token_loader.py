"""Batches of tokens for the ranks: the same samples for any ranks and workers, by the order of `order`."""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

from hpctrain.config.schema import TokenDataConfig
from hpctrain.data.loader import EvalLoader, MakeBatch, TrainLoader
from hpctrain.data.order import Int64Array
from hpctrain.data.sequences import PackedSequences
from hpctrain.data.share import RankShare, count_microbatches, remaining_steps
from hpctrain.data.token_batch import TokenBatch, make_token_batch
from hpctrain.errors import DataError


def build_token_train_loader(
    sequences: PackedSequences,
    *,
    data: TokenDataConfig,
    seed: int,
    global_batch_size: int,
    rank: int,
    world: int,
    samples_consumed: int,
    num_epochs: int,
    microbatch_size: int | None = None,
    pin_memory: bool = False,
) -> TrainLoader[TokenBatch]:
    """Builds the loader of one rank. It yields `list[TokenBatch]`, the microbatches of a step.

    Args:
        rank: Number of this data-parallel rank, 0 … world-1. Ranks that differ in tp or pp only give the
            same number, and get the same batches.
        samples_consumed: Real samples that all ranks together have trained on, over all epochs
            (`order.samples_after`); it must lie between two steps.
        microbatch_size: Samples of a microbatch; None takes the rank's whole share of the batch.
        pin_memory: Give batches in page-locked memory (needs a GPU).

    Raises:
        ConfigError: the batch does not divide, or `samples_consumed` lies within a step.
        DataError: the split is empty.
    """
    num_microbatches = count_microbatches(global_batch_size, world, microbatch_size)
    steps = remaining_steps(sequences, global_batch_size, samples_consumed, num_epochs)
    share = RankShare(
        sequences.num_samples, data, seed, global_batch_size, rank, world, steps.start, steps.stop
    )
    loading = {"num_workers": data.num_workers, "prefetch": data.prefetch, "pin_memory": pin_memory}
    return TrainLoader(_make(sequences), share, steps, num_microbatches, loading)


def build_token_eval_loader(
    sequences: PackedSequences,
    *,
    batch_size: int,
    rank: int,
    world: int,
    num_workers: int,
    prefetch: int = 2,
    pin_memory: bool = False,
) -> EvalLoader[TokenBatch]:
    """Builds the loader of one rank over a whole split, in id order.

    Batch `i` of rank `r` holds the samples from (i × world + r) × batch_size on. The end is filled with
    padding of weight 0.

    Raises:
        DataError: the split is empty.
    """
    loading = {"num_workers": num_workers, "prefetch": prefetch, "pin_memory": pin_memory}
    return EvalLoader(_make(sequences), sequences, batch_size, rank, world, loading)


def _make(sequences: PackedSequences) -> MakeBatch[TokenBatch]:
    @functools.lru_cache(maxsize=2)  # the microbatches of a step ask for the same
    def num_learnt(batch_ids: bytes) -> float:
        return float(sequences.num_learnt(np.frombuffer(batch_ids, dtype=np.int64)))

    def make(
        ids: Int64Array, is_real: npt.NDArray[np.bool_], epoch: int, step: int, batch_ids: Int64Array
    ) -> TokenBatch | DataError:
        try:
            counted = num_learnt(batch_ids.tobytes())
        except DataError as error:
            return error
        return make_token_batch(sequences, ids, is_real, epoch, step, counted)

    return make
