"""The time of a vision model's step: the ordering document's figure, and by hand where parts stand alone."""

from __future__ import annotations

from typing import Any

import pytest

from hpctrain.config.hardware import Hardware, find_hardware
from hpctrain.config.schema import (
    ClusterConfig,
    Config,
    GradientCompression,
    OptimConfig,
    Precision,
    VisionConfig,
)
from hpctrain.plan.batch import resolve_batch
from hpctrain.plan.layout import Layout
from hpctrain.plan.steptime import StepTime, predict_step

CARD = find_hardware("rtx4090")


def predict_vision(
    ranks: int, images: int, hardware: Hardware = CARD, nodes: int = 1, **changes: Any
) -> StepTime:
    model = VisionConfig(class_parallel=changes.pop("class_parallel", False))
    num_identities = changes.pop("num_identities", None)
    config = Config(
        model=model,
        optim=OptimConfig(precision=Precision.bf16, **changes),
        cluster=ClusterConfig(num_nodes=nodes, ranks_per_node=8),
    )
    batch, _ = resolve_batch(images * ranks, None, ranks)
    assert batch is not None
    layout = Layout(pp=1, dp_replicate=ranks, dp_shard=1, tp=1)
    step = predict_step(config, layout, batch, (), hardware, num_identities=num_identities)
    assert step is not None
    return step


def test_one_card_needs_42_days_for_20_million_images_100_times() -> None:
    """The ordering document's figure: 551 images/s, from which the catalogue has its efficiency."""
    step = predict_vision(1, 128)
    assert 20e6 * 100 / (128 / step.seconds) / 86400 == pytest.approx(42, rel=0.03)


def test_gradients_in_bf16_are_half_as_long_on_the_way() -> None:
    bare = CARD.with_value("overlap", 0).with_value("network_latency_us", 1e-9)
    bare = bare.with_value("node_latency_us", 1e-9).with_value("network_gbps", 3)
    whole, half = (
        predict_vision(32, 128, bare, nodes=4, gradient_compression=compression)
        for compression in GradientCompression
    )
    # 2 · 31/32 · 4 bytes of 87.6 M parameters, over a 3 GB/s card that one ring uses
    assert whole.parts["dp"] == pytest.approx(2 * 31 / 32 * 4 * 87.6e6 / 3e9, rel=0.01)
    assert half.parts["dp"] == pytest.approx(whole.parts["dp"] / 2)


def test_backward_hides_all_buckets_but_the_last() -> None:
    fast = CARD.with_value("overlap", 1)
    hidden, bare = predict_vision(8, 128, fast), predict_vision(8, 128, CARD.with_value("overlap", 0))
    buckets = 87.6e6 * 4 / (25 * 2**20)
    assert hidden.parts["dp"] == pytest.approx(bare.parts["dp"] / buckets, rel=0.01)


def test_class_parallelism_sends_embeddings_instead_of_centres() -> None:
    """512 numbers of fp32 for each of 1,024 images are gathered, and their gradients reduced; the centres of
    a million identities, 2 GB, stay where they are."""
    quick = CARD.with_value("node_latency_us", 1e-9)
    headless = predict_vision(8, 128, quick)
    apart, whole = (
        predict_vision(8, 128, quick, class_parallel=apart, num_identities=10**6) for apart in (True, False)
    )
    sent = 2 * 7 / 8 * 4 * 512 * 1024 + 3 * 2 * 7 / 8 * 4 * 1024
    seconds = sent / (quick["node8_gbps"] * 1e9)
    assert apart.parts["classes"] == pytest.approx(seconds, rel=1e-3)
    assert apart.parts["dp"] == headless.parts["dp"] and whole.parts["classes"] == 0
    assert whole.parts["dp"] - apart.parts["dp"] - apart.parts["classes"] > 0.1
    assert apart.seconds < whole.seconds


def test_a_million_identities_cost_three_products_in_fp32() -> None:
    """2 · 3 · 128 · 512 · 10⁶ operations at 82.6 TFLOP/s, where memory takes no time."""
    bare = CARD.with_value("memory_gbps", 1e12)
    without, with_head = (predict_vision(1, 128, bare, num_identities=n) for n in (None, 10**6))
    expected = 6 * 128 * 512e6 / (82.6e12 * bare["matmul_efficiency"])
    assert with_head.parts["compute"] - without.parts["compute"] == pytest.approx(expected, rel=1e-3)


def test_class_parallel_ranks_update_their_own_centres() -> None:
    """AdamW and the norm: 8 numbers of fp32 for each of 512 · 10⁶ / 8."""
    headless = predict_vision(8, 128)
    apart = predict_vision(8, 128, class_parallel=True, num_identities=10**6)
    expected = 4 * 8 * 512e6 / 8 / 1008e9
    assert apart.parts["optimizer"] - headless.parts["optimizer"] == pytest.approx(expected)
