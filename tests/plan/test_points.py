"""Which runs take the same memory."""

from __future__ import annotations

from dataclasses import replace

from hpctrain.config.schema import Checkpointing, Config, DecoderConfig, ParallelismConfig, TokenDataConfig
from hpctrain.plan.batch import BatchPlan
from hpctrain.plan.layout import Layout
from hpctrain.plan.points import memory_point

LAYOUT = Layout(pp=2, dp_replicate=1, dp_shard=1, tp=1)
CONFIG = Config(model=DecoderConfig(), data=TokenDataConfig(root="", sequence_length=64))


def point(config: Config = CONFIG, layout: Layout = LAYOUT, microbatch_size: int = 2, count: int = 8) -> str:
    batch = BatchPlan(
        global_batch_size=microbatch_size * count, microbatch_size=microbatch_size, num_microbatches=count
    )
    return memory_point(config, layout, batch)


def test_what_does_not_change_memory_does_not_change_the_point() -> None:
    assert point(replace(CONFIG, seed=7, name="other")) == point()
    assert point(replace(CONFIG, data=TokenDataConfig(root="/other", sequence_length=64))) == point()
    assert point(count=16) == point()  # more microbatches than are ever in flight


def test_what_changes_memory_changes_the_point() -> None:
    others = [
        point(microbatch_size=1),
        point(count=2),
        point(layout=replace(LAYOUT, pp=1, dp_shard=2)),
        point(replace(CONFIG, data=TokenDataConfig(root="", sequence_length=128))),
        point(replace(CONFIG, model=DecoderConfig(hidden_size=8192))),
        point(replace(CONFIG, parallelism=ParallelismConfig(checkpointing=Checkpointing.full))),
    ]
    assert len({point(), *others}) == 7
