"""Device memory of each pipeline rank of a decoder run, in closed form.

How the core stores things is what is summed here: parameters, gradients and optimizer states are fp32 and
sharded over dp_shard and tp; one block at a time is gathered in the compute format; every microbatch's
gradients are reduced block by block, so that no whole gradients stay; backward computes a block's
activations again from its input when checkpointing is full.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from hpctrain.config.schema import Checkpointing, DecoderConfig, OptimizerKind, ParallelismConfig, Precision
from hpctrain.config.schema import OptimConfig as Optim
from hpctrain.plan.batch import BatchPlan
from hpctrain.plan.costs import (
    adapter_parameters,
    block_parameters,
    embedding_parameters,
    head_dim,
    stage_parameters,
)
from hpctrain.plan.layout import Layout

GIB = 2**30
FP32 = 4  # bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Bytes of one pipeline rank at its worst moment."""

    weights: int  #: fp32 shards, which are the master weights
    gradients: int  #: fp32 shards
    optimizer: int  #: AdamW's two moments, SGD's momentum
    activations: int  #: kept for backward, of all microbatches in flight
    working: int  #: of the block (or the head's logits) that is computed at the worst moment
    gathered: int  #: weights, gradients and reduction buffers of that block or table

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What one rank computes on, in numbers that the formulas below share."""

    model: DecoderConfig
    tokens: int  #: of a microbatch
    element: int  #: bytes of a number in the compute format
    tp: int
    token_shards: int  #: ranks that share the tokens between the matrices: tp with sequence parallelism
    dp_shard: int

    @property
    def hidden(self) -> int:
        """Bytes of a microbatch between two blocks."""
        return self.element * self.tokens * self.model.hidden_size // self.token_shards

    @property
    def projected(self) -> int:
        """Bytes of q, k, v and the attention's result."""
        heads = self.model.num_attention_heads + self.model.num_key_value_heads
        return self.element * self.tokens * 2 * heads * head_dim(self.model) // self.tp

    @property
    def intermediate(self) -> int:
        """Bytes of one result as wide as the MLP."""
        return self.element * self.tokens * self.model.intermediate_size // self.tp


def saved_bytes(shape: Shape) -> int:
    """What backward needs of one block when nothing is computed again.

    Hidden-sized: the input, two norm outputs and the residual between attention and MLP; the norms also
    keep their input and its normalised form in fp32. Sequence parallelism keeps the gathered norm outputs.
    The MLP keeps gate, up, silu(gate) and their product.
    """
    norms = 4 * FP32 * shape.hidden // shape.element
    gathered = 2 * shape.hidden * shape.token_shards if shape.token_shards > 1 else 0
    return 4 * shape.hidden + norms + gathered + shape.projected + 4 * shape.intermediate


def kept_bytes(shape: Shape, checkpointing: Checkpointing) -> int:
    """What one block keeps of a microbatch between its forward and its backward."""
    if checkpointing is Checkpointing.full:
        return shape.hidden
    if checkpointing is Checkpointing.selective:
        return 3 * shape.hidden + shape.projected + 2 * shape.intermediate
    return saved_bytes(shape)


def chunks_in_flight(parallelism: ParallelismConfig, pp: int, pp_rank: int, num_microbatches: int) -> int:
    """Largest number of (stage, microbatch) pairs whose backward is still to come on a rank.

    1F1B: Narayanan et al. 2021, section 2.2; interleaved: the warm-up of its figure 4 and the forward
    that follows it.
    """
    schedule, stages = parallelism.schedule.name, parallelism.stages_per_rank
    everything = num_microbatches * stages
    if pp == 1:
        return 1
    if schedule == "gpipe":
        return everything
    if schedule == "1f1b":
        return min(everything, pp - pp_rank)
    rounds = max(1, num_microbatches // pp)
    warm_up = (stages - 1) * (num_microbatches // rounds) + 2 * (pp - 1 - pp_rank)
    return min(everything, warm_up + 1)


def block_moment(shape: Shape, checkpointing: Checkpointing) -> tuple[int, int]:
    """Working and gathered bytes while the backward of a block runs.

    Gathered: its weights and gradients, the next block's weights where they cross the network (FSDP2
    fetches them early), and the fp32 reduction input of the block before.
    """
    block = block_parameters(shape.model) // shape.tp
    copies = 2 if shape.dp_shard > 1 else 1
    gradients = 0 if shape.model.lora.rank else (shape.element + FP32) * block
    backward = 3 * shape.intermediate + shape.hidden * shape.token_shards
    again = 0 if checkpointing is Checkpointing.none else saved_bytes(shape)
    return again + backward, copies * shape.element * block + gradients


def table_moment(shape: Shape) -> int:
    """Gathered bytes of the embedding or the head while its gradient is reduced: fp32 input and output."""
    table = embedding_parameters(shape.model) // shape.tp
    if shape.model.lora.rank:
        return shape.element * table
    return max(2 * shape.element * table, FP32 * table + FP32 * table // shape.dp_shard)


def logits_bytes(shape: Shape) -> int:
    """Logits of one chunk of tokens and their gradient, in the compute format and in fp32."""
    tokens = min(shape.model.loss_chunk_tokens or shape.tokens, shape.tokens)
    return 2 * (shape.element + FP32) * tokens * -(-shape.model.vocab_size // shape.tp)


def rank_memory(
    model: DecoderConfig,
    parallelism: ParallelismConfig,
    optim: Optim,
    layout: Layout,
    batch: BatchPlan,
    sequence_length: int,
    layers_per_stage: tuple[int, ...],
    pp_rank: int,
) -> RankMemory:
    """Memory of the ranks at one place of the pipeline."""
    shape = Shape(
        model=model,
        tokens=batch.microbatch_size * sequence_length,
        element=FP32 if optim.precision is Precision.fp32 else 2,
        tp=layout.tp,
        token_shards=layout.tp if parallelism.sequence_parallel else 1,
        dp_shard=layout.dp_shard,
    )
    layers = layers_per_stage[pp_rank :: layout.pp]
    first, last = pp_rank == 0, pp_rank == layout.pp - 1
    held = stage_parameters(model, sum(layers), first, last) // (layout.dp_shard * layout.tp)
    trained = held
    if model.lora.rank:
        trained = sum(layers) * adapter_parameters(model) // (layout.dp_shard * layout.tp)
    moments = [block_moment(shape, parallelism.checkpointing)]
    if first or last:
        moments.append((logits_bytes(shape) if last else 0, table_moment(shape)))
    working, gathered = max(moments, key=sum)
    if not parallelism.reshard_after_forward:
        gathered += shape.element * held * layout.dp_shard
    in_flight = chunks_in_flight(parallelism, layout.pp, pp_rank, batch.num_microbatches)
    kept = kept_bytes(shape, parallelism.checkpointing) * sum(layers) // len(layers) + shape.hidden
    on_device = 0 if parallelism.offload_optimizer else 1
    states = 2 if optim.kind is OptimizerKind.adamw else 1
    return RankMemory(
        weights=FP32 * held * on_device,
        gradients=FP32 * trained * on_device,
        optimizer=FP32 * trained * states * on_device,
        activations=in_flight * kept,
        working=working,
        gathered=gathered,
    )
