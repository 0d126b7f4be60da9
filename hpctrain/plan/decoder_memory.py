"""Device memory of each pipeline rank of a decoder run, in closed form.

How the core stores things is what is summed here: parameters, gradients and optimizer states are fp32 (frozen
weights as they are computed with) and sharded over dp_shard and tp; a block, the embedding or the head is
gathered in the compute format while it works; every microbatch's gradients are reduced at once, one after the
other, so that no whole gradients stay. `core.trace` runs the real code to check it.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.config.schema import (
    Checkpointing,
    Config,
    DecoderConfig,
    ParallelismConfig,
    Precision,
    TokenDataConfig,
)
from hpctrain.plan.batch import BatchPlan
from hpctrain.plan.costs import (
    adapter_parameters,
    block_parameters,
    embedding_parameters,
    head_dim,
    stage_parameters,
)
from hpctrain.plan.layout import Layout
from hpctrain.plan.memory import FP32, RankMemory, num_moments, with_overheads
from hpctrain.plan.schedule import Actions, Pass, make_schedule
from hpctrain.plan.stages import Stages


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a rank computes on. All sizes are bytes, of one microbatch."""

    model: DecoderConfig
    tokens: int
    masks: int  #: entries of an attention mask
    element: int  #: bytes of a number in the compute format
    tp: int
    token_shards: int  #: ranks that share the tokens between the matrices: tp with sequence parallelism
    dp_shard: int

    @property
    def hidden(self) -> int:
        """What lies between two blocks."""
        return self.element * self.tokens * self.model.hidden_size // self.token_shards

    @property
    def whole_hidden(self) -> int:
        return self.hidden * self.token_shards

    @property
    def heads(self) -> int:
        """One result as wide as the query heads."""
        return self.element * self.tokens * self.model.num_attention_heads * head_dim(self.model) // self.tp

    @property
    def intermediate(self) -> int:
        """One result as wide as the MLP."""
        return self.element * self.tokens * self.model.intermediate_size // self.tp

    @property
    def block(self) -> int:
        """Parameters of a block, a number; over the ranks of tp."""
        return block_parameters(self.model) // self.tp

    @property
    def table(self) -> int:
        """Parameters of the embedding or the head, a number; over the ranks of tp."""
        return embedding_parameters(self.model) // self.tp


def saved_bytes(shape: Shape) -> int:
    """What backward needs of one block when nothing is computed again.

    As wide as the residual stream: the input, both norms' outputs and what lies between attention and MLP;
    sequence parallelism adds the gathered outputs of the norms. As wide as the heads: q, k and v, the latter
    two repeated for each query head, and the result. As wide as the MLP: gate, silu(gate), up, product.
    """
    gathered = 2 * shape.whole_hidden if shape.token_shards > 1 else 0
    return 4 * shape.hidden + gathered + 4 * shape.heads + 4 * shape.intermediate + dropped_bytes(shape)


def dropped_bytes(shape: Shape) -> int:
    """What the dropout of adapters saves: its result for each matrix, and a byte a feature."""
    lora, wide = shape.model.lora, {"o_proj": shape.heads, "down_proj": shape.intermediate}
    if not lora.rank or not lora.dropout:
        return 0
    inputs = sum(wide.get(name, shape.whole_hidden) for name in lora.targets)
    return inputs + inputs // shape.element


def kept_bytes(shape: Shape, checkpointing: Checkpointing) -> int:
    """What one block keeps of a microbatch between its forward and its backward."""
    if checkpointing is Checkpointing.full:
        return shape.hidden
    if checkpointing is Checkpointing.selective:  # the results of the seven matrices and of attention
        return shape.hidden + 2 * shape.whole_hidden + 4 * shape.heads + 2 * shape.intermediate
    return saved_bytes(shape)


def shared_bytes(shape: Shape) -> int:
    """What a stage keeps of a microbatch beside its blocks: its output, the mask, a byte an entry, and the
    rotary cosines and sines in fp32."""
    return shape.hidden + shape.masks + 2 * FP32 * shape.tokens * head_dim(shape.model)


