"""Stages that fit on the device: the fastest cut, and of equally fast ones the roomiest."""

from __future__ import annotations

from functools import cache
from operator import add

from hpctrain.config.schema import Config, DecoderConfig
from hpctrain.plan.batch import BatchPlan
from hpctrain.plan.hardware import hardware_of
from hpctrain.plan.layout import Layout
from hpctrain.plan.memory import GIB, MemoryModel, RankMemory, fullest, make_memory_model
from hpctrain.plan.stages import Stages, cheapest_counts, split_layers, stage_flops


def fit_stages(
    config: Config, model: DecoderConfig, layout: Layout, batch: BatchPlan
) -> tuple[Stages, tuple[RankMemory, ...], list[str]]:
    """Stages, the memory of their ranks, and the finding if a rank has not enough. A list of layers in the
    config is taken as it is."""
    memory_model = make_memory_model(config, model, layout, batch)
    usable_gib = hardware_of(config.cluster).get("usable_gib")
    usable = None if usable_gib is None else int(usable_gib * GIB)
    counts = config.parallelism.layers_per_stage or find_counts(memory_model, usable)
    stages = tuple((layers.start, layers.stop) for layers in split_layers(counts))
    memory = memory_model.ranks(stages)
    place = fullest(memory)
    if usable is None or memory[place].total <= usable:
        return stages, memory, []
    blocks = sum(end - first for first, end in stages[place :: layout.pp])
    finding = (
        f"a rank at pp={place} ({blocks} blocks) needs {memory[place].total / GIB:.1f} GiB, but "
        f"cluster.hardware={config.cluster.hardware} has {usable_gib} GiB to use: {memory[place].text()}; "
        "more pp, tp or dp_shard, parallelism.checkpointing=full, a smaller parallelism.microbatch_size, "
        "model.loss_chunk_tokens, or parallelism.offload_optimizer"
    )
    return stages, memory, [finding]


def find_counts(memory_model: MemoryModel, usable: int | None) -> tuple[int, ...]:
    """Numbers of layers of each stage: of the cuts that fit, those whose slowest stage is fastest; of these,
    those whose fullest rank has most room; of these, the most even one. Where nothing fits, the cut that
    needs least; without a limit room does not matter."""
    config, model, pp = memory_model.config, memory_model.model, memory_model.layout.pp
    num_layers, num_stages = model.num_hidden_layers, pp * config.parallelism.stages_per_rank

    @cache
    def time(stage: int, layers: int) -> int:
        return stage_flops(config, model, layers, has_head=stage == num_stages - 1)

    @cache
    def room(stage: int, layers: int) -> int:
        """Of the stage's rank, its other stages being of the same size."""
        if usable is None:
            return 0
        return memory_model.rank(stage % pp, dict.fromkeys(range(stage % pp, num_stages, pp), layers)).total

    def solve(time_limit: float, room_limit: float, what: str) -> tuple[int, tuple[int, ...]] | None:
        def cost(stage: int, first: int, end: int) -> int | None:
            own, needed = time(stage, end - first), room(stage, end - first)
            if own > time_limit or needed > room_limit:
                return None
            return {"time": own, "room": needed, "unevenness": own**2}[what]

        return cheapest_counts(num_layers, num_stages, cost, add if what == "unevenness" else max)

    unlimited = float("inf")
    fastest = solve(unlimited, unlimited if usable is None else usable, "time")
    time_limit = fastest[0] if fastest else unlimited
    roomiest = solve(time_limit, unlimited, "room")
    assert roomiest is not None
    most_even = solve(time_limit, roomiest[0], "unevenness")
    assert most_even is not None
    return most_even[1]
