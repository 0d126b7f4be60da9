"""Data supply against the arithmetic of the fact sheet: 15,432 images a second of a city's cameras."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpctrain.config.hardware import Hardware, find_hardware
from hpctrain.config.schema import ClusterConfig, ImageDataConfig, TokenDataConfig
from hpctrain.plan.supply import Workload, data_supply

CARD = find_hardware("rtx4090")
CLUSTER = ClusterConfig(num_nodes=4, ranks_per_node=8, cpus_per_rank=8)
LOADER = ImageDataConfig(root="", num_workers=7)


def camera(megapixels: float, image_bytes: float) -> Workload:
    return Workload(num_samples=20_000_000, sample_bytes=image_bytes, megapixels=megapixels)


def test_frames_of_1080p_take_more_cores_than_four_nodes_of_64_have_for_loading() -> None:
    """122 images/s a core (measured with Pillow): 126 cores for 15,432 images/s; 4K at 30: 514 cores."""
    supply = data_supply(CLUSTER, LOADER, camera(2.07, 0.3e6), CARD)
    assert supply is not None and supply.num_workers == 224
    assert supply.decode == pytest.approx(224 * 122, rel=0.1)
    small = data_supply(CLUSTER, LOADER, camera(8.3, 0.8e6), CARD)
    assert small is not None and small.decode == pytest.approx(224 * 30, rel=0.1)
    assert small.decode < 15_432


def test_storage_is_the_limit_for_whole_frames() -> None:
    """4.5 GB/s for 15,432 frames of 1080p a second; a small server gives 4."""
    supply = data_supply(CLUSTER, LOADER, camera(2.07, 0.3e6), CARD)
    assert supply is not None and supply.storage is not None
    assert supply.storage * 0.3e6 * (1 - supply.cached) == pytest.approx(4e9)
    assert supply.limit == "storage" and supply.rate == supply.storage < 15_432


def test_data_that_fit_into_memory_are_read_once() -> None:
    supply = data_supply(CLUSTER, LOADER, replace(camera(0.0125, 4000), num_samples=1_000_000), CARD)
    assert supply is not None and supply.cached == 1.0 and supply.storage is None
    assert supply.limit == "decoding"


def test_one_node_reads_no_more_than_a_node_can() -> None:
    one = data_supply(replace(CLUSTER, num_nodes=1), LOADER, camera(2.07, 0.3e6), CARD)
    assert one is not None and one.storage is not None
    assert one.storage * 0.3e6 * (1 - one.cached) == pytest.approx(2e9)


def test_more_workers_than_cores_share_them() -> None:
    many = data_supply(CLUSTER, replace(LOADER, num_workers=64), camera(2.07, 0.3e6), CARD)
    assert many is not None and many.num_workers == 224


def test_without_workers_each_training_loop_decodes() -> None:
    supply = data_supply(CLUSTER, replace(LOADER, num_workers=0), camera(2.07, 0.3e6), CARD)
    assert supply is not None and supply.decode == pytest.approx(32 * 122, rel=0.1)


def test_tokens_are_not_decoded() -> None:
    tokens = TokenDataConfig(root="", sequence_length=4096)
    supply = data_supply(CLUSTER, tokens, Workload(num_samples=100_000_000, sample_bytes=16_384), CARD)
    assert supply is not None and supply.decode is None and supply.storage is not None


def test_without_figures_nothing_is_known() -> None:
    assert data_supply(CLUSTER, LOADER, camera(1, 1e5), Hardware("cpu", {})) is None
