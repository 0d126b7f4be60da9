"""RoundPipe's measurements of Megatron, FSDP and single blocks on 8 cards of a node, and their predictions.

Source: github.com/ITcarrot/RoundPipe-artifact (exp/raw-data.csv, megatron/, fsdp/, pp-simulate/,
roundpipe-timing/), sequences of 2,048 tokens, fp16, full recomputation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hpctrain.config.hardware import Hardware
from hpctrain.config.schema import (
    Checkpointing,
    ClusterConfig,
    Config,
    DecoderConfig,
    DecoderFamily,
    OptimConfig,
    ParallelismConfig,
    Precision,
    Schedule,
    TokenDataConfig,
)
from hpctrain.plan.batch import resolve_batch
from hpctrain.plan.compute import Kernels, Work, block_passes, head_passes
from hpctrain.plan.costs import stage_parameters
from hpctrain.plan.decoder_memory import make_memory_model
from hpctrain.plan.layout import Layout
from hpctrain.plan.steptime import StepTime, predict_step, product_flops

LENGTH = 2048
HALF = OptimConfig(precision=Precision.fp16, fp16_accumulation=True, clip_norm=1.0)

QWEN3_1_7B = DecoderConfig(
    family=DecoderFamily.qwen3,
    vocab_size=151936,
    hidden_size=2048,
    intermediate_size=6144,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    tie_word_embeddings=True,
)
LLAMA_8B = DecoderConfig(
    family=DecoderFamily.llama,
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
)
QWEN3_32B = DecoderConfig(
    family=DecoderFamily.qwen3,
    vocab_size=151936,
    hidden_size=5120,
    intermediate_size=25600,
    num_hidden_layers=64,
    num_attention_heads=64,
    num_key_value_heads=8,
    head_dim=128,
)
MODELS = {"Qwen3-1.7B": QWEN3_1_7B, "Llama-3.1-8B": LLAMA_8B, "Qwen3-32B": QWEN3_32B}

# Megatron-core with Transformer Engine (NeMo 25.11): norms, rotation, SwiGLU and additions to the residual
# stream are one kernel each, q, k and v one product, the gradient of weights is summed in fp32 by the product
# itself; weights are stored in fp16. Its loss is that of vocab_parallel_cross_entropy, in fp32.
MEGATRON = Kernels(
    residual=(10, 12),
    queries=(5, 9),
    keys=(6, 9),
    mlp=(3, 5),
    head_norms=(2, 3),
    logit_bytes=(38, 14),
    chunked_logit_bytes=14,
    gather_bytes=(0, 0),
    reduce_bytes=(6, 0),
    score_bytes=(0, 0),
    whole_square=False,
    repeats_last=True,
    operators=(0, 0),
)


@dataclass(frozen=True)
class MegatronRun:
    """A row of RoundPipe's table for Megatron on 8 cards of a node."""

    model: str
    pp: int
    tp: int
    microbatch_size: int
    global_batch_size: int
    tokens_per_s: float | None  #: None: out of memory

    @property
    def step_s(self) -> float:
        assert self.tokens_per_s is not None
        return self.global_batch_size * LENGTH / self.tokens_per_s


# exp/raw-data.csv; batches from megatron/run.sh
RTX4090 = [
    MegatronRun("Qwen3-1.7B", 8, 1, 4, 512, 39081.21),
    MegatronRun("Qwen3-1.7B", 1, 8, 16, 512, 2132.1),
    MegatronRun("Llama-3.1-8B", 8, 1, 2, 256, 16412.18),
    MegatronRun("Llama-3.1-8B", 1, 8, 8, 256, 920.81),
    MegatronRun("Qwen3-32B", 8, 1, 1, 128, None),
    MegatronRun("Qwen3-32B", 1, 8, 1, 128, None),
]
A800 = [
    MegatronRun("Qwen3-1.7B", 8, 1, 16, 512, 52356.8),
    MegatronRun("Qwen3-1.7B", 1, 8, 64, 512, 48546.63),
    MegatronRun("Llama-3.1-8B", 8, 1, 16, 256, 23672.01),
    MegatronRun("Llama-3.1-8B", 1, 8, 32, 256, 17939.76),
    MegatronRun("Qwen3-32B", 8, 1, 1, 8, None),
    MegatronRun("Qwen3-32B", 1, 8, 2, 128, 4276.46),
]


