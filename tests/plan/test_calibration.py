"""Figures from times that are known to come from them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from hpctrain.config.hardware import Hardware, find_hardware
from hpctrain.config.schema import (
    ClusterConfig,
    Config,
    DecoderConfig,
    OptimConfig,
    Precision,
    TokenDataConfig,
    VisionConfig,
)
from hpctrain.plan.batch import resolve_batch
from hpctrain.plan.calibration import Calibration, Row, figures_of, fit_line
from hpctrain.plan.forecast import make_forecast
from hpctrain.plan.hardware import unknown_figure
from hpctrain.plan.layout import Layout
from hpctrain.plan.steptime import predict_step

LINKS = ("root_gbps", "node2_gbps", "send_gbps", "node_latency_us", "overlap")
UNKNOWN = ("node4_gbps", "node8_gbps", "network_gbps", "network_latency_us")
PLACE = {"date": "2026-01-02", "job": "12", "nodes": 2, "ranks_per_node": 8, "torch": "2.14.1"}
PLACE |= {"device": "CPU", "precision": "fp32", "peak": "fp32_tflops"}
SIZES = (8 * 1024, 512 * 1024, 32 * 1024**2)
HOP_S, BUS = 20e-6, 10e9

# Rounds of a ring: nccl-tests, PERFORMANCE.md.
ROUNDS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}


def ring_rows(group: str, ranks: int, at_once: int = 1) -> list[Row]:
    """Times of rings whose hops take HOP_S and whose ways carry BUS bytes a second."""
    return [
        Row(what, size, [rounds * (ranks - 1) * (HOP_S + size / ranks / BUS)] * 3, group, ranks, at_once)
        for what, rounds in ROUNDS.items()
        for size in SIZES
    ]


def figures(*rows: Row, known_tflops: float | None = None) -> dict[str, float]:
    found = figures_of(Calibration(PLACE, list(rows)), known_tflops)
    assert all(each.kind == "measured" and each.low <= each.value <= each.high for each in found.values())
    return {name: each.value for name, each in found.items()}


def test_a_line_gives_back_its_intercept_and_slope() -> None:
    intercept, slope = fit_line([(x, 3.0 + 2.0 * x) for x in (1.0, 10.0, 1e6)])
    assert intercept == pytest.approx(3.0) and slope == pytest.approx(2.0)


def test_small_sizes_decide_the_latency_though_large_ones_are_off() -> None:
    points = [(1e3, 1e-4 + 1e-7), (1e4, 1e-4 + 1e-6), (1e9, 1.1 * 1e-1)]
    assert fit_line(points)[0] == pytest.approx(1e-4, rel=0.01)


def test_an_intercept_is_never_negative() -> None:
    intercept, slope = fit_line([(1.0, 0.5), (2.0, 2.0), (4.0, 5.0)])
    assert intercept == 0.0 and 0.5 < slope < 1.25


@pytest.mark.parametrize(
    ("group", "ranks", "figure"),
    [
        ("root", 2, "root_gbps"),
        ("node2", 2, "node2_gbps"),
        ("node4", 4, "node4_gbps"),
        ("node8", 8, "node8_gbps"),
    ],
)
def test_rings_in_a_node_give_back_their_bus_bandwidth_and_hop(group: str, ranks: int, figure: str) -> None:
    found = figures(*ring_rows(group, ranks))
    assert found == {figure: pytest.approx(10.0), "node_latency_us": pytest.approx(20.0)}


def test_a_network_card_carries_all_groups_of_its_node() -> None:
    found = figures(*ring_rows("network", 2, at_once=8))
    assert found == {"network_gbps": pytest.approx(80.0), "network_latency_us": pytest.approx(20.0)}


def test_a_message_has_one_hop_and_its_whole_size() -> None:
    rows = [Row("send", size, [5e-6 + size / 4e9] * 3, "node2", 2) for size in SIZES]
    assert figures(*rows) == {"send_gbps": pytest.approx(4.0), "node_latency_us": pytest.approx(5.0)}


def test_times_that_do_not_grow_with_size_leave_the_rate_of_the_largest() -> None:
    """A busy machine: one process waits for the other, whatever it sends."""
    rows = [Row("send", size, [0.1 - i * 0.01] * 3, "node2", 2) for i, size in enumerate(SIZES)]
    assert figures(*rows)["send_gbps"] == pytest.approx(
        32 * 1024**2 / 0.08 * 1e-9, rel=1e-3
    )  # four digits are kept


def test_the_range_of_a_link_holds_all_kinds_of_collectives() -> None:
    slow = [replace(row, seconds=[2 * s for s in row.seconds]) for row in ring_rows("node2", 2)[:3]]
    found = figures_of(Calibration(PLACE, slow + ring_rows("node2", 2)[3:]), None)["node2_gbps"]
    assert (found.low, found.value, found.high) == pytest.approx((5.0, 10.0, 10.0))


def test_without_a_data_sheet_the_fastest_product_is_the_peak() -> None:
    rows = [Row("matmul", 2e9, [0.02, 0.02]), Row("matmul", 2e9, [0.01, 0.01])]
    found = figures(*rows, Row("convolutions", 1e9, [0.01]))
    assert found == {"fp32_tflops": pytest.approx(0.2), "convnet_efficiency": pytest.approx(0.5)}


def test_with_a_data_sheet_efficiencies_are_shares_of_its_peak() -> None:
    rows = [Row("matmul", 2e12, [0.02]), Row("attention", 1e12, [0.1])]
    assert figures(*rows, known_tflops=200.0) == {"attention_efficiency": pytest.approx(0.05)}


def test_a_share_that_noise_made_too_large_is_told_as_the_most_that_a_file_may_say() -> None:
    """A layer thrice as fast as the fastest product; read back by plans, which refuse more than 1.5."""
    rows = [Row("matmul", 1e12, [1.0]), Row("convolutions", 3e12, [1.0, 1.0, 2.5, 2.5, 2.5])]
    found = figures_of(Calibration(PLACE, rows), None)["convnet_efficiency"]
    assert (found.low, found.value, found.high) == (1.2, 1.2, 1.5)
    assert figures(rows[0], Row("convolutions", 3e12, [1.0]))["convnet_efficiency"] == 1.5


def test_decoder_products_are_measured_beside_their_memory_traffic() -> None:
    """1e9 FLOPs at half of the peak take 10 ms, 7.5e6 bytes at 1 GB/s 7.5 ms, together their hypotenuse."""
    rows = [Row("matmul", 2e9, [0.01]), Row("device_memory", 1e9, [1.0])]
    products = Row("decoder_products", 1e9, [0.0125], moved=7.5e6)
    assert figures(*rows, products)["matmul_efficiency"] == pytest.approx(0.5)


def test_attention_is_measured_without_its_mask() -> None:
    """Which the plan adds: 1e6 bytes at 1 GB/s take 1 ms."""
    rows = [Row("matmul", 2e9, [0.01]), Row("device_memory", 1e9, [1.0])]
    found = figures(*rows, Row("attention", 1e9, [0.01 + 0.001], moved=1e6))
    assert found["attention_efficiency"] == pytest.approx(0.5)


@pytest.mark.parametrize(("both_s", "overlap"), [(0.1, 1.0), (0.15, 0.5), (0.2, 0.01), (0.3, 0.01)])
def test_overlap_is_the_share_that_hides(both_s: float, overlap: float) -> None:
    rows = [Row("compute_alone", 1, [0.1]), Row("reduce_alone", 1, [0.1]), Row("both", 1, [both_s])]
    assert figures(*rows)["overlap"] == pytest.approx(overlap)


def test_decoding_has_a_part_for_the_image_and_one_for_its_pixels() -> None:
    rows = [Row("decode", megapixels, [0.3e-3 + 4e-3 * megapixels] * 2) for megapixels in (0.1, 0.7, 2.0)]
    found = figures(*rows)
    assert found == {"decode_ms": pytest.approx(0.3), "decode_ms_per_megapixel": pytest.approx(4.0)}


def test_storage_and_memory_are_sums_over_what_works_at_once() -> None:
    found = figures(
        Row("host_memory", 1e9, [0.1], at_once=8),
        Row("host_copy", 1e9, [0.1]),
        Row("read", 1e9, [0.5]),
        Row("read_by_all", 2e9, [0.5]),
        Row("write", 4e9, [4.0]),
        Row("launch", 1, [5e-6]),
    )
    assert found == {
        "host_memory_gbps": 80.0,
        "host_gbps": 10.0,
        "storage_gbps": 2.0,
        "storage_total_gbps": 4.0,
        "write_gbps": 1.0,
        "launch_us": 5.0,
    }


def test_a_figure_says_when_where_and_with_what_it_was_measured() -> None:
    found = figures_of(Calibration(PLACE, [Row("read", 1e9, [0.5])]), None)["storage_gbps"]
    assert found.source == "hpctrain calibrate, 2026-01-02, job 12, 2 nodes x 8 ranks, torch 2.14.1"


def test_times_outlive_their_file() -> None:
    calibration = Calibration(PLACE, ring_rows("node2", 2))
    assert Calibration.from_dict(json.loads(json.dumps(calibration.to_dict()))) == calibration


def test_a_plan_beyond_what_was_calibrated_has_no_forecast() -> None:
    """Two ranks of a node were measured: four ranks, or two nodes, need links that nobody knows."""
    hardware = find_hardware("rtx4090")
    measured = Hardware(
        "mine", {name: figure for name, figure in hardware.figures.items() if name not in UNKNOWN}
    )
    for nodes, ranks, known in ((1, 2, True), (1, 4, False), (2, 1, False)):
        cluster = ClusterConfig(num_nodes=nodes, ranks_per_node=ranks, hardware="rtx4090")
        config = Config(model=VisionConfig(backbone="resnet50"), cluster=cluster)
        layout = Layout(pp=1, dp_replicate=nodes * ranks, dp_shard=1, tp=1)
        batch, _ = resolve_batch(64, None, layout.dp)
        assert batch is not None
        assert (predict_step(config, layout, batch, (), measured) is not None) is known
        assert (make_forecast(config, layout, batch, (), measured, None) is not None) is known


def predicted(nodes: int, ranks: int, hardware: Hardware, **optim: Any) -> tuple[Any, ...]:
    """What predict_step is asked for a ResNet-50 over so many ranks."""
    cluster = ClusterConfig(num_nodes=nodes, ranks_per_node=ranks, hardware="rtx4090")
    config = Config(model=VisionConfig(backbone="resnet50"), cluster=cluster, optim=OptimConfig(**optim))
    layout = Layout(pp=1, dp_replicate=nodes * ranks, dp_shard=1, tp=1)
    batch, _ = resolve_batch(64, None, layout.dp)
    assert batch is not None
    return config, layout, batch, (), hardware


def without(*figures: str) -> Hardware:
    known = find_hardware("rtx4090").figures
    return Hardware("mine", {name: figure for name, figure in known.items() if name not in figures})


def test_one_rank_has_a_forecast_after_a_calibration_of_one_rank_without_links() -> None:
    """It is the same as with links, which one rank has no use for."""
    alone = without(*LINKS, *UNKNOWN)
    step, linked = (predict_step(*predicted(1, 1, hardware)) for hardware in (alone, without()))
    assert step is not None and step == linked
    assert make_forecast(*predicted(1, 1, alone), None) is not None


def test_a_decoder_on_one_rank_needs_no_links_and_hides_none_of_its_copies() -> None:
    """As where nothing can hide (overlap 0)."""
    layout = Layout(pp=1, dp_replicate=1, dp_shard=1, tp=1)
    config = Config(model=DecoderConfig(), data=TokenDataConfig(sequence_length=128))
    batch, _ = resolve_batch(4, 1, 1)
    assert batch is not None
    stages = ((0, DecoderConfig().num_hidden_layers),)
    alone, bare = without(*LINKS, *UNKNOWN), without().with_value("overlap", 0.0)
    step, expected = (predict_step(config, layout, batch, stages, each) for each in (alone, bare))
    assert step is not None and step == expected


@pytest.mark.parametrize(
    ("nodes", "ranks", "lacking", "figure"),
    [
        (1, 1, (*LINKS, *UNKNOWN), None),
        (1, 2, LINKS, "node2_gbps"),
        (1, 4, UNKNOWN, "node4_gbps"),
        (2, 1, UNKNOWN, "network_gbps"),
        (2, 1, ("node_latency_us",), None),  # all hops are between nodes
        (1, 1, ("convnet_efficiency",), "convnet_efficiency"),
        (1, 1, ("memory_gbps",), "memory_gbps"),
        (1, 1, ("fp32_tflops",), "fp32_tflops"),
    ],
)
def test_the_figure_that_a_prediction_lacks_has_a_name(
    nodes: int, ranks: int, lacking: tuple[str, ...], figure: str | None
) -> None:
    asked = predicted(nodes, ranks, without(*lacking))
    assert unknown_figure(predict_step, *asked) == figure
    assert (predict_step(*asked) is None) is (figure is not None)


def test_a_peak_that_a_card_has_not_is_named_after_the_precision() -> None:
    asked = predicted(
        1, 1, without("fp16_accumulation_tflops"), precision=Precision.fp16, fp16_accumulation=True
    )
    assert unknown_figure(predict_step, *asked) == "fp16_accumulation_tflops"
