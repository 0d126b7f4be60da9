"""The time of a step: by hand where links or computation stand alone, and against the sums of the docs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hpctrain.config.hardware import Hardware, find_hardware
from hpctrain.config.schema import (
    Checkpointing,
    ClusterConfig,
    Config,
    DecoderConfig,
    LoraConfig,
    OptimConfig,
    ParallelismConfig,
    Precision,
    Schedule,
    TokenDataConfig,
)
from hpctrain.plan.batch import resolve_batch
from hpctrain.plan.layout import Layout
from hpctrain.plan.stages import Stages
from hpctrain.plan.steptime import PARTS, StepTime, predict_step
from tests.plan.large import QWEN_32B, SIXTEEN

CARD = find_hardware("rtx4090")
ROOTS = [[0, 1, 2, 3], [4, 5, 6, 7]]
MODEL = DecoderConfig(
    vocab_size=32000,
    hidden_size=1024,
    intermediate_size=4096,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=8,
)
BLOCK = 4 * 1024**2 + 3 * 1024 * 4096 + 2 * 1024  # parameters


def cut(*counts: int) -> Stages:
    ends = [sum(counts[: index + 1]) for index in range(len(counts))]
    return tuple((end - count, end) for end, count in zip(ends, counts, strict=True))


def predict(
    degrees: tuple[int, int, int, int],
    stages: Stages,
    *,
    model: DecoderConfig = MODEL,
    batch: int = 16,
    nodes: int = 1,
    hardware: Hardware = CARD,
    exact: bool = False,
    optim: OptimConfig | None = None,
    **parallelism: Any,
) -> StepTime:
    """A step of sequences of 1,024 tokens; degrees are those of pp, dp_replicate, dp_shard, tp."""
    layout = Layout(**dict(zip(("pp", "dp_replicate", "dp_shard", "tp"), degrees, strict=True)))
    config = Config(
        model=model,
        data=TokenDataConfig(sequence_length=1024),
        optim=optim or OptimConfig(precision=Precision.bf16),
        cluster=ClusterConfig(num_nodes=nodes, ranks_per_node=8, pcie_roots=ROOTS),
        parallelism=ParallelismConfig(microbatch_size=1, **parallelism),
    )
    plan, _ = resolve_batch(batch, 1, layout.dp)
    assert plan is not None
    step = predict_step(config, layout, plan, stages, hardware, exact=exact)
    assert step is not None
    return step


ALONE = (1, 1, 1, 1)
WHOLE = cut(8)


def test_parts_sum_to_the_step() -> None:
    for degrees, stages in (((4, 1, 2, 1), cut(2, 2, 2, 2)), ((2, 2, 1, 2), cut(4, 4)), (ALONE, WHOLE)):
        step = predict(degrees, stages)
        assert tuple(step.parts) == PARTS
        assert sum(step.parts.values()) == pytest.approx(step.seconds)
        assert min(step.parts.values()) >= 0


@pytest.mark.parametrize("shares_tokens", [False, True])
@pytest.mark.parametrize("checkpointing", list(Checkpointing))
def test_tp_sends_what_the_trace_counts(shares_tokens: bool, checkpointing: Checkpointing) -> None:
    """docs/layout_32b.md, "Traced": with sequence parallelism six all-gathers and five reduce-scatters of a
    block and microbatch with recomputation, eight in all without. Otherwise four all-reduces, and a fifth in
    recomputation, are twice as much each. Embedding: one half and its gradient, or two halves; head alike."""
    step = predict(
        (1, 1, 1, 4),
        WHOLE,
        hardware=CARD.with_value("node_latency_us", 1e-9),
        sequence_parallel=shares_tokens,
        checkpointing=checkpointing,
    )
    recomputes = checkpointing is not Checkpointing.none
    halves = (11 if recomputes else 8) if shares_tokens else (10 if recomputes else 8)
    half_s = 3 / 4 * 2 * 1024 * 1024 / (CARD["node4_gbps"] * 1e9)
    losses_s = 2 * 3 / 4 * 3 * 4 * 1024 / (CARD["node4_gbps"] * 1e9)
    assert step.parts["tp"] == pytest.approx(16 * ((8 * halves + 4) * half_s + losses_s))


def test_over_one_rank_a_weight_is_cast_copied_and_its_gradient_summed() -> None:
    """torch 2.14's _fsdp_collectives.py, bytes a weight: cast 4 + 2, copied in and out 2 + 2 each, twice; its
    gradient cast 2 + 4, copied 4 + 4, added 4 + 4 + 4."""
    step = predict(ALONE, WHOLE, hardware=CARD.with_value("overlap", 0))
    moved = 2 * (6 + 4 + 4) + 6 + 8 + 12
    parameters = 8 * BLOCK + 2 * 32000 * 1024 + 1024
    assert step.parts["dp"] == pytest.approx(16 * moved * parameters / 1008e9)


def test_over_four_ranks_only_whole_blocks_are_copied() -> None:
    """As above, but casts, copies in and sums are of a quarter; the copy of the gradient is the link's."""
    bare = CARD.with_value("overlap", 0).with_value("node4_gbps", 1e9).with_value("node_latency_us", 1e-9)
    step = predict((1, 1, 4, 1), WHOLE, hardware=bare)
    moved = 2 * (4 + (6 + 4) / 4) + 6 + (8 + 12) / 4
    parameters = 8 * BLOCK + 2 * 32000 * 1024 + 1024
    assert step.parts["dp"] == pytest.approx(4 * moved * parameters / 1008e9, rel=1e-3)


