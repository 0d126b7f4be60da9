"""Memory of vision ranks: by hand. Traces of the real code are in tests/core/test_trace_layouts.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpctrain.config.schema import (
    ClusterConfig,
    Config,
    Device,
    OptimConfig,
    OptimizerKind,
    Precision,
    VisionConfig,
)
from hpctrain.errors import PlanError
from hpctrain.plan.batch import BatchPlan
from hpctrain.plan.layout import Layout
from hpctrain.plan.memory import GIB, RankMemory
from hpctrain.plan.plan import make_plan
from hpctrain.plan.supply import Workload
from hpctrain.plan.vision_memory import replicated_memory

# ResNet-50 without its classifier (He et al. 2016), and an embedding layer of 512 on its 2,048 features: a
# matrix, and the scale and shift of a batch norm.
PARAMETERS = 25_557_032 - 2048 * 1000 - 1000 + 2048 * 512 + 2 * 512


def memory_of(
    identities: int | None = None, ranks: int = 8, num_microbatches: int = 1, **options: Any
) -> RankMemory:
    optim = OptimConfig(precision=Precision.bf16, **options.pop("optim", {}))
    model = VisionConfig(backbone="resnet50", **options)
    layout = Layout(pp=1, dp_replicate=ranks, dp_shard=1, tp=1)
    batch = BatchPlan(global_batch_size=512, microbatch_size=64, num_microbatches=num_microbatches)
    memory = replicated_memory(Config(model=model, optim=optim), model, layout, batch, identities)
    assert memory is not None
    return memory


def test_every_rank_has_all_states() -> None:
    memory = memory_of()
    assert memory.gradients == 4 * PARAMETERS
    assert memory.optimizer == 8 * PARAMETERS
    assert 0 < memory.weights - 4 * PARAMETERS < 1e6  # running statistics


def test_momentum_is_one_state_and_plain_descent_none() -> None:
    sgd = {"kind": OptimizerKind.sgd}
    assert memory_of(optim=sgd).optimizer == 4 * PARAMETERS
    assert memory_of(optim={**sgd, "momentum": 0.0}).optimizer == 0


def test_averages_are_one_more_set_of_weights() -> None:
    memory = memory_of(optim={"ema_decay": 0.999})
    assert memory.averages == memory.weights
    assert memory.total - memory_of().total == memory.averages


def test_identities_lie_on_every_rank_or_are_shared_out() -> None:
    """InsightFace's 1 M identities of 512 features (Partial FC): 2.05 GB of centres, or an eighth of it."""
    alone = memory_of().optimizer
    assert memory_of(10**6).optimizer - alone == 2 * 4 * 10**6 * 512
    assert memory_of(10**6, class_parallel=True).optimizer - alone == 2 * 4 * 10**6 * 512 // 8


def test_logits_are_those_of_all_ranks_where_identities_are_shared() -> None:
    """Centres of one feature, so that logits are nearly all: 64 samples of 8 ranks, an eighth of 4 M."""
    shared = memory_of(4 * 10**6, class_parallel=True, embedding_dim=1).working
    assert shared == pytest.approx(4 * 8 * 64 * 4 * 10**6 / 8, rel=0.01)
    sampled = memory_of(4 * 10**6, class_parallel=True, sample_rate=0.1, embedding_dim=1).working
    assert sampled == pytest.approx(0.1 * shared, rel=0.01)


def test_several_microbatches_add_up_beside_the_buckets() -> None:
    """DDP's no_sync: what is added up becomes part of the buckets with the last microbatch only."""
    assert memory_of(num_microbatches=2).gradients == 2 * memory_of().gradients
    assert memory_of(num_microbatches=2, ranks=1).gradients == memory_of(ranks=1).gradients


def city(batch: int, **model: Any) -> Config:
    config = Config(model=VisionConfig(backbone="convnext_base", **model))
    config.optim = OptimConfig(precision=Precision.bf16, global_batch_size=8 * batch)
    config.cluster = ClusterConfig(
        device=Device.cuda, hardware="rtx4090", num_nodes=1, ranks_per_node=8, exclusive=True
    )
    config.plan.force = False
    return config


def test_a_batch_that_is_too_large_is_refused_and_the_plan_says_where_the_bytes_go() -> None:
    with pytest.raises(PlanError, match=r"a rank needs \d+\.\d GiB.* activations 30"):
        make_plan(city(256))
    plan = make_plan(city(128))
    assert plan.memory[0].total < 22.2 * GIB
    assert any(line.startswith("memory  ") and "activations" in line for line in plan.lines())
    assert any("without the identities' head" in line for line in plan.lines())


def test_many_identities_are_refused_where_they_are_not_shared() -> None:
    workload = Workload(num_samples=10**7, sample_bytes=1e5, num_identities=2 * 10**6)
    with pytest.raises(PlanError, match=r"model\.class_parallel=true"):
        make_plan(city(64), workload)
    assert make_plan(city(64, class_parallel=True, sample_rate=0.1), workload).memory[0].total < 22.2 * GIB


def test_an_unknown_backbone_leaves_memory_unknown_and_says_who_measures_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # whatever was measured here before
    config = city(64)
    assert isinstance(config.model, VisionConfig)
    config.model.backbone = "resnet14t"
    plan = make_plan(config)
    assert plan.memory == ()
    assert any("resnet14t" in line and "plan --trace" in line for line in plan.lines())
