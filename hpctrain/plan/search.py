"""The fastest layout that fits, and why each other one was refused or is slower.

All degrees, schedules, microbatch sizes and checkpointing modes are tried. A set of degrees is a row: of its
variants, in order of their predicted time, the first that fits stands for it. GPipe is left out, since 1F1B
takes the same time and less memory; so are tensor-parallel groups over several nodes, which the plan refuses.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush

from hpctrain.config.hardware import Hardware
from hpctrain.config.schema import (
    Checkpointing,
    Config,
    DecoderConfig,
    VisionConfig,
)
from hpctrain.plan.decoder_memory import MemoryModel, make_memory_model
from hpctrain.plan.fit import host_findings
from hpctrain.plan.memory import GIB, RankMemory
from hpctrain.plan.options import Option, all_options, balanced_stages
from hpctrain.plan.points import memory_point
from hpctrain.plan.stages import Stages, block_worth, split_layers
from hpctrain.plan.steptime import StepTime
from hpctrain.plan.supply import known_identities
from hpctrain.plan.vision_memory import replicated_memory

NEAR = 1.4  # a cut that needs this much too much may fit when it is cut by memory
SLOW = 1.5  # so much slower than the best it is told only in passing, and not cut by memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a search came to."""

    best: Option | None
    others: tuple[Option, ...]  #: of each other set of degrees the best, fastest first, those that fit before
    num_tried: int

    def reason(self, option: Option) -> str:
        """Why an option is not the best one."""
        if option.refusal:
            return option.refusal
        ratio = option.step.seconds / (self.best or option).step.seconds
        slower = f"{ratio:.1f} × slower" if ratio >= 1.05 else "about as fast"
        return f"{most_costly(option.step)}; {slower}"


def most_costly(step: StepTime) -> str:
    """What a step spends most on beside computing."""
    names = {
        "tp": "all-reduces of tp",
        "dp": "gathers and reductions of dp",
        "pp": "sends of pp",
        "classes": "the shared head",
    }
    cause, seconds = max(
        ((cause, seconds) for cause, seconds in step.parts.items() if cause != "compute"),
        key=lambda part: part[1],
    )
    return f"{seconds / step.seconds:.0%} of the step in {names.get(cause, cause)}"


def search(
    config: Config,
    hardware: Hardware,
    refused: frozenset[str] = frozenset(),
    num_identities: int | None = None,
) -> Found:
    """Look at all layouts of a run's cluster.

    Args:
        num_identities: of training images, where there are any.
        refused: points (`memory_point`) at which memory ran out before.
    """
    limits = _Limits(hardware.get("usable_gib"), refused, known_identities(config.data, num_identities))
    rows: dict[tuple[int, int, int, int], list[Option]] = {}
    num_tried = 0
    for offload in (False, True):
        for option in all_options(config, hardware, limits.num_identities, offload=offload):
            layout = option.layout
            rows.setdefault((layout.pp, layout.dp_replicate, layout.dp_shard, layout.tp), []).append(option)
            num_tried += 1
        judged = _judge_rows(config, list(rows.values()), limits)
        if any(option.fits for option in judged) or not isinstance(config.model, DecoderConfig):
            break
    ordered = sorted(judged, key=lambda option: (not option.fits, option.step.seconds))
    has_best = bool(ordered) and ordered[0].fits
    return Found(
        best=ordered[0] if has_best else None,
        others=tuple(ordered[1:] if has_best else ordered),
        num_tried=num_tried,
    )


@dataclass(frozen=True, slots=True)
class _Limits:
    usable_gib: float | None
    refused: frozenset[str]
    num_identities: int | None


def _judge_rows(config: Config, rows: list[list[Option]], limits: _Limits) -> list[Option]:
    """Of each row the fastest variant that fits; where none does, the smallest, with the reason."""
    judged, best_s = [], float("inf")
    for row in sorted(rows, key=lambda row: min(option.step.seconds for option in row)):
        row.sort(key=lambda option: option.step.seconds)
        smallest = _judge(config, min(row, key=_size), limits, by_memory=True)
        for option in row if smallest.fits else []:
            found = _judge(config, option, limits, by_memory=option.step.seconds < SLOW * best_s)
            if found.fits:
                best_s = min(best_s, found.step.seconds)
                judged.append(found)
                break
        else:
            judged.append(smallest)
    return judged


