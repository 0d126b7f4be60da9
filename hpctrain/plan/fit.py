"""Stages that fit on the device: the fastest cut, and of equally fast ones the roomiest."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from operator import add

from hpctrain.config.schema import Config, DecoderConfig, VisionConfig
from hpctrain.plan.batch import BatchPlan
from hpctrain.plan.decoder_memory import MemoryModel, make_memory_model
from hpctrain.plan.hardware import hardware_of
from hpctrain.plan.layout import Layout
from hpctrain.plan.memory import GIB, RankMemory, fullest, host_bytes_per_node
from hpctrain.plan.stages import Stages, cheapest_counts, split_layers, stage_flops
from hpctrain.plan.vision_memory import replicated_memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """What a run needs of the device, and whether it has it."""

    stages: Stages = ()
    memory: tuple[RankMemory, ...] = ()
    findings: list[str] = field(default_factory=list)  #: what does not fit
    note: str = ""  #: what the memory leaves out


def fit(config: Config, layout: Layout, batch: BatchPlan, num_identities: int | None) -> Fitted:
    """Stages and memory of a run that is legal.

    Args:
        num_identities: of the training images (`known_identities`); None where nobody knows.
    """
    if isinstance(config.model, DecoderConfig):
        stages, memory, findings = fit_stages(config, config.model, layout, batch)
        return Fitted(stages=stages, memory=memory, findings=findings)
    if not isinstance(config.model, VisionConfig):
        return Fitted()
    memory, findings = fit_replicated(config, config.model, layout, batch, num_identities)
    note = (
        "without the identities' head: the images are not packed yet, and plan.num_identities is null"
        if num_identities is None
        else ""
    )
    if not memory:
        note = f"nobody has measured {config.model.backbone} at this size: hpctrain plan --trace does"
    return Fitted(memory=memory, findings=findings, note=note)


def fit_stages(
    config: Config, model: DecoderConfig, layout: Layout, batch: BatchPlan
) -> tuple[Stages, tuple[RankMemory, ...], list[str]]:
    """Stages, the memory of their ranks, and what does not fit. A list of layers in the config is taken as it
    is."""
    memory_model = make_memory_model(config, model, layout, batch)
    usable_gib = hardware_of(config.cluster).get("usable_gib")
    usable = None if usable_gib is None else int(usable_gib * GIB)
    counts = config.parallelism.layers_per_stage or find_counts(memory_model, usable)
    stages = tuple((layers.start, layers.stop) for layers in split_layers(counts))
    memory = memory_model.ranks(stages)
    place = fullest(memory)
    findings = host_findings(config, memory)
    if usable is not None and memory[place].total > usable:
        blocks = sum(end - first for first, end in stages[place :: layout.pp])
        findings.insert(
            0,
            f"a rank at pp={place} ({blocks} blocks) needs {memory[place].total / GIB:.1f} GiB, but "
            f"cluster.hardware={config.cluster.hardware} has {usable_gib} GiB to use: "
            f"{memory[place].text()}; more pp, tp or dp_shard, parallelism.checkpointing=full, a smaller "
            "parallelism.microbatch_size, model.loss_chunk_tokens, or parallelism.offload_optimizer",
        )
    return stages, memory, findings


def fit_replicated(
    config: Config, model: VisionConfig, layout: Layout, batch: BatchPlan, num_identities: int | None
) -> tuple[tuple[RankMemory, ...], list[str]]:
    """The memory of a rank that has the whole model, nothing where the backbone is unknown; and what does not
    fit.

    Args:
        num_identities: of the training images; None where they are not known: then their head is left out.
    """
    memory = replicated_memory(config, model, layout, batch, num_identities)
    if memory is None:
        return (), []
    findings = host_findings(config, (memory,))
    usable_gib = hardware_of(config.cluster).get("usable_gib")
    if usable_gib is not None and memory.total > usable_gib * GIB:
        shares = "" if model.class_parallel else " model.class_parallel=true,"
        findings.insert(
            0,
            f"a rank needs {memory.total / GIB:.1f} GiB, but cluster.hardware={config.cluster.hardware} has "
            f"{usable_gib} GiB to use: {memory.text()}; a smaller parallelism.microbatch_size,{shares} "
            "optim.precision=bf16, or a smaller backbone",
        )
    return (memory,), findings


def host_findings(config: Config, memory: tuple[RankMemory, ...]) -> list[str]:
    """Whether a node's own memory is too small for what is offloaded into it, where it is known."""
    given = config.cluster.mem_gib
    has_gib = given if given is not None else hardware_of(config.cluster).get("host_memory_gib")
    needed = host_bytes_per_node(config, memory) / GIB
    if has_gib is None or needed <= has_gib or not any(rank.host for rank in memory):
        return []
    what = f"cluster.mem_gib={given}" if given is not None else f"a node of {config.cluster.hardware}"
    return [
        f"the ranks of a node need {needed:.0f} GiB of host memory, but {what} has {has_gib:.0f} GiB: "
        f"{sum(rank.host for rank in memory) / GIB / len(memory):.1f} GiB a rank are offloaded; more "
        "dp_shard, tp or pp, parallelism.offload_optimizer=false, or fewer data.num_workers"
    ]


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
