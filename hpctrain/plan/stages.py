"""Layers to pipeline stages: contiguous, by cost.

A pipeline is as fast as its slowest stage, so the largest cost is made as small as it can be. The head costs
time (1.6 blocks of a 32B model), the embedding only memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

from hpctrain.config.schema import Checkpointing, Config, DecoderConfig, ParallelismConfig, TokenDataConfig
from hpctrain.plan.costs import block_forward_flops, head_forward_flops

Cost = Callable[[int, int, int], int | None]
Stages = tuple[tuple[int, int], ...]  # of each stage: its first block, and the one after its last


def cheapest_counts(
    num_layers: int, num_stages: int, cost: Cost, fold: Callable[[int, int], int]
) -> tuple[int, tuple[int, ...]] | None:
    """The smallest total cost of a cut and its numbers of layers; None where no cut is allowed.

    Among equals with `fold=add` the one with fewer layers in early stages, where more microbatches are in
    flight. Dynamic programming from the last stage to the first.

    Args:
        cost: of a stage, by number, first layer and the one after its last; None where that is not allowed.
        fold: `max` for the dearest stage, `operator.add` for the sum.
    """
    best: dict[int, tuple[int, tuple[int, ...]]] = {num_layers: (0, ())}
    for stage in reversed(range(num_stages)):
        reached: dict[int, tuple[int, tuple[int, ...]]] = {}
        for first in range(stage, num_layers - (num_stages - 1 - stage)):
            for end, (rest, counts) in best.items():
                if end <= first or (own := cost(stage, first, end)) is None:
                    continue
                found = fold(own, rest), (end - first, *counts)
                reached[first] = min(reached.get(first, found), found)
        best = reached
    return best.get(0)


def split_layers(counts: Sequence[int]) -> list[range]:
    """Numbers of layers as ranges of layers."""
    ends = list(accumulate(counts))
    return [range(end - count, end) for count, end in zip(counts, ends, strict=True)]


def stage_findings(model: DecoderConfig, parallelism: ParallelismConfig, pp: int) -> list[str]:
    """Why the model cannot be cut into that many stages, or not as `layers_per_stage` lists."""
    counts, num_layers = parallelism.layers_per_stage, model.num_hidden_layers
    num_stages = pp * parallelism.stages_per_rank
    text = f"pp {pp} × stages_per_rank {parallelism.stages_per_rank} = {num_stages} stages"
    if counts is None:
        if num_stages <= num_layers:
            return []
        return [f"parallelism: {text}, but model.num_hidden_layers={num_layers}: each stage has at least one"]
    listed = f"parallelism.layers_per_stage={counts}"
    found = []
    if len(counts) != num_stages:
        found.append(f"{listed} lists {len(counts)} stages, but {text}")
    if sum(counts) != num_layers:
        found.append(f"{listed} has {sum(counts)} layers, model.num_hidden_layers={num_layers}")
    if min(counts, default=1) < 1:
        found.append(f"{listed}: each stage has at least one layer")
    return found


def stage_flops(config: Config, model: DecoderConfig, layers: int, has_head: bool) -> int:
    """Operations of a stage for one sequence, forward and backward and what is computed again; the embedding
    computes nothing."""
    assert isinstance(config.data, TokenDataConfig)
    length = config.data.sequence_length
    # Passes through a block: forward, twice that in backward, and forward again if nothing was kept. The
    # head always computes its logits again.
    passes = 4 if config.parallelism.checkpointing is Checkpointing.full else 3
    return layers * passes * block_forward_flops(model, length) + has_head * 4 * head_forward_flops(
        model, length
    )


def block_worth(config: Config, model: DecoderConfig) -> float:
    """Time of the head in blocks."""
    return stage_flops(config, model, 0, has_head=True) / stage_flops(config, model, 1, has_head=False)
