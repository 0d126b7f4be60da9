"""The plan as a whole: every refusal, all of them together, frozen, and back from JSON."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from hpctrain.config.schema import (
    ClusterConfig,
    ClusterKind,
    Config,
    Device,
    GpuRequest,
    GradientCompression,
    Precision,
)
from hpctrain.errors import PlanError
from hpctrain.plan.plan import RunPlan, make_plan


def changed(**values: Any) -> Config:
    """The defaults (2 ranks on the CPU) with dotted keys changed: `optim__lr=1`."""
    config = Config()
    for key, value in values.items():
        owner: Any = config
        *groups, name = key.split("__")
        for group in groups:
            owner = getattr(owner, group)
        assert hasattr(owner, name), key
        setattr(owner, name, value)
    return config


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"parallelism__pp": 2}, "parallelism.pp=2: a vision model"),
    ({"parallelism__tp": 2}, "parallelism.tp=2: a vision model"),
    ({"parallelism__dp_shard": 2}, "parallelism.dp_shard=2: a vision model"),
    ({"model__sample_rate": 0.5}, "a whole head takes all identities"),
    ({"model__sample_rate": 0.0, "model__class_parallel": True}, "model.sample_rate=0.0"),
    ({"parallelism__dp_replicate": 3}, "3 ranks"),
    ({"parallelism__bucket_mib": 0}, "parallelism.bucket_mib=0"),
    ({"optim__global_batch_size": 63}, "optim.global_batch_size=63"),
    ({"optim__global_batch_size": 0}, "optim.global_batch_size=0"),
    ({"parallelism__microbatch_size": 5}, "parallelism.microbatch_size=5"),
    ({"optim__precision": Precision.bf16}, "optim.precision=bf16 on the CPU"),
    (
        {"cluster__ranks_per_node": 1, "optim__gradient_compression": GradientCompression.bf16},
        "optim.gradient_compression=bf16",
    ),
    ({"model__image_size": [224]}, "model.image_size=[224]"),
    ({"model__image_size": [224, 0]}, "model.image_size=[224, 0]"),
    ({"model__identity_weight": 0.0, "model__behaviour_weight": 0.0}, "nothing would be learnt"),
    ({"optim__num_epochs": 0}, "optim.num_epochs=0"),
    ({"optim__lr": 0.0}, "optim.lr=0.0"),
    ({"optim__warmup_epochs": -1.0}, "optim.warmup_epochs=-1.0"),
    ({"optim__weight_decay": -0.1}, "optim.weight_decay=-0.1"),
    ({"optim__ema_decay": 1.0}, "optim.ema_decay=1.0"),
    ({"optim__clip_norm": 0.0}, "optim.clip_norm=0.0"),
    ({"cluster__num_nodes": 0}, "cluster.num_nodes=0"),
    ({"cluster__num_nodes": 2}, "cluster.kind=local"),
    ({"cluster__ranks_per_node": -1}, "cluster.ranks_per_node=-1"),
    ({"cluster__cpus_per_rank": 0}, "cluster.cpus_per_rank=0"),
    ({"cluster__hardware": "b200"}, "cluster.hardware=b200: the catalogue has a100"),
    ({"cluster__time_limit_min": 2, "cluster__signal_lead_s": 120}, "cluster.signal_lead_s=120"),
    ({"cluster__time_limit_min": 0}, "cluster.time_limit_min=0"),
    ({"cluster__signal_lead_s": -1}, "cluster.signal_lead_s=-1"),
    ({"cluster__mem_gib": 0}, "cluster.mem_gib=0"),
    ({"cluster__array_parallelism": 0}, "cluster.array_parallelism=0"),
    ({"checkpoint__keep_last": 0}, "checkpoint.keep_last=0"),
    ({"checkpoint__every_steps": -1}, "checkpoint.every_steps=-1"),
    ({"checkpoint__keep_every_steps": -1}, "checkpoint.keep_every_steps=-1"),
    ({"checkpoint__timeout_s": 0.0}, "checkpoint.timeout_s=0.0"),
    ({"data__num_workers": -1}, "data.num_workers=-1"),
    ({"data__prefetch": 0}, "data.prefetch=0"),
    ({"data__block_samples": 0}, "data.block_samples=0"),
    ({"data__window_blocks": 0}, "data.window_blocks=0"),
    ({"data__random_crop_min_scale": 0.0}, "data.random_crop_min_scale=0.0"),
    ({"data__synthetic_identities": -1}, "data.synthetic_identities=-1"),
    ({"budget__no_progress": 0}, "budget.no_progress=0"),
    ({"log_every_steps": 0}, "log_every_steps=0"),
    ({"eval_every_epochs": -1}, "eval_every_epochs=-1"),
    ({"hang_timeout_s": 0.0}, "hang_timeout_s=0.0"),
]


@pytest.mark.parametrize(("values", "words"), REFUSED, ids=lambda value: str(value)[:60])
def test_what_cannot_work_is_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError) as refusal:
        make_plan(changed(**values))
    assert words in str(refusal.value)
    assert refusal.value.exit_code == 3


def test_the_defaults_are_legal() -> None:
    """The refusals above come from the changed key alone."""
    plan = make_plan(changed())
    assert (plan.world_size, plan.layout.dp_replicate, plan.batch.microbatch_size) == (2, 2, 32)


def gpus(**values: Any) -> Config:
    cluster = ClusterConfig(kind=ClusterKind.slurm, device=Device.cuda, hardware="rtx4090", num_nodes=4)
    cluster.ranks_per_node = 8
    return changed(cluster=cluster, **values)


def test_gpus_under_slurm_must_be_asked_for() -> None:
    with pytest.raises(PlanError, match=r"cluster\.gpu_request=none"):
        make_plan(gpus())
    assert make_plan(gpus(cluster__gpu_request=GpuRequest.gres)).world_size == 32
    assert make_plan(gpus(cluster__exclusive=True)).world_size == 32


def test_bf16_is_legal_on_gpus() -> None:
    plan = make_plan(gpus(cluster__gpu_request=GpuRequest.gres, optim__precision=Precision.bf16))
    assert plan.batch.microbatch_size == 64 // 32


def test_all_findings_come_together() -> None:
    with pytest.raises(PlanError) as refusal:
        make_plan(
            changed(parallelism__tp=3, optim__lr=-1.0, optim__ema_decay=7.0, cluster__hardware="abacus")
        )
    for words in (
        "tp 3 = 3 does not divide",
        "optim.lr=-1.0",
        "optim.ema_decay=7.0",
        "cluster.hardware=abacus",
    ):
        assert words in str(refusal.value)
    assert str(refusal.value).count("\n  - ") == 4


def test_plan_survives_json() -> None:
    plan = make_plan(gpus(cluster__gpu_request=GpuRequest.gres, parallelism__microbatch_size=1))
    assert RunPlan.from_json(plan.to_json()) == plan
    assert plan.batch.num_microbatches == 2


def test_plan_is_frozen() -> None:
    plan = make_plan(changed())
    for target, name in ((plan, "world_size"), (plan.layout, "tp"), (plan.batch, "microbatch_size")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(target, name, 7)


def test_making_a_plan_changes_nothing_that_was_given() -> None:
    config = changed()
    before = dataclasses.asdict(config)
    make_plan(config)
    assert dataclasses.asdict(config) == before
    assert config.parallelism.dp_replicate == -1
