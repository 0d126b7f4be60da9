"""What may be combined for decoders.

Not offered: zero-bubble schedules (backward in two parts). With each block sharded by itself they give wrong
gradients without an error, and they gain nothing where backward begins by computing a block again.
Free of each other, so without a line here: dp_replicate, dp_shard, tp and pp; checkpointing; compile; tied
weights; LoRA; the optimizer; offload. The parity tests draw from all of it.
"""

from __future__ import annotations

from hpctrain.config.rope import rope_findings
from hpctrain.config.schema import (
    Config,
    DecoderConfig,
    DecoderFamily,
    Device,
    GradientCompression,
    OptimizerKind,
    Precision,
    Schedule,
    TokenDataConfig,
)
from hpctrain.plan.batch import BatchPlan
from hpctrain.plan.costs import block_linears, head_dim
from hpctrain.plan.layout import Layout

INTERLEAVED = Schedule["interleaved_1f1b"]


def size_findings(model: DecoderConfig) -> list[str]:
    """Sizes that make no decoder at all; nothing else can be computed from them."""
    names = (
        "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads "
        "max_position_embeddings rms_norm_eps rope_theta initializer_range"
    )
    sizes = {name: getattr(model, name) for name in names.split()}
    sizes |= {
        name: value for name in ("head_dim", "sliding_window") if (value := getattr(model, name)) is not None
    }
    return [f"model.{name}={value}: must be positive" for name, value in sizes.items() if value <= 0]


def can_be_cut(config: Config, model: DecoderConfig) -> bool:
    """Whether the numbers that stages are made from can be computed with."""
    return (
        not size_findings(model)
        and config.parallelism.stages_per_rank > 0
        and isinstance(config.data, TokenDataConfig)
    )


def model_findings(model: DecoderConfig) -> list[str]:
    """Settings that exclude each other within a decoder, or that its family does not have."""
    family, heads, keys = model.family, model.num_attention_heads, model.num_key_value_heads
    found = []
    if heads % keys:
        found.append(f"model.num_attention_heads={heads}: no multiple of num_key_value_heads={keys}")
    if model.head_dim is None and model.hidden_size % heads:
        found.append(
            f"model.hidden_size={model.hidden_size}: no multiple of num_attention_heads={heads}; "
            "or set model.head_dim"
        )
    elif head_dim(model) % 2:
        found.append(f"model.head_dim={head_dim(model)}: rotary positions need pairs, so an even number")
    if family is DecoderFamily.llama and model.sliding_window is not None:
        found.append(f"model.sliding_window={model.sliding_window}: llama has none; use null")
    if family in (DecoderFamily.llama, DecoderFamily.mistral) and model.max_window_layers:
        found.append(f"model.max_window_layers={model.max_window_layers}: {family.name} has none; use 0")
    if family is DecoderFamily.mistral and model.attention_bias:
        found.append("model.attention_bias=true: mistral has none; use false")
    if not 0 <= model.residual_dropout < 1:
        found.append(f"model.residual_dropout={model.residual_dropout}: at least 0, below 1")
    if model.loss_chunk_tokens < 0:
        found.append(f"model.loss_chunk_tokens={model.loss_chunk_tokens}: must not be negative; 0 for all")
    return found + rope_findings(model.rope_scaling) + _lora_findings(model)


def _lora_findings(model: DecoderConfig) -> list[str]:
    lora, found = model.lora, []
    if lora.rank < 0:
        found.append(f"model.lora.rank={lora.rank}: must not be negative; 0 trains the whole model")
    if lora.alpha <= 0:
        found.append(f"model.lora.alpha={lora.alpha}: must be positive")
    if not 0 <= lora.dropout < 1:
        found.append(f"model.lora.dropout={lora.dropout}: at least 0, below 1")
    known = [linear.name for linear in block_linears(model)]
    if unknown := [name for name in lora.targets if name not in known]:
        found.append(f"model.lora.targets={unknown}: the linear layers of a block are {', '.join(known)}")
    if lora.rank > 0 and not lora.targets:
        found.append("model.lora.targets=[]: with a rank above 0 some layer has to carry an adapter")
    return found