def _size(option: Option) -> tuple[int, ...]:
    """Orders the variants of a row by what they need, nearly."""
    given = option.parallelism
    keeps = (Checkpointing.full, Checkpointing.selective, Checkpointing.none).index(given.checkpointing)
    return (
        not given.offload_optimizer,
        not given.reshard_after_forward,
        keeps,
        option.batch.microbatch_size,
        given.stages_per_rank,
    )


def _judge(config: Config, option: Option, limits: _Limits, *, by_memory: bool) -> Option:
    """Whether an option fits, with the memory of its fullest rank.

    Args:
        by_memory: where it nearly fits, cut the stages by memory.
    """
    given = replace(config, parallelism=option.parallelism)
    point = limits.refused and memory_point(given, option.layout, option.batch, limits.num_identities)
    if point in limits.refused:
        return replace(option, refusal="memory ran out with it before")
    found = _fullest(given, option, limits, by_memory)
    if found is None:
        return option
    place, memory = found
    needed = memory.total / GIB
    judged = replace(option, memory_gib=needed)
    usable_gib = limits.usable_gib
    if usable_gib is None or needed <= usable_gib:
        findings = host_findings(given, (memory,))
        return replace(judged, refusal=findings[0]) if findings else judged
    where = f" at pp={place}" if option.layout.pp > 1 else ""
    return replace(judged, refusal=f"needs {needed:.1f} of {usable_gib} GiB{where}: {memory.text()}")


def _fullest(
    config: Config, option: Option, limits: _Limits, by_memory: bool
) -> tuple[int, RankMemory] | None:
    """The fullest rank, for stages of equal time; where they nearly fit, for those cut by memory."""
    model, layout = config.model, option.layout
    if isinstance(model, VisionConfig):
        memory = replicated_memory(config, model, layout, option.batch, limits.num_identities)
        return None if memory is None else (0, memory)
    if not isinstance(model, DecoderConfig):
        return None
    # In flight is never more than what a short schedule has.
    short = min(option.batch.num_microbatches, 2 * layout.pp * config.parallelism.stages_per_rank)
    memory_model = make_memory_model(config, model, layout, replace(option.batch, num_microbatches=short))
    place, needed = _fullest_place(memory_model, balanced_stages(config, layout))
    usable = None if limits.usable_gib is None else int(limits.usable_gib * GIB)
    if usable is None or not by_memory or not usable < needed.total < NEAR * usable:
        return place, needed
    counts = _counts_that_fit(memory_model, model, usable)
    if counts is None:
        return place, needed
    return _fullest_place(memory_model, tuple((cut.start, cut.stop) for cut in split_layers(counts)))


def _fullest_place(memory_model: MemoryModel, stages: Stages) -> tuple[int, RankMemory]:
    """Of places with as many blocks the first has most in flight, so that the others need no look."""
    pp = memory_model.layout.pp
    looked_at: dict[tuple[int, ...], int] = {}
    for place in range(pp - 1):
        counts = tuple(end - first for first, end in stages[place::pp])
        looked_at.setdefault((place == 0, *counts), place)
    found = []
    for place in (*looked_at.values(), pp - 1):
        layers = {stage: stages[stage][1] - stages[stage][0] for stage in range(place, len(stages), pp)}
        found.append((place, memory_model.rank(place, layers)))
    return max(found, key=lambda pair: pair[1].total)


def _counts_that_fit(memory_model: MemoryModel, model: DecoderConfig, usable: int) -> list[int] | None:
    """Blocks of each stage, as even in time as memory allows; None where some are left over.

    Blocks go, one by one, to the stage that is least busy and has room. `fit.find_counts` finds the best cut,
    a hundred times slower.
    """
    config, pp = memory_model.config, memory_model.layout.pp
    num_stages = pp * config.parallelism.stages_per_rank
    counts = [1] * num_stages
    busy = [
        (1.0 + (stage == num_stages - 1) * block_worth(config, model), stage) for stage in range(num_stages)
    ]
    heapify(busy)
    for _ in range(model.num_hidden_layers - num_stages):
        while busy:
            time, stage = heappop(busy)
            more = dict.fromkeys(range(stage % pp, num_stages, pp), counts[stage] + 1)
            if memory_model.rank(stage % pp, more).total <= usable:
                counts[stage] += 1
                heappush(busy, (time + 1, stage))
                break
        else:
            return None
    return counts
