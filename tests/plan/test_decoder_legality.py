"""Legality of decoder runs: each refusal with its words, each legal corner, and the table as a whole."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest

from hpctrain.config.schema import (
    Checkpointing,
    ClusterConfig,
    ClusterKind,
    Config,
    DecoderConfig,
    DecoderFamily,
    Device,
    GpuRequest,
    GradientCompression,
    ImageDataConfig,
    LoraConfig,
    OptimConfig,
    OptimizerKind,
    ParallelismConfig,
    Precision,
    Schedule,
    TokenDataConfig,
    VisionConfig,
)
from hpctrain.errors import PlanError
from hpctrain.plan.batch import BatchPlan
from hpctrain.plan.decoder_legality import batch_findings
from hpctrain.plan.layout import AXES, Layout
from hpctrain.plan.plan import RunPlan, make_plan
from hpctrain.plan.schedule import make_schedule, simulate
from tests.helpers.cells import CHOICES, all_cells, degrees, draw_legal_cell, is_legal, with_cell
from tests.plan.large import QWEN_32B, SIXTEEN
from tests.plan.test_plan import changed

INTERLEAVED = Schedule["interleaved_1f1b"]


def tiny() -> DecoderConfig:
    return DecoderConfig(
        family=DecoderFamily.qwen3,
        vocab_size=33,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        max_position_embeddings=32,
    )


def decoder(ranks: int = 1, **values: Any) -> Config:
    """Four sequences of 16 tokens a step on local ranks, with dotted keys changed."""
    base = {
        "model": tiny(),
        "data": TokenDataConfig(sequence_length=16),
        "optim": OptimConfig(global_batch_size=4),
        "parallelism": ParallelismConfig(microbatch_size=1),
        "cluster": ClusterConfig(ranks_per_node=ranks),
    }
    return changed(**{**base, **values})


def findings(config: Config) -> str:
    with pytest.raises(PlanError) as refusal:
        make_plan(config)
    return str(refusal.value)


REFUSED: list[tuple[int, dict[str, Any], str]] = [
    # sizes
    (1, {"model__vocab_size": 0}, "model.vocab_size=0: must be positive"),
    (1, {"model__num_hidden_layers": 0}, "model.num_hidden_layers=0"),
    (1, {"model__num_attention_heads": 0}, "model.num_attention_heads=0"),
    (1, {"model__head_dim": 0}, "model.head_dim=0"),
    (1, {"model__sliding_window": 0}, "model.sliding_window=0"),
    (1, {"model__rms_norm_eps": 0.0}, "model.rms_norm_eps=0.0"),
    (1, {"data__sequence_length": 0}, "data.sequence_length=0"),
    (1, {"data__synthetic_documents": -1}, "data.synthetic_documents=-1"),
    # the model itself
    (1, {"model__num_key_value_heads": 3}, "num_attention_heads=4: no multiple of num_key_value_heads=3"),
    (1, {"model__hidden_size": 18, "model__head_dim": None}, "model.hidden_size=18: no multiple"),
    (1, {"model__head_dim": 3}, "model.head_dim=3: rotary positions need pairs"),
    (1, {"model__family": DecoderFamily.llama, "model__sliding_window": 8}, "llama has none"),
    (1, {"model__family": DecoderFamily.mistral, "model__max_window_layers": 2}, "mistral has none; use 0"),
    (1, {"model__family": DecoderFamily.mistral, "model__attention_bias": True}, "mistral has none; use f"),
    (1, {"model__residual_dropout": 1.0}, "model.residual_dropout=1.0"),
    (1, {"model__residual_dropout": -0.1}, "model.residual_dropout=-0.1"),
    (1, {"model__loss_chunk_tokens": -1}, "model.loss_chunk_tokens=-1"),
    (1, {"model__lora__rank": -1}, "model.lora.rank=-1"),
    (1, {"model__lora__alpha": 0.0}, "model.lora.alpha=0.0"),
    (1, {"model__lora__dropout": 1.0}, "model.lora.dropout=1.0"),
    (1, {"model__lora__targets": ["q_proj", "lm_head"]}, "model.lora.targets=['lm_head']"),
    (1, {"model__lora": LoraConfig(rank=2, targets=[])}, "model.lora.targets=[]"),
    # choices
    (1, {"data__sequence_length": 33}, "model.max_position_embeddings=32 is the longest"),
    (1, {"data": ImageDataConfig(root="x")}, "data.kind=images with model.kind=decoder: it reads tokens"),
    (1, {"model": VisionConfig()}, "data.kind=tokens with model.kind=vision: it reads images"),
    (1, {"optim__ema_decay": 0.9}, "optim.ema_decay=0.9: averaged weights"),
    (
        2,
        {"optim__gradient_compression": GradientCompression.bf16},
        "a decoder's gradients are reduced in fp32",
    ),
    (1, {"optim__precision": Precision.fp16}, "optim.precision=fp16 on the CPU"),
    (1, {"optim__precision": Precision.bf16}, "optim.precision=bf16 on the CPU"),
    (4, {"parallelism__tp": 4, "model__vocab_size": 9}, "parallelism.tp=4 leaves a rank without a row"),
    (1, {"optim__fp16_accumulation": True}, "optim.fp16_accumulation=true with optim.precision=fp32"),
    # pipeline
    (
        2,
        {"parallelism__pp": 2, "parallelism__stages_per_rank": 0},
        "parallelism.stages_per_rank=0: at least 1",
    ),
    (
        2,
        {"parallelism__pp": 2, "parallelism__stages_per_rank": 2},
        "only interleaved_1f1b has several stages on a rank",
    ),
    (2, {"parallelism__pp": 2, "parallelism__schedule": INTERLEAVED}, "nothing to interleave"),
    (
        1,
        {"parallelism__schedule": INTERLEAVED, "parallelism__stages_per_rank": 2},
        "stages_per_rank=2 with pp=1: there is no pipeline",
    ),
    (
        2,
        {
            "parallelism__pp": 2,
            "parallelism__schedule": INTERLEAVED,
            "parallelism__stages_per_rank": 2,
            "optim__global_batch_size": 3,
        },
        "takes microbatches in groups of pp 2, but a data-parallel rank has 3",
    ),
    (6, {"parallelism__pp": 6}, "= 6 stages, but model.num_hidden_layers=5"),
    (2, {"parallelism__pp": 2, "parallelism__layers_per_stage": [5, 0]}, "at least one layer"),
    (2, {"parallelism__pp": 2, "parallelism__layers_per_stage": [2, 2]}, "has 4 layers"),
    (2, {"parallelism__pp": 2, "parallelism__layers_per_stage": [5]}, "lists 1 stages"),
    (2, {"parallelism__pp": 2, "parallelism__microbatch_size": 3}, "parallelism.microbatch_size=3 does not"),
    # tensor parallel
    (4, {"parallelism__tp": 4}, "parallelism.tp=4 does not divide model.num_key_value_heads=2"),
    (3, {"parallelism__tp": 3}, "parallelism.tp=3 does not divide model.num_attention_heads=4"),
    (2, {"parallelism__tp": 2, "model__intermediate_size": 25}, "does not divide model.intermediate_size=25"),
    (1, {"parallelism__sequence_parallel": True}, "sequence_parallel=true with tp=1"),
    (
        2,
        {"parallelism__tp": 2, "parallelism__sequence_parallel": True, "data__sequence_length": 15},
        "data.sequence_length=15: parallelism.tp=2 does not divide it",
    ),
]


@pytest.mark.parametrize(("ranks", "values", "words"), REFUSED, ids=lambda value: str(value)[:60])
def test_what_a_decoder_cannot_do_is_refused(ranks: int, values: dict[str, Any], words: str) -> None:
    assert words in findings(decoder(ranks, **values))


LEGAL: list[tuple[int, dict[str, Any]]] = [
    (1, {}),
    (4, {"parallelism__dp_shard": 4}),
    (4, {"parallelism__dp_shard": 2}),  # replicas of shards
    (4, {"parallelism__pp": 4, "parallelism__schedule": Schedule["gpipe"]}),
    (5, {"parallelism__pp": 5}),  # one layer a stage, and fewer microbatches than stages
    (
        2,
        {"parallelism__pp": 2, "parallelism__schedule": INTERLEAVED, "parallelism__stages_per_rank": 2},
    ),
    (2, {"parallelism__pp": 2, "parallelism__layers_per_stage": [1, 4]}),
    (2, {"parallelism__tp": 2}),  # 33 words of vocabulary over two ranks
    (2, {"parallelism__tp": 2, "parallelism__sequence_parallel": True}),
    (2, {"parallelism__tp": 2, "data__sequence_length": 15}),
    (8, {"parallelism__tp": 2, "parallelism__pp": 2, "parallelism__dp_shard": 2}),
    (2, {"parallelism__dp_shard": 2, "parallelism__reshard_after_forward": False}),
    (2, {"parallelism__dp_shard": 2, "parallelism__offload_optimizer": True}),
    (1, {"parallelism__checkpointing": Checkpointing.full}),
    (1, {"parallelism__checkpointing": Checkpointing.selective, "parallelism__compile": True}),
    (2, {"model__tie_word_embeddings": True, "model__lora__rank": 4, "parallelism__pp": 2}),
    (1, {"optim__kind": OptimizerKind.sgd}),
    (1, {"data__sequence_length": 32}),
    (1, {"parallelism__microbatch_size": None}),
    (1, {"model__family": DecoderFamily.mistral, "model__sliding_window": 8}),
]


@pytest.mark.parametrize(("ranks", "values"), LEGAL, ids=lambda value: str(value)[:60])
def test_legal_corners(ranks: int, values: dict[str, Any]) -> None:
    plan = make_plan(decoder(ranks, **values))
    assert plan.world_size == ranks
    assert sum(end - first for first, end in plan.stages) == 5
    assert len(plan.stages) == plan.layout.pp * values.get("parallelism__stages_per_rank", 1)


def test_interleaved_microbatches_come_in_whole_groups_because_others_may_block() -> None:
    """Every number that is let through runs to its end; ten over eight ranks, which is refused, would not."""
    config = decoder(parallelism__schedule=INTERLEAVED, parallelism__stages_per_rank=2)
    for pp, count in itertools.product((2, 3, 4, 8), range(1, 25)):
        batch = BatchPlan(global_batch_size=count, microbatch_size=1, num_microbatches=count)
        layout = Layout(pp=pp, dp_replicate=1, dp_shard=1, tp=1)
        assert bool(batch_findings(config, layout, batch)) == (count % pp != 0)
        if count % pp == 0:
            simulate(make_schedule(INTERLEAVED, pp, 2, count), [1.0] * 2 * pp, [2.0] * 2 * pp)
    with pytest.raises(ValueError, match="blocks itself"):
        simulate(make_schedule(INTERLEAVED, 8, 2, 10), [1.0] * 16, [2.0] * 16)


def on_gpus(model: DecoderConfig, nodes: int = 4, **values: Any) -> Config:
    cluster = ClusterConfig(kind=ClusterKind.slurm, device=Device.cuda, hardware="rtx4090", num_nodes=nodes)
    cluster.ranks_per_node, cluster.gpu_request = 8, GpuRequest.gres
    return changed(
        model=model,
        cluster=cluster,
        data=TokenDataConfig(sequence_length=4096),
        optim=OptimConfig(global_batch_size=64, precision=Precision.bf16),
        parallelism=ParallelismConfig(microbatch_size=1, checkpointing=Checkpointing.full),
        **values,
    )


@pytest.mark.parametrize("accumulation", [False, True])
def test_fp16_is_legal_on_gpus(accumulation: bool) -> None:
    model = tiny()
    model.max_position_embeddings = 4096
    config = on_gpus(model, optim__precision=Precision.fp16, optim__fp16_accumulation=accumulation)
    assert make_plan(config).layout.dp_replicate == 32


@pytest.mark.parametrize(
    "values", [{"optim__kind": OptimizerKind.sgd}, {"parallelism__offload_optimizer": True}], ids=str
)
def test_fp16_needs_a_kernel_that_skips_overflows(values: dict[str, Any]) -> None:
    model = tiny()
    model.max_position_embeddings = 4096
    config = on_gpus(model, optim__precision=Precision.fp16)
    for key, value in values.items():
        setattr(getattr(config, key.split("__")[0]), key.split("__")[1], value)
    with pytest.raises(PlanError, match=r"optim\.precision=fp16"):
        make_plan(config)


@pytest.mark.parametrize(
    "values",
    [
        {"optim__precision": Precision.fp16},
        {"parallelism__sequence_parallel": True},
        {"parallelism__stages_per_rank": 2},
        {"parallelism__layers_per_stage": [1]},
        {"parallelism__checkpointing": Checkpointing.full},
        {"parallelism__offload_optimizer": True},
    ],
    ids=str,
)
def test_vision_models_have_none_of_the_decoders_choices(values: dict[str, Any]) -> None:
    text = findings(changed(**values))
    assert "for decoders only" in text
    assert text.count("\n  - ") == 1


def test_the_chosen_32b_layout_is_legal_and_its_outer_stages_are_spared() -> None:
    plan = make_plan(
        on_gpus(QWEN_32B, parallelism__pp=16, parallelism__tp=2, parallelism__sequence_parallel=True)
    )
    assert tuple(end - first for first, end in plan.stages) == SIXTEEN
    assert any("of 22.2 GiB at pp=0" in line for line in plan.lines())
    assert RunPlan.from_json(plan.to_json()) == plan


def test_a_run_that_does_not_fit_is_refused_with_the_place_and_its_largest_terms() -> None:
    text = findings(on_gpus(QWEN_32B, parallelism__pp=8, parallelism__dp_shard=4))
    # 23.8 of tensors (docs/layout_32b.md), and what the allocator and NCCL take.
    assert "a rank at pp=4 (9 blocks) needs 25.0 GiB" in text
    terms = dict(re.findall(r"(\w+) (\d+\.\d\d)", text.partition("GiB to use: ")[2].partition(";")[0]))
    tensors = sum(float(size) for name, size in terms.items() if name not in ("slack", "buffers"))
    assert tensors == pytest.approx(23.8, abs=0.05)
    assert "cluster.hardware=rtx4090 has 22.2 GiB to use: optimizer 8.17" in text
    assert "more pp, tp or dp_shard" in text


def test_offload_makes_it_fit() -> None:
    make_plan(
        on_gpus(QWEN_32B, parallelism__pp=8, parallelism__dp_shard=4, parallelism__offload_optimizer=True)
    )


def test_the_cpu_has_no_limit() -> None:
    config = decoder()
    config.model = QWEN_32B
    assert make_plan(config).usable_gib is None


def test_degrees_are_all_ordered_factorizations() -> None:
    """2³ over four axes: C(6, 3) ways."""
    assert len(set(degrees(8))) == len(degrees(8)) == 20


def test_every_choice_occurs_in_a_legal_cell() -> None:
    cells = [draw_legal_cell(decoder(), 8, seed) for seed in range(200)]
    for key, values in CHOICES.items():
        assert {str(cell[key]) for cell in cells} == set(map(str, values)), key
    for axis in AXES:
        assert len({cell[f"parallelism.{axis}"] for cell in cells}) > 1, axis


def test_a_seed_draws_one_cell_and_it_is_legal() -> None:
    cell = draw_legal_cell(decoder(), 4, 7)
    assert cell == draw_legal_cell(decoder(), 4, 7)
    assert make_plan(with_cell(decoder(), cell)).world_size == 4


def test_the_legal_table_of_four_ranks_has_the_size_that_one_counts_by_hand() -> None:
    """Schedules, stages a rank, microbatch sizes, sequence parallelism and resharding, four samples a step.

    One stage a rank, two schedules, resharding or not (× 4). tp 1: three layouts without a pipeline, where a
    share of one sample leaves one microbatch size; two of pp 2 and one of pp 4, with two sizes each:
    3 + 4 + 2. tp 2, with and without sequence parallelism (× 2): two layouts without a pipeline and one of
    pp 2, two sizes each: 4 + 2. So 4 · (9 + 2 · 6) = 84.
    Two stages a rank (five layers: pp 2 alone), in groups of two microbatches, resharding or not (× 2):
    tp 1, two layouts, size 1; tp 2, one layout, two sizes, × 2: 2 · (2 + 4) = 12.
    """
    few = {key: CHOICES[key] for key in list(CHOICES)[:5]}
    assert sum(is_legal(decoder(), cell) for cell in all_cells(4, few)) == 84 + 12