def choice_findings(config: Config, model: DecoderConfig) -> list[str]:
    """Choices outside the model that a decoder excludes, whatever the layout."""
    optim, parallelism, found = config.optim, config.parallelism, []
    if optim.ema_decay is not None:
        found.append(
            f"optim.ema_decay={optim.ema_decay}: averaged weights are kept for vision models only; use null"
        )
    if optim.gradient_compression is not GradientCompression.none:
        found.append(
            f"optim.gradient_compression={optim.gradient_compression.name}: a decoder's gradients are "
            "reduced in fp32; use none"
        )
    if optim.precision is Precision.fp16 and config.cluster.device is Device.cpu:
        found.append("optim.precision=fp16 on the CPU would be slower than fp32 and prove nothing; use fp32")
    if optim.precision is Precision.fp16:
        # A step that overflowed is skipped inside the fused kernel, which has to be there, beside the scale.
        if optim.kind is not OptimizerKind.adamw:
            found.append(
                f"optim.kind={optim.kind.name} with optim.precision=fp16: only adamw skips overflows"
            )
        if parallelism.offload_optimizer:
            found.append("parallelism.offload_optimizer=true with optim.precision=fp16: use bf16")
    if parallelism.stages_per_rank < 1:
        found.append(f"parallelism.stages_per_rank={parallelism.stages_per_rank}: at least 1")
    interleaved = parallelism.schedule is INTERLEAVED
    if parallelism.stages_per_rank > 1 and not interleaved:
        found.append(
            f"parallelism.stages_per_rank={parallelism.stages_per_rank} with parallelism.schedule="
            f"{parallelism.schedule.name}: only interleaved_1f1b has several stages on a rank"
        )
    if interleaved and parallelism.stages_per_rank == 1:
        found.append(
            "parallelism.schedule=interleaved_1f1b with parallelism.stages_per_rank=1: nothing to "
            "interleave; set stages_per_rank to 2 or more, or use 1f1b"
        )
    if isinstance(config.data, TokenDataConfig):
        length, most = config.data.sequence_length, model.max_position_embeddings
        if length > most:
            found.append(
                f"data.sequence_length={length}: model.max_position_embeddings={most} is the longest text "
                "that the model knows; shorten it, or stretch positions with model.rope_scaling and raise it"
            )
    return found


def decoder_layout_findings(config: Config, model: DecoderConfig, layout: Layout) -> list[str]:
    """What a decoder cannot do in this layout."""
    found, tp, parallelism = [], layout.tp, config.parallelism
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        if (size := getattr(model, name)) % tp:
            found.append(f"parallelism.tp={tp} does not divide model.{name}={size}")
    if -(-model.vocab_size // tp) * (tp - 1) >= model.vocab_size:
        found.append(f"model.vocab_size={model.vocab_size}: parallelism.tp={tp} leaves a rank without a row")
    if parallelism.sequence_parallel and tp == 1:
        found.append("parallelism.sequence_parallel=true with tp=1: there is nobody to share tokens with")
    if parallelism.sequence_parallel and isinstance(config.data, TokenDataConfig):
        length = config.data.sequence_length
        if length % tp:
            found.append(
                f"data.sequence_length={length}: parallelism.tp={tp} does not divide it, and with "
                "sequence_parallel each rank has the same number of tokens"
            )
    if layout.pp == 1 and parallelism.stages_per_rank > 1:
        found.append(
            f"parallelism.stages_per_rank={parallelism.stages_per_rank} with pp=1: there is no "
            "pipeline; use 1"
        )
    return found


def batch_findings(config: Config, layout: Layout, batch: BatchPlan) -> list[str]:
    """Numbers of microbatches that a schedule cannot use."""
    count = batch.num_microbatches
    if config.parallelism.schedule is INTERLEAVED and count % layout.pp:
        return [
            f"parallelism.schedule=interleaved_1f1b takes microbatches in groups of pp {layout.pp}, but a "
            f"data-parallel rank has {count} of them in a step; change optim.global_batch_size or "
            "parallelism.microbatch_size, or use 1f1b"
        ]
    return []