def test_shards_are_gathered_twice_and_reduced_once_a_microbatch() -> None:
    """Nothing hidden: 2 bytes a parameter gathered before forward and before backward, 4 reduced."""
    bare = CARD.with_value("overlap", 0).with_value("node_latency_us", 1e-9).with_value("node4_gbps", 1e-3)
    parameters = 8 * BLOCK + 2 * 32000 * 1024 + 1024
    link_s = 3 / 4 * parameters / (1e-3 * 1e9)
    kept = predict((1, 1, 4, 1), WHOLE, hardware=bare, reshard_after_forward=False)
    dropped = predict((1, 1, 4, 1), WHOLE, hardware=bare)
    assert dropped.parts["dp"] == pytest.approx(4 * (2 + 2 + 4) * link_s, rel=1e-3)
    assert kept.parts["dp"] == pytest.approx(4 * (2 + 4) * link_s, rel=1e-3)


def test_replicas_add_up_fp32_gradients_once_a_step() -> None:
    """2 (n-1)/n · 4 bytes a parameter; more microbatches do not change it."""
    bare = CARD.with_value("overlap", 0).with_value("node_latency_us", 1e-9).with_value("node8_gbps", 1e-3)
    link_s = 2 * 7 / 8 * 4 * (8 * BLOCK + 2 * 32000 * 1024 + 1024) / (1e-3 * 1e9)
    for batch in (16, 64):
        step = predict((1, 8, 1, 1), WHOLE, hardware=bare, batch=batch)
        assert step.parts["dp"] == pytest.approx(link_s, rel=1e-3)


def test_adapters_are_all_that_is_reduced_and_updated() -> None:
    adapted = replace(MODEL, lora=LoraConfig(rank=8))
    whole, adapters = (predict((1, 8, 1, 1), WHOLE, model=model) for model in (MODEL, adapted))
    assert adapters.parts["dp"] < 0.2 * whole.parts["dp"]
    assert adapters.parts["optimizer"] < 0.01 * whole.parts["optimizer"]


def test_overlap_hides_its_share_but_no_more_than_computation_takes() -> None:
    slow = CARD.with_value("node8_gbps", 1e-3)
    bare, hidden = (
        predict((1, 1, 8, 1), WHOLE, hardware=slow.with_value("overlap", overlap)) for overlap in (0, 1)
    )
    computation = hidden.parts["compute"] + hidden.parts["recompute"]
    assert bare.parts["dp"] - hidden.parts["dp"] == pytest.approx(computation, rel=1e-6)
    fast = CARD.with_value("node8_gbps", 1e6).with_value("overlap", 1).with_value("node_latency_us", 1e-9)
    assert predict((1, 1, 8, 1), WHOLE, hardware=fast).parts["dp"] == pytest.approx(0, abs=1e-9)