def most_in_flight(actions: Actions, kept: dict[int, int]) -> int:
    """Largest sum of what a rank's stages keep, over the microbatches that are between forward and backward.

    Args:
        actions: of this rank.
        kept: bytes that each of its stages keeps of a microbatch.
    """
    now = most = 0
    for action in actions:
        now += kept[action.stage] if action.kind is Pass.forward else -kept[action.stage]
        most = max(most, now)
    return most


Moment = tuple[int, int, int]  # working and gathered bytes, and those of activations that are gone by then


def block_moments(
    shape: Shape, checkpointing: Checkpointing, weights: int, before: int, gone: int
) -> list[Moment]:
    """The backward of a block, in its MLP and at its end.

    In the MLP all that was computed again is there, and the first matrix's gradient; at the end what the MLP
    saved is gone and all matrices have their gradients.

    Args:
        weights: what is gathered, bytes.
        before: parameters of the unit before, whose gradients' reduction holds its fp32 input until now.
        gone: what that unit kept of the microbatch.
    """
    again = 0 if checkpointing is Checkpointing.none else saved_bytes(shape)
    rest, mlp = max(0, again - 4 * shape.intermediate), 0 if again else 4 * shape.intermediate
    mask = shape.element * shape.masks
    first = shape.element * shape.model.hidden_size * shape.model.intermediate_size // shape.tp
    whole, reduced = shape.element * shape.block, FP32 * before
    if shape.model.lora.rank:
        first = whole = reduced = 0
    return [
        (again + mask + 3 * shape.intermediate + shape.whole_hidden, weights + reduced + first, gone),
        (rest + mask + 4 * shape.heads + shape.whole_hidden, weights + reduced + whole, gone + mlp),
    ]


