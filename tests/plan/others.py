"""Measurements of llmq, Megatron-LM and tf_cnn_benchmarks, and their predictions.

Sources: github.com/IST-DASLab/llmq (benchmarks/4090x1.md); Korthikanti et al. 2022 (arXiv 2205.05198, table
5, with the layouts of github.com/calculon-ai/calculon, validation/seqsel/tab5); server-gear.com.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.config.hardware import Hardware
from hpctrain.config.schema import (
    Checkpointing,
    ClusterConfig,
    Config,
    DecoderConfig,
    DecoderFamily,
    OptimConfig,
    OptimizerKind,
    ParallelismConfig,
    Precision,
    Schedule,
    TokenDataConfig,
    VisionConfig,
)
from hpctrain.plan.batch import resolve_batch
from hpctrain.plan.compute import Kernels
from hpctrain.plan.layout import Layout
from hpctrain.plan.steptime import StepTime, predict_step


def qwen2_5(hidden: int, inner: int, layers: int, heads: int, keys: int, vocabulary: int) -> DecoderConfig:
    return DecoderConfig(
        family=DecoderFamily.qwen2,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=keys,
        vocab_size=vocabulary,
        tie_word_embeddings=hidden < 3584,
    )


QWEN2_5 = {
    "Qwen2.5-0.5B": qwen2_5(896, 4864, 24, 14, 2, 151936),
    "Qwen2.5-1.5B": qwen2_5(1536, 8960, 28, 12, 2, 151936),
    "Qwen2.5-3B": qwen2_5(2048, 11008, 36, 16, 2, 151936),
    "Qwen2.5-7B": qwen2_5(3584, 18944, 28, 28, 4, 152064),
    "Qwen2.5-14B": qwen2_5(5120, 13824, 48, 40, 8, 152064),
}

# C++ and CUDA: every step between products is one kernel, cuDNN's attention, the loss in one kernel in bf16.
LLMQ = Kernels(
    residual=(7, 9),
    queries=(4, 8),
    keys=(4, 8),
    mlp=(3, 5),
    head_norms=(0, 0),
    logit_bytes=(2, 4),
    chunked_logit_bytes=4,
    gather_bytes=(0, 0),
    reduce_bytes=(4, 0),
    score_bytes=(0, 0),
    whole_square=False,
    repeats_last=False,
    operators=(0, 0),
)

# benchmarks/4090x1.md, bf16, sequences of 1024, 512 of them a step: microbatch, full recomputation, tokens/s
LLMQ_ONE_CARD = {
    "Qwen2.5-0.5B": (16, False, 39854),
    "Qwen2.5-1.5B": (4, False, 14070),
    "Qwen2.5-3B": (4, False, 7004),
    "Qwen2.5-7B": (16, True, 2777),
    "Qwen2.5-14B": (32, True, 1349),
}


def predict_llmq(model: str, hardware: Hardware) -> StepTime:
    size, recomputes, _ = LLMQ_ONE_CARD[model]
    config = Config(
        model=QWEN2_5[model],
        data=TokenDataConfig(sequence_length=1024),
        optim=OptimConfig(precision=Precision.bf16, clip_norm=1.0),
        cluster=ClusterConfig(num_nodes=1, ranks_per_node=1),
        parallelism=ParallelismConfig(checkpointing=Checkpointing.full if recomputes else Checkpointing.none),
    )
    layout = Layout(pp=1, dp_replicate=1, dp_shard=1, tp=1)
    batch, _ = resolve_batch(512, size, 1)
    assert batch is not None
    stages = ((0, QWEN2_5[model].num_hidden_layers),)
    step = predict_step(config, layout, batch, stages, hardware, kernels=LLMQ)
    assert step is not None
    return step


@dataclass(frozen=True)
class GptRun:
    """A row of Korthikanti et al. 2022, table 5, with full recomputation; TP=8, sequences of 2048."""

    hidden: int
    heads: int
    layers: int
    pp: int
    stages_per_rank: int
    microbatch_size: int
    global_batch_size: int
    step_s: float


KORTHIKANTI = {
    "22B": GptRun(6144, 64, 48, 1, 1, 4, 4, 1.42),
    "175B": GptRun(12288, 96, 96, 8, 3, 1, 64, 18.13),
    "530B": GptRun(20480, 128, 105, 35, 3, 1, 280, 49.05),
    "1T": GptRun(25600, 160, 128, 64, 1, 1, 512, 94.42),
}

# Megatron-LM of 2022: attention is written out. Of each score, in fp16: the product, a fused softmax with its
# mask, dropout with its own mask, and the product with the values; in backward the same and their gradients.
MEGATRON_2022 = Kernels(
    residual=(12, 16),
    queries=(3, 6),
    keys=(3, 6),
    mlp=(2, 3),
    head_norms=(0, 0),
    logit_bytes=(38, 14),
    chunked_logit_bytes=14,
    gather_bytes=(0, 0),
    reduce_bytes=(6, 0),
    score_bytes=(13, 15),
    whole_square=True,
    repeats_last=True,
    operators=(0, 0),
)


def predict_gpt(run: GptRun, hardware: Hardware) -> StepTime:
    model = DecoderConfig(
        vocab_size=51200,
        hidden_size=run.hidden,
        intermediate_size=run.hidden * 8 // 3,  # as many operations in three matrices as GPT has in two
        num_hidden_layers=run.layers,
        num_attention_heads=run.heads,
        num_key_value_heads=run.heads,
        tie_word_embeddings=True,
    )
    config = Config(
        model=model,
        data=TokenDataConfig(sequence_length=2048),
        optim=OptimConfig(precision=Precision.fp16, clip_norm=1.0),
        cluster=ClusterConfig(num_nodes=run.pp, ranks_per_node=8),
        parallelism=ParallelismConfig(
            checkpointing=Checkpointing.full,
            schedule=Schedule["interleaved_1f1b" if run.stages_per_rank > 1 else "1f1b"],
            stages_per_rank=run.stages_per_rank,
        ),
    )
    layout = Layout(pp=run.pp, dp_replicate=1, dp_shard=1, tp=8)
    batch, _ = resolve_batch(run.global_batch_size, run.microbatch_size, 1)
    assert batch is not None
    count = run.layers // (run.pp * run.stages_per_rank)
    stages = tuple((first, first + count) for first in range(0, run.layers, count))
    step = predict_step(config, layout, batch, stages, hardware, kernels=MEGATRON_2022)
    assert step is not None
    return step


# server-gear.com, tf_cnn_benchmarks, ResNet-50, fp16: images/s by images a card and number of cards
RESNET50 = {
    "rtx4090": {
        64: {1: 1688.03, 2: 2794.01, 4: 4233.10},
        128: {1: 1748.98, 2: 3145.92, 4: 5548.25},
        256: {1: 1776.41, 2: 3357.26, 4: 6142.79},
        512: {1: 1760.89, 2: 3408.95, 4: 6582.35},
    },
    "rtx3090": {
        64: {1: 1026.83, 2: 1828.21, 4: 2798.55, 8: 4039.44},
        128: {1: 1126.66, 2: 2103.69, 4: 3596.61, 8: 6005.06},
        256: {1: 1181.90, 2: 2283.06, 4: 4266.43, 8: 7362.66},
        512: {1: 1205.02, 2: 2371.21, 4: 4635.48, 8: 8756.00},
    },
}


def predict_resnet50(images: int, cards: int, hardware: Hardware) -> float:
    """Images a second."""
    config = Config(
        model=VisionConfig(backbone="resnet50"),
        optim=OptimConfig(precision=Precision.bf16, kind=OptimizerKind.sgd),
        cluster=ClusterConfig(num_nodes=1, ranks_per_node=cards),
    )
    layout = Layout(pp=1, dp_replicate=cards, dp_shard=1, tp=1)
    batch, _ = resolve_batch(images * cards, None, cards)
    assert batch is not None
    step = predict_step(config, layout, batch, (), hardware)
    assert step is not None
    return images * cards / step.seconds
