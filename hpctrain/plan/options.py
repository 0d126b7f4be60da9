"""Layouts that a cluster allows, each with what goes with it and its predicted step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from hpctrain.config.hardware import Hardware
from hpctrain.config.schema import (
    Checkpointing,
    Config,
    DecoderConfig,
    ParallelismConfig,
    Schedule,
    TokenDataConfig,
)
from hpctrain.plan.batch import BatchPlan, resolve_batch
from hpctrain.plan.decoder_legality import batch_findings
from hpctrain.plan.layout import Layout, axes_text
from hpctrain.plan.legality import layout_findings
from hpctrain.plan.stages import Stages, block_worth, split_layers, stage_findings
from hpctrain.plan.steptime import StepTime, predict_step

LARGEST_MICROBATCH_TOKENS = 32_768  # products are as fast as they get long before
SCHEDULES = ((Schedule["1f1b"], 1), (Schedule["interleaved_1f1b"], 2), (Schedule["interleaved_1f1b"], 4))


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A layout that was looked at."""

    parallelism: ParallelismConfig
    layout: Layout
    batch: BatchPlan
    step: StepTime
    memory_gib: float | None  #: of the fullest rank; None where it is not known
    refusal: str = ""  #: why it cannot be taken

    @property
    def fits(self) -> bool:
        return not self.refusal

    def name(self) -> str:
        return axes_text(self.layout)

    def variant(self) -> str:
        """What goes with the degrees."""
        given = self.parallelism
        words = [f"microbatch {self.batch.microbatch_size}"]
        if self.layout.pp > 1:
            stages = f" × {given.stages_per_rank}" if given.stages_per_rank > 1 else ""
            words.append(f"{given.schedule.name}{stages}")
        if given.checkpointing is not Checkpointing.none:
            words.append(f"checkpointing {given.checkpointing.name}")
        if not given.reshard_after_forward:
            words.append("weights kept gathered")
        if given.offload_optimizer:
            words.append("offload")
        return ", ".join(words)


def all_options(
    config: Config, hardware: Hardware, num_identities: int | None, *, offload: bool
) -> Iterator[Option]:
    """Every legal combination, with its predicted step; memory is not looked at yet."""
    for layout in _layouts(config):
        share = config.optim.global_batch_size // layout.dp
        for parallelism in _variants(config, layout, share, offload):
            given = replace(config, parallelism=parallelism)
            batch, _ = resolve_batch(config.optim.global_batch_size, parallelism.microbatch_size, layout.dp)
            if batch is None or batch_findings(given, layout, batch):
                continue
            stages = balanced_stages(given, layout)
            step = predict_step(given, layout, batch, stages, hardware, num_identities=num_identities)
            if step is not None:
                yield Option(parallelism=parallelism, layout=layout, batch=batch, step=step, memory_gib=None)


def _layouts(config: Config) -> Iterator[Layout]:
    world, per_node = config.cluster.num_nodes * config.cluster.ranks_per_node, config.cluster.ranks_per_node
    is_decoder = isinstance(config.model, DecoderConfig)
    for tp in _divisors(per_node) if is_decoder else [1]:
        for pp in _divisors(world // tp) if is_decoder else [1]:
            for dp_shard in _divisors(world // tp // pp) if is_decoder else [1]:
                layout = Layout(pp=pp, dp_replicate=world // tp // pp // dp_shard, dp_shard=dp_shard, tp=tp)
                if config.optim.global_batch_size % layout.dp == 0:
                    yield layout


def _variants(config: Config, layout: Layout, share: int, offload: bool) -> Iterator[ParallelismConfig]:
    model = config.model
    if not isinstance(model, DecoderConfig):
        for size in _divisors(share):
            yield replace(_with_degrees(config.parallelism, layout), microbatch_size=size)
        return
    assert isinstance(config.data, TokenDataConfig)
    most = max(1, LARGEST_MICROBATCH_TOKENS // config.data.sequence_length)
    sizes = [size for size in _divisors(share) if size & (size - 1) == 0 and size <= most]
    together = layout.tp > 1 and config.data.sequence_length % layout.tp == 0
    for schedule, per_rank in SCHEDULES if layout.pp > 1 else SCHEDULES[:1]:
        base = replace(
            _with_degrees(config.parallelism, layout),
            schedule=schedule,
            stages_per_rank=per_rank,
            layers_per_stage=None,
            sequence_parallel=together,
            offload_optimizer=offload,
        )
        given = replace(config, parallelism=base)
        if stage_findings(model, base, layout.pp) or layout_findings(given, layout):
            continue
        for size in sizes:
            for checkpointing in Checkpointing:
                for reshard in (True, False) if layout.dp_shard > 1 else (True,):
                    yield replace(
                        base, microbatch_size=size, checkpointing=checkpointing, reshard_after_forward=reshard
                    )


def _with_degrees(parallelism: ParallelismConfig, layout: Layout) -> ParallelismConfig:
    return replace(
        parallelism,
        auto=False,
        pp=layout.pp,
        dp_replicate=layout.dp_replicate,
        dp_shard=layout.dp_shard,
        tp=layout.tp,
    )


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def balanced_stages(config: Config, layout: Layout) -> Stages:
    """Stages of equal time, as nearly as whole blocks allow, with fewer blocks where the head is."""
    model = config.model
    if not isinstance(model, DecoderConfig):
        return ()
    num_stages = layout.pp * config.parallelism.stages_per_rank
    head = block_worth(config, model)
    last = max(1, min(model.num_hidden_layers, round((model.num_hidden_layers + head) / num_stages - head)))
    if num_stages == 1:
        return ((0, model.num_hidden_layers),)
    rest, others = model.num_hidden_layers - last, num_stages - 1
    small, more = divmod(rest, others)
    if small == 0:
        small, more, last = 1, 0, model.num_hidden_layers - others
    counts = [small] * (others - more) + [small + 1] * more + [last]
    return tuple((layers.start, layers.stop) for layers in split_layers(counts))
