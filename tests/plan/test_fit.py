"""Stages that fit: against all cuts there are, and the 32B model's as its page says."""

from __future__ import annotations

import itertools

import pytest

from hpctrain.config.schema import (
    Checkpointing,
    Config,
    DecoderConfig,
    ParallelismConfig,
    Schedule,
    TokenDataConfig,
)
from hpctrain.plan.batch import BatchPlan
from hpctrain.plan.decoder_memory import MemoryModel, make_memory_model
from hpctrain.plan.fit import find_counts, fit_stages
from hpctrain.plan.layout import Layout
from hpctrain.plan.stages import split_layers, stage_flops
from tests.plan.large import SIXTEEN, fit
from tests.plan.test_stages import all_cuts

LAYERS = 9


def memory_model(pp: int, tied: bool, checkpointing: Checkpointing) -> MemoryModel:
    """A decoder whose embedding and head weigh as much as some blocks."""
    model = DecoderConfig(
        vocab_size=900,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        tie_word_embeddings=tied,
    )
    model.num_attention_heads = model.num_key_value_heads = 2
    config = Config(model=model, data=TokenDataConfig(sequence_length=64))
    config.parallelism = ParallelismConfig(checkpointing=checkpointing)
    batch = BatchPlan(global_batch_size=8, microbatch_size=1, num_microbatches=8)
    layout = Layout(pp=pp, dp_replicate=1, dp_shard=1, tp=1)
    return make_memory_model(config, model, layout, batch)


@pytest.mark.parametrize("checkpointing", list(Checkpointing))
def test_no_cut_that_fits_is_faster_and_none_as_fast_is_roomier(checkpointing: Checkpointing) -> None:
    for pp, tied in itertools.product((2, 3, 4), (False, True)):
        given = memory_model(pp, tied, checkpointing)
        cuts = []
        for counts in all_cuts(LAYERS, pp):
            times = [
                stage_flops(given.config, given.model, count, stage == pp - 1)
                for stage, count in enumerate(counts)
            ]
            stages = tuple((layers.start, layers.stop) for layers in split_layers(counts))
            room = max(memory.total for memory in given.ranks(stages))
            cuts.append((max(times), room, sum(time**2 for time in times), counts))
        rooms = sorted(room for _, room, _, _ in cuts)
        for usable in (rooms[0], rooms[len(rooms) // 3], rooms[-1]):
            best = min(cut for cut in cuts if cut[1] <= usable)
            assert find_counts(given, usable) == best[3]
        assert find_counts(given, rooms[0] - 1) == min(cut[1:] for cut in cuts)[2]
        assert find_counts(given, None) == min((time, even, counts) for time, _, even, counts in cuts)[2]


def test_a_head_as_dear_as_blocks_takes_them_from_the_last_stage() -> None:
    counts = find_counts(memory_model(3, False, Checkpointing.full), None)
    assert counts[-1] < min(counts[:-1])


def test_the_32b_model_is_cut_as_its_page_says() -> None:
    counts, _ = fit("PP16×TP2")
    assert counts == SIXTEEN


def test_a_list_in_the_config_is_taken_as_it_is() -> None:
    given = memory_model(2, False, Checkpointing.none)
    given.config.parallelism.layers_per_stage = [1, 8]
    batch = BatchPlan(global_batch_size=8, microbatch_size=1, num_microbatches=8)
    stages, _, found = fit_stages(given.config, given.model, given.layout, batch)
    assert (stages, found) == (((0, 1), (1, 9)), [])


def test_interleaved_stages_are_cut_too() -> None:
    given = memory_model(2, False, Checkpointing.none)
    given.config.parallelism.schedule, given.config.parallelism.stages_per_rank = (
        Schedule["interleaved_1f1b"],
        2,
    )
    given = make_memory_model(
        given.config,
        given.model,
        given.layout,
        BatchPlan(global_batch_size=8, microbatch_size=1, num_microbatches=8),
    )
    for usable in (None, 10**12):
        counts = find_counts(given, usable)
        assert sum(counts) == LAYERS
        assert len(counts) == 4
        assert min(counts) >= 1