def kept_logits(shape: Shape) -> int:
    """What the loss keeps of a microbatch from forward to backward, where it is not cut into chunks."""
    if shape.model.loss_chunk_tokens:
        return 0
    return FP32 * shape.tokens * -(-shape.model.vocab_size // shape.tp)


def head_moment(shape: Shape) -> tuple[int, int]:
    """The gradient of the head: a chunk's logits in fp32, unless all are kept, and their gradient; that of
    the matrix, summed in fp32 over chunks, and a chunk's part."""
    chunk = shape.model.loss_chunk_tokens
    tokens = min(chunk or shape.tokens, shape.tokens)
    vocabulary = -(-shape.model.vocab_size // shape.tp)
    logits = ((FP32 if chunk else 0) + shape.element) * tokens * vocabulary
    sums = FP32 if chunk else shape.element
    gradients = 0 if shape.model.lora.rank else (sums + shape.element) * shape.table
    return logits + 2 * shape.whole_hidden, gradients


def worst_moment(
    shape: Shape, parallelism: ParallelismConfig, first: bool, last: bool, blocks: int, one: int
) -> Moment:
    """Working and gathered bytes of a rank when they are most.

    Embedding and head are gathered like a block, in turn. A tied matrix stays gathered for the whole step,
    and the gradient of the head's use of it waits for that of the embedding's.

    Args:
        blocks: of the rank.
        one: what a microbatch keeps on the first stage: gone when the embedding gets its gradient.
    """
    model, checkpointing = shape.model, parallelism.checkpointing
    reshard = parallelism.reshard_after_forward
    tied, trains = model.tie_word_embeddings, not model.lora.rank
    table = 0 if tied or not reshard else shape.element * shape.table
    block = shape.element * shape.block if reshard else 0
    early = shape.dp_shard > 1  # FSDP2 fetches the next unit's weights early where they cross the network
    weights, logits = block + early * max(block, table * first), kept_logits(shape) * last
    head = shape.table * (last and not tied)
    moments = block_moments(shape, checkpointing, weights, before=head, gone=logits)
    if blocks > 1:
        done = logits + kept_bytes(shape, checkpointing)
        moments += block_moments(shape, checkpointing, weights, before=shape.block, gone=done)
    stays = shape.element * shape.table * (2 if last and trains else 1) if tied and (first or last) else 0
    moments = [(working, gathered + stays, gone) for working, gathered, gone in moments]
    if last:
        working, gathered = head_moment(shape)
        moments.append((working, gathered + max(stays, table + early * block), 0))
    if first or last:
        moments += table_moments(shape, table, first, gone=0 if last and not tied else one, one=one)
    return max(moments, key=lambda moment: moment[0] + moment[1] - moment[2])


def table_moments(shape: Shape, weights: int, has_embedding: bool, gone: int, one: int) -> list[Moment]:
    """The gradient of the embedding, and the reduction of a table's gradient: input and output in fp32."""
    if shape.model.lora.rank:
        return [(0, weights, 0)]
    reduction = FP32 * shape.table + FP32 * shape.table // shape.dp_shard
    gradient = weights + shape.element * shape.table + FP32 * shape.block
    return [(0, reduction, gone), (2 * shape.whole_hidden, gradient * has_embedding, one)]


@dataclass(frozen=True)
class MemoryModel:
    """The memory of a run's ranks, by how many blocks their stages have."""

    config: Config
    model: DecoderConfig
    layout: Layout
    shape: Shape
    schedule: tuple[Actions, ...]

    def rank(self, pp_rank: int, layers: dict[int, int]) -> RankMemory:
        """Memory at one place of the pipeline.

        Args:
            layers: number of blocks of each stage that is there.
        """
        shape, parallelism, blocks = self.shape, self.config.parallelism, sum(layers.values())
        first, last = pp_rank == 0, pp_rank == self.layout.pp - 1
        shards = self.layout.dp_shard * self.layout.tp
        held = stage_parameters(self.model, blocks, first, last) // shards
        trained = blocks * adapter_parameters(self.model) // shards if self.model.lora.rank else held
        # Gradients in use and received early, activations received early.
        travelling = (2 * (not last) + (not first)) * shape.hidden
        block = kept_bytes(shape, parallelism.checkpointing)
        kept = {stage: count * block + shared_bytes(shape) for stage, count in layers.items()}
        working, gathered, gone = worst_moment(shape, parallelism, first, last, blocks, one=kept[min(kept)])
        if not parallelism.reshard_after_forward:
            tables = 0 if self.model.tie_word_embeddings else first + last
            gathered += shape.element * (blocks * shape.block + tables * shape.table)
        if self.layout.dp_replicate > 1:  # FSDP2 keeps what was reduced across replicas until backward ends
            gathered += FP32 * trained
        if last:
            kept[max(kept)] += kept_logits(shape)
        weights = FP32 * trained + shape.element * (held - trained)
        states = weights, FP32 * trained, num_moments(self.config.optim) * FP32 * trained
        offloads = parallelism.offload_optimizer
        weights, gradients, optimizer = (0, 0, 0) if offloads else states
        memory = RankMemory(
            weights=weights,
            gradients=gradients,
            optimizer=optimizer,
            activations=most_in_flight(self.schedule[pp_rank], kept) - gone,
            working=working + travelling,
            gathered=gathered,
            host=sum(states) * offloads,
        )
        return with_overheads(memory, self.config, self.layout, neighbours=(not first) + (not last))

    def ranks(self, stages: Stages) -> tuple[RankMemory, ...]:
        """Memory at each place of the pipeline, first to last."""
        counts = {stage: end - first for stage, (first, end) in enumerate(stages)}
        pp = self.layout.pp
        return tuple(
            self.rank(place, {stage: count for stage, count in counts.items() if stage % pp == place})
            for place in range(pp)
        )


def make_memory_model(config: Config, model: DecoderConfig, layout: Layout, batch: BatchPlan) -> MemoryModel:
    """What the memory of a run's ranks depends on, whatever the stages."""
    assert isinstance(config.data, TokenDataConfig)
    parallelism, length = config.parallelism, config.data.sequence_length
    shape = Shape(
        model=model,
        tokens=batch.microbatch_size * length,
        masks=batch.microbatch_size * length**2,
        element=FP32 if config.optim.precision is Precision.fp32 else 2,
        tp=layout.tp,
        token_shards=layout.tp if parallelism.sequence_parallel else 1,
        dp_shard=layout.dp_shard,
    )
    schedule = make_schedule(
        parallelism.schedule, layout.pp, parallelism.stages_per_rank, batch.num_microbatches
    )
    return MemoryModel(config, model, layout, shape, schedule)
