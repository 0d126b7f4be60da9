"""Layers to pipeline stages: contiguous, by cost or by an explicit list.

A pipeline is as fast as its slowest stage, so the largest cost is made as small as it can be. The head costs
time (1.6 blocks of a 32B model), the embedding only memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from hpctrain.config.schema import Checkpointing, Config, DecoderConfig, ParallelismConfig, TokenDataConfig
from hpctrain.plan.costs import (
    block_forward_flops,
    block_parameters,
    embedding_parameters,
    head_forward_flops,
)

Stages = tuple[tuple[int, int], ...]  # of each stage: its first block, and the one after its last


def cut_stages(
    costs_per_layer: Sequence[int], first_extra: int, last_extra: int, num_stages: int
) -> list[range]:
    """Layers of each stage, so that the largest cost of a stage is minimal and each has a layer.

    Among cuts with the same largest cost, the most even one (smallest sum of squares), then the one with
    fewer layers in early stages, where more microbatches are in flight.

    Args:
        costs_per_layer: in any unit; whole numbers, so that ties are ties.
        first_extra: cost of the embedding, on the first stage.
        last_extra: cost of the head, on the last stage.
        num_stages: between 1 and the number of layers.
    """
    num_layers = len(costs_per_layer)
    assert 1 <= num_stages <= num_layers
    sums = [0, *accumulate(costs_per_layer)]

    def cost(stage: int, first: int, end: int) -> int:
        extra = first_extra * (stage == 0) + last_extra * (stage == num_stages - 1)
        return sums[end] - sums[first] + extra

    def ends(stage: int, first: int) -> range:
        last_end = num_layers - (num_stages - 1 - stage)
        return (
            range(num_layers, num_layers + 1) if stage == num_stages - 1 else range(first + 1, last_end + 1)
        )

    # From the last stage to the first: the best that the stages from here on can reach, by first layer.
    smallest = {num_layers: 0}
    for stage in reversed(range(num_stages)):
        smallest = {
            first: min(max(cost(stage, first, end), smallest[end]) for end in ends(stage, first))
            for first in range(stage, num_layers - (num_stages - 1 - stage))
        }
    limit = smallest[0]
    best: dict[int, tuple[int, tuple[int, ...]]] = {num_layers: (0, ())}
    for stage in reversed(range(num_stages)):
        reached = {}
        for first in range(stage, num_layers - (num_stages - 1 - stage)):
            cuts = [
                (cost(stage, first, end) ** 2 + best[end][0], (end - first, *best[end][1]))
                for end in ends(stage, first)
                if end in best and cost(stage, first, end) <= limit
            ]
            if cuts:
                reached[first] = min(cuts)
        best = reached
    return split_layers(best[0][1])


def split_layers(counts: Sequence[int]) -> list[range]:
    """Numbers of layers as ranges of layers."""
    ends = list(accumulate(counts))
    return [range(end - count, end) for count, end in zip(counts, ends, strict=True)]


def explicit_stages(
    model: DecoderConfig, parallelism: ParallelismConfig, pp: int
) -> tuple[Stages | None, list[str]]:
    """The stages that `parallelism.layers_per_stage` lists, or the findings that say why it cannot be."""
    counts = parallelism.layers_per_stage
    assert counts is not None
    num_stages, num_layers = pp * parallelism.stages_per_rank, model.num_hidden_layers
    found = []
    if len(counts) != num_stages:
        found.append(
            f"parallelism.layers_per_stage={counts} lists {len(counts)} stages, but pp {pp} × "
            f"stages_per_rank {parallelism.stages_per_rank} = {num_stages}"
        )
    if sum(counts) != num_layers:
        found.append(
            f"parallelism.layers_per_stage={counts} has {sum(counts)} layers, "
            f"model.num_hidden_layers={num_layers}"
        )
    if min(counts, default=0) < 1:
        found.append(f"parallelism.layers_per_stage={counts}: each stage has at least one layer")
    if found:
        return None, found
    return tuple((layers.start, layers.stop) for layers in split_layers(counts)), []


def stage_choices(config: Config, model: DecoderConfig, pp: int) -> tuple[list[Stages], list[str]]:
    """Ways to cut the model, best first, or the findings that say why there is none.

    Without an explicit list: the fastest cut, where the embedding costs nothing; then the one that evens out
    the parameters of the stages, for when the first stage would not fit.
    """
    assert isinstance(config.data, TokenDataConfig)
    parallelism, sequence_length = config.parallelism, config.data.sequence_length
    if parallelism.layers_per_stage is not None:
        stages, found = explicit_stages(model, parallelism, pp)
        return ([stages] if stages else []), found
    num_stages, num_layers = pp * parallelism.stages_per_rank, model.num_hidden_layers
    if num_stages > num_layers:
        return [], [
            f"parallelism.pp {pp} × stages_per_rank {parallelism.stages_per_rank} = {num_stages} stages, but "
            f"model.num_hidden_layers={num_layers}: each stage has at least one layer"
        ]
    # Passes through a block: forward, twice that in backward, and forward again if nothing was kept. The
    # head always computes its logits again.
    passes = 4 if parallelism.checkpointing is Checkpointing.full else 3
    block = passes * block_forward_flops(model, sequence_length)
    head = 4 * head_forward_flops(model, sequence_length)
    table = embedding_parameters(model)
    cuts = [
        cut_stages([block] * num_layers, 0, head, num_stages),
        cut_stages([block_parameters(model)] * num_layers, table, table, num_stages),
    ]
    return [tuple((layers.start, layers.stop) for layers in cut) for cut in cuts], []