def test_the_bubble_is_that_of_even_stages() -> None:
    """(p-1)/(m+p-1) of a step (Narayanan et al. 2021, §2.2); without a head all stages are even."""
    headless = replace(MODEL, vocab_size=1)
    quick = CARD.with_value("send_gbps", 1e6).with_value("node_latency_us", 1e-9)
    step = predict((8, 1, 1, 1), cut(*[1] * 8), model=headless, hardware=quick)
    pipeline = step.seconds - step.parts["optimizer"]
    assert step.parts["bubble"] / pipeline == pytest.approx(7 / (16 + 7), rel=0.02)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved_1f1b"])
def test_the_closed_form_is_within_3_percent_of_the_simulation(schedule: str) -> None:
    """The head is as much as two blocks: the last stage is the slowest."""
    per_rank = 2 if schedule == "interleaved_1f1b" else 1
    stages = cut(*[1] * 8) if per_rank == 2 else cut(2, 2, 2, 2)
    closed, exact = (
        predict(
            (4, 1, 2, 1),
            stages,
            batch=32,
            exact=exact,
            schedule=Schedule[schedule],
            stages_per_rank=per_rank,
        ).seconds
        for exact in (False, True)
    )
    assert closed == pytest.approx(exact, rel=0.03)


def test_offload_travels_over_pcie_and_updates_on_the_host() -> None:
    """Without overlap, a microbatch: 4 bytes a parameter down twice and up once, and a sum in host memory;
    then AdamW's 8 numbers a parameter there, of both ranks."""
    bare = CARD.with_value("overlap", 0)
    step = predict((1, 1, 2, 1), WHOLE, hardware=bare, offload_optimizer=True)
    own = (8 * BLOCK + 2 * 32000 * 1024 + 1024) / 2
    copies = 3 * 4 * own / (bare["host_gbps"] * 1e9)
    host = bare["host_memory_gbps"] * 1e9
    expected = 8 * (copies + 3 * 4 * own * 2 / host) + 8 * 4 * own * 2 / host
    assert step.parts["offload"] == pytest.approx(expected, rel=1e-6)
    assert step.parts["optimizer"] == 0


def test_compiled_blocks_are_faster() -> None:
    plain, compiled = (predict(ALONE, WHOLE, compile=compiles) for compiles in (False, True))
    assert 0.5 * plain.seconds < compiled.seconds < 0.95 * plain.seconds


def predict_32b(degrees: tuple[int, int, int, int], stages: Stages) -> StepTime:
    layout = Layout(**dict(zip(("pp", "dp_replicate", "dp_shard", "tp"), degrees, strict=True)))
    config = Config(
        model=QWEN_32B,
        data=TokenDataConfig(sequence_length=4096),
        optim=OptimConfig(precision=Precision.bf16),
        cluster=ClusterConfig(num_nodes=4, ranks_per_node=8, pcie_roots=ROOTS),
        parallelism=ParallelismConfig(
            microbatch_size=1, sequence_parallel=True, checkpointing=Checkpointing.full
        ),
    )
    batch, _ = resolve_batch(64, 1, layout.dp)
    assert batch is not None
    step = predict_step(config, layout, batch, stages, CARD)
    assert step is not None
    return step


def test_the_chosen_layout_of_32b_takes_what_its_page_reckons() -> None:
    """docs/layout_32b.md: 38 s with links under one root at 60 % of the peak in all; tp=8 is slower."""
    chosen = predict_32b((16, 1, 1, 2), cut(*SIXTEEN))
    assert chosen.seconds == pytest.approx(38, rel=0.25)
    wide = predict_32b((4, 1, 1, 8), cut(15, 17, 17, 15))
    assert wide.seconds > 2 * chosen.seconds
    assert max(wide.parts, key=lambda part: wide.parts[part]) == "tp"


def test_without_figures_there_is_no_prediction() -> None:
    config = Config(model=MODEL, data=TokenDataConfig(sequence_length=1024))
    batch, _ = resolve_batch(16, 1, 1)
    assert batch is not None
    layout = Layout(pp=1, dp_replicate=1, dp_shard=1, tp=1)
    assert predict_step(config, layout, batch, WHOLE, find_hardware("cpu")) is None