def megatron_stages(num_layers: int, pp: int) -> tuple[tuple[int, int], ...]:
    """As megatron/train.py cuts: what pp does not divide goes off the first and the last stage."""
    middle = -(-num_layers // pp)
    counts = [middle] * pp
    if num_layers % pp:
        rest = num_layers - (pp - 2) * middle
        counts[0], counts[-1] = rest // 2, rest - rest // 2
    ends = [sum(counts[: index + 1]) for index in range(pp)]
    return tuple((end - count, end) for end, count in zip(ends, counts, strict=True))


def megatron_config(run: MegatronRun) -> Config:
    return Config(
        model=MODELS[run.model],
        data=TokenDataConfig(sequence_length=LENGTH),
        optim=HALF,
        cluster=ClusterConfig(num_nodes=1, ranks_per_node=8),
        parallelism=ParallelismConfig(
            checkpointing=Checkpointing.full, schedule=Schedule["1f1b"], microbatch_size=run.microbatch_size
        ),
    )


def predict_megatron(run: MegatronRun, hardware: Hardware) -> StepTime:
    layout = Layout(pp=run.pp, dp_replicate=1, dp_shard=1, tp=run.tp)
    batch, _ = resolve_batch(run.global_batch_size, run.microbatch_size, 1)
    assert batch is not None
    stages = megatron_stages(MODELS[run.model].num_hidden_layers, run.pp)
    step = predict_step(megatron_config(run), layout, batch, stages, hardware, kernels=MEGATRON)
    assert step is not None
    return step


# transformers' models with flash-attention (RoundPipe's own runs): a norm in fp32 is six kernels, a rotation
# four, SwiGLU two. The loss is compiled, over chunks that stay in the cache.
HUGGING_FACE = Kernels(
    residual=(42, 87),
    queries=(12, 19),
    keys=(12, 19),
    mlp=(5, 9),
    head_norms=(18, 36),
    logit_bytes=(0, 0),
    chunked_logit_bytes=0,
    gather_bytes=(6, 0),
    reduce_bytes=(12, 0),
    reduce_element=2,
    reduces_once=True,
    score_bytes=(0, 0),
    whole_square=False,
    repeats_last=True,
    operators=(0, 0),
)

# pp-simulate/run.sh: ms for a block and for the head, forward and backward; of 4 sequences, as
# roundpipe-timing/run.sh divides its batches.
LAYERS_MS = {
    ("Qwen3-1.7B", "block"): (7.429, 15.831),
    ("Qwen3-1.7B", "head"): (22.0655, 43.707),
    ("Llama-3.1-8B", "block"): (18.50370313, 41.20659375),
    ("Llama-3.1-8B", "head"): (37.2255, 74.501),
    ("Qwen3-32B", "block"): (40.5610625, 91.17429688),
    ("Qwen3-32B", "head"): (54.928, 108.294),
}


def predict_layer_ms(model: str, part: str, hardware: Hardware) -> tuple[float, float]:
    work = Work(
        model=MODELS[model],
        tokens=4 * LENGTH,
        length=LENGTH,
        tp=1,
        token_shards=1,
        element=2,
        product_flops=product_flops(hardware, HALF, hardware["fp16_accumulation_tflops"]),
        hardware=hardware,
        kernels=HUGGING_FACE,
    )
    passes = head_passes(work) if part == "head" else block_passes(work, Checkpointing.none)
    return 1e3 * passes.forward, 1e3 * passes.backward


@dataclass(frozen=True)
class FsdpRun:
    """A row of RoundPipe's table for FSDP ZeRO-3 on 8 cards of a node, without offload (its longest sequences
    are those of that command): sequences of a microbatch of each rank, and microbatches."""

    model: str
    microbatch_size: int
    num_microbatches: int
    tokens_per_s: float

    @property
    def step_s(self) -> float:
        return 8 * self.microbatch_size * self.num_microbatches * LENGTH / self.tokens_per_s


# exp/raw-data.csv; batches from fsdp/run.sh
FSDP_RTX4090 = [FsdpRun("Qwen3-1.7B", 2, 32, 13277.07), FsdpRun("Llama-3.1-8B", 2, 1, 1923.77)]
FSDP_A800 = [
    FsdpRun("Qwen3-1.7B", 16, 4, 85829.26),
    FsdpRun("Llama-3.1-8B", 8, 4, 29148.46),
    FsdpRun("Qwen3-32B", 2, 1, 3454.77),
]


def predict_fsdp(run: FsdpRun, hardware: Hardware) -> StepTime:
    model = MODELS[run.model]
    config = Config(
        model=model,
        data=TokenDataConfig(sequence_length=LENGTH),
        optim=replace(HALF, clip_norm=None),
        cluster=ClusterConfig(num_nodes=1, ranks_per_node=8),
        parallelism=ParallelismConfig(checkpointing=Checkpointing.full),
    )
    layout = Layout(pp=1, dp_replicate=1, dp_shard=8, tp=1)
    batch, _ = resolve_batch(8 * run.microbatch_size * run.num_microbatches, run.microbatch_size, 8)
    assert batch is not None
    stages = ((0, model.num_hidden_layers),)
    step = predict_step(config, layout, batch, stages, hardware, kernels=HUGGING_FACE)
    assert step is not None
    return step


# megatron/train.py leaves OptimizerConfig.fp16 unset, and NeMo's strategy tells the precision to the model's
# config alone: weights in fp16, sums of gradients and two moments in fp32, no fp32 weights.
BYTES_A_PARAMETER = 14


def megatron_bytes(run: MegatronRun, length: int = LENGTH, microbatch_size: int | None = None) -> int:
    """Memory of the fullest card: as ours, but for the bytes of a parameter, and without gathered weights and
    masks of documents."""
    model, size = MODELS[run.model], microbatch_size or run.microbatch_size
    config = replace(megatron_config(run), data=TokenDataConfig(sequence_length=length))
    layout = Layout(pp=run.pp, dp_replicate=1, dp_shard=1, tp=run.tp)
    batch, _ = resolve_batch(max(run.pp, run.global_batch_size // size) * size, size, 1)
    assert batch is not None
    memory_model = make_memory_model(config, model, layout, batch)
    memory_model = replace(memory_model, shape=replace(memory_model.shape, masks=0))
    worst, stages = 0, megatron_stages(model.num_hidden_layers, run.pp)
    for place, (first, end) in enumerate(stages):
        held = stage_parameters(model, end - first, place == 0, place == run.pp - 1) // run.tp
        memory = memory_model.rank(place, {place: end - first})
        worst = max(worst, BYTES_A_PARAMETER * held + memory.activations + memory.working)
    return worst


def longest_sequence(run: MegatronRun, hardware: Hardware) -> int:
    """The most thousands (1,024) of tokens of a sequence, one in a microbatch, that the model of memory lets
    pass."""
    usable = hardware["usable_gib"] * 2**30
    fits, beyond = 0, 512
    while beyond - fits > 1:
        middle = (fits + beyond) // 2
        within = megatron_bytes(run, 1024 * middle, 1) <= usable
        fits, beyond = (middle, beyond) if within else (fits, middle)
    return fits
