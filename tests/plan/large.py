"""The 32B model on 32 cards: the layouts that docs/layout_32b.md weighs, and its table."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

from hpctrain.config.schema import (
    Checkpointing,
    ClusterConfig,
    Config,
    DecoderConfig,
    DecoderFamily,
    Device,
    OptimConfig,
    ParallelismConfig,
    Precision,
    TokenDataConfig,
)
from hpctrain.plan.batch import resolve_batch
from hpctrain.plan.costs import block_parameters
from hpctrain.plan.fit import fit_stages
from hpctrain.plan.layout import Layout
from hpctrain.plan.memory import GIB, RankMemory

SEQUENCE_LENGTH = 4096
GLOBAL_BATCH_SIZE = 64

# https://huggingface.co/Qwen/Qwen2.5-32B-Instruct/blob/main/config.json
QWEN_32B = DecoderConfig(
    family=DecoderFamily.qwen2,
    vocab_size=152064,
    hidden_size=5120,
    intermediate_size=27648,
    num_hidden_layers=64,
    num_attention_heads=40,
    num_key_value_heads=8,
    max_position_embeddings=32768,
    loss_chunk_tokens=1024,
)
# The cut that docs/layout_32b.md chooses.
SIXTEEN = (3, *[4] * 12, 5, 5, 3)
# Of the page's table; its sum is that of the tensors.
COLUMNS = "weights", "gradients", "optimizer", "activations", "working", "gathered", "tensors"
# name: pp, dp_shard, tp, and whether torch's own pipeline stage is used
LAYOUTS: dict[str, tuple[int, int, int, bool]] = {
    "PP8×DP4, torch's stage": (8, 4, 1, True),
    "PP8×DP4": (8, 4, 1, False),
    "PP16×DP2": (16, 2, 1, False),
    "PP16×TP2, torch's stage": (16, 1, 2, True),
    "PP16×TP2": (16, 1, 2, False),
    "PP8×TP2×DP2": (8, 2, 2, False),
    "PP32": (32, 1, 1, False),
    "PP8×TP4": (8, 1, 4, False),
    "PP4×TP8": (4, 1, 8, False),
}


@cache
def fit(
    name: str, sequence_parallel: bool = True, **parallelism: Any
) -> tuple[tuple[int, ...], tuple[RankMemory, ...]]:
    """Layers of each stage of a layout of the table, as the plan cuts them, and memory at each place."""
    pp, dp_shard, tp, _ = LAYOUTS[name]
    config = Config(
        model=QWEN_32B,
        data=TokenDataConfig(sequence_length=SEQUENCE_LENGTH),
        optim=OptimConfig(precision=Precision.bf16),
        cluster=ClusterConfig(hardware="rtx4090", device=Device.cuda),
        parallelism=ParallelismConfig(
            sequence_parallel=sequence_parallel and tp > 1,
            **{"checkpointing": Checkpointing.full, **parallelism},
        ),
    )
    layout = Layout(pp=pp, dp_replicate=1, dp_shard=dp_shard, tp=tp)
    batch, _ = resolve_batch(GLOBAL_BATCH_SIZE, 1, dp_shard)
    assert batch is not None
    stages, memory, _ = fit_stages(config, QWEN_32B, layout, batch)
    return tuple(end - first for first, end in stages), memory


def memory_of(name: str, sequence_parallel: bool = True, **parallelism: Any) -> tuple[RankMemory, ...]:
    """Memory at each place of the pipeline of a layout of the table."""
    pp, dp_shard, tp, whole = LAYOUTS[name]
    _, places = fit(name, sequence_parallel, **parallelism)
    if not whole:
        return places
    # torch's stage switches resharding and reduction off until the last microbatch: the stage's weights stay
    # gathered in bf16 and its gradients whole in fp32, next to one block's in bf16. It also holds a receive
    # buffer for every microbatch, for inputs and for gradients.
    hidden = 2 * SEQUENCE_LENGTH * QWEN_32B.hidden_size // tp
    return tuple(
        dataclasses.replace(
            memory,
            gradients=memory.gradients * dp_shard,
            gathered=memory.weights * dp_shard // 2 + 2 * block_parameters(QWEN_32B) // tp,
            activations=memory.activations
            + ((place > 0) + (place < pp - 1)) * hidden * GLOBAL_BATCH_SIZE // dp_shard,
        )
        for place, memory in enumerate(places)
    )


def table_rows() -> list[str]:
    """First, fullest middle and last place of each layout, GiB."""
    rows = []
    for name, (pp, _, _, _) in LAYOUTS.items():
        layers, places = fit(name)[0], memory_of(name)
        middle = max(range(1, pp - 1), key=lambda rank: places[rank].total)
        for rank in (0, middle, pp - 1):
            memory = places[rank]
            sizes = [getattr(memory, name) for name in COLUMNS]
            cells = " | ".join(f"{size / GIB:.1f}" for size in sizes)
            rows.append(f"| {name} | {rank} | {layers[rank]} | {cells} |")
    return rows
