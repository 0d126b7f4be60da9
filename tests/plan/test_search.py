"""The search against all layouts one by one, planned in full."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from hpctrain import cli
from hpctrain.config.schema import Checkpointing, Config, Schedule
from hpctrain.errors import PlanError
from hpctrain.plan.hardware import hardware_of
from hpctrain.plan.plan import make_plan
from hpctrain.plan.search import Found, search
from hpctrain.plan.sizing import choose_layout
from hpctrain.plan.steptime import predict_step


def composed(*overrides: str) -> Config:
    (point,) = cli.compose(list(overrides))
    return point.resolve(without_data=True)


def found_for(config: Config) -> Found:
    return search(config, hardware_of(config.cluster))


def fastest_by_hand(config: Config) -> float:
    """Smallest predicted step of all layouts of 8 ranks that a full plan accepts."""
    best = float("inf")
    degrees = [d for d in product((1, 2, 4, 8), repeat=4) if d[0] * d[1] * d[2] * d[3] == 8]
    modes = product(Checkpointing, (1, 2, 4, 8), ((Schedule["1f1b"], 1), (Schedule["interleaved_1f1b"], 2)))
    for (pp, dp_replicate, dp_shard, tp), (checkpointing, size, (schedule, per_rank)) in product(
        degrees, list(modes)
    ):
        for reshard in (True, False):
            parallelism = replace(
                config.parallelism,
                pp=pp,
                dp_replicate=dp_replicate,
                dp_shard=dp_shard,
                tp=tp,
                checkpointing=checkpointing,
                microbatch_size=size,
                schedule=schedule,
                stages_per_rank=per_rank,
                sequence_parallel=tp > 1,
                reshard_after_forward=reshard,
            )
            given = replace(config, parallelism=parallelism)
            try:
                plan = make_plan(given)
            except PlanError:
                continue
            step = predict_step(given, plan.layout, plan.batch, plan.stages, hardware_of(given.cluster))
            assert step is not None
            best = min(best, step.seconds)
    return best


def test_the_fastest_layout_that_fits_is_found() -> None:
    """Of a model with 12 blocks on one node, among all of its layouts."""
    config = composed(
        "+exp=finance_callbot",
        "model=qwen2_5_7b",
        "model.num_hidden_layers=12",
        "cluster.num_nodes=1",
        "optim.global_batch_size=64",
        "data.sequence_length=2048",
    )
    found = found_for(config)
    assert found.best is not None
    plan = make_plan(
        replace(config, parallelism=found.best.parallelism)
    )  # which would refuse what does not fit
    step = predict_step(
        replace(config, parallelism=found.best.parallelism),
        plan.layout,
        plan.batch,
        plan.stages,
        hardware_of(config.cluster),
    )
    assert step is not None
    assert step.seconds == pytest.approx(fastest_by_hand(config), rel=0.02)  # stages are cut more simply


def test_no_ready_made_layout_is_faster() -> None:
    config = composed("+exp=finance_callbot")
    best = found_for(config).best
    assert best is not None
    for name in ("pp16_tp2", "pp4_tp8"):
        forecast = make_plan(composed("+exp=finance_callbot", f"parallelism={name}")).forecast
        assert forecast is not None and best.step.seconds <= 1.001 * forecast.step_s.mid


def test_every_other_layout_has_a_reason() -> None:
    found = found_for(composed("+exp=finance_callbot"))
    assert found.best is not None and len(found.others) > 20
    reasons = {option.name(): found.reason(option) for option in found.others}
    assert all(reasons.values())
    assert "all-reduces of tp" in reasons["pp 4 × tp 8"] and "× slower" in reasons["pp 4 × tp 8"]
    assert "GiB" in reasons["pp 32"]  # docs/layout_32b.md: does not fit
    assert "GiB" in reasons["dp_replicate 32"]  # 524 GB of states on every card
    ordered = [option.step.seconds for option in found.others if option.fits]
    assert ordered == sorted(ordered) and ordered[0] >= found.best.step.seconds


def test_what_the_search_takes_the_plan_accepts() -> None:
    for overrides in (
        ["+exp=finance_callbot"],
        ["+exp=finance_callbot_lora"],
        ["+exp=finance_callbot", "cluster.num_nodes=8"],
    ):
        config = composed(*overrides, "parallelism=auto")
        plan = make_plan(choose_layout(config))
        assert plan.world_size == config.cluster.num_nodes * 8


def test_a_point_where_memory_ran_out_is_passed_over() -> None:
    config = composed("+exp=finance_callbot_lora", "parallelism=auto")
    first = make_plan(choose_layout(config))
    second = make_plan(choose_layout(config, None, frozenset({first.point})))
    assert second.point != first.point


def test_offload_is_taken_only_where_nothing_else_fits() -> None:
    config = composed(
        "+exp=finance_callbot", "parallelism=auto", "cluster.num_nodes=1", "optim.global_batch_size=8"
    )
    found = found_for(config)
    options = [option for option in (found.best, *found.others) if option is not None]
    assert any(option.parallelism.offload_optimizer for option in options)  # 65 GB a card without
    roomy = found_for(composed("+exp=finance_callbot"))
    assert not any(option.parallelism.offload_optimizer for option in roomy.others)


def test_no_layout_at_all_is_refused_with_the_nearest() -> None:
    config = composed(
        "+exp=finance_callbot",
        "parallelism=auto",
        "cluster.num_nodes=1",
        "cluster.ranks_per_node=1",
        "cluster.mem_gib=64",
    )
    with pytest.raises(PlanError, match=r"no layout of 1 nodes fits:\n  - one rank: .* cluster\.mem_gib=64 "):
        choose_layout(config)


def test_a_vision_model_has_its_microbatches_to_choose_from() -> None:
    found = found_for(composed("+exp=vision_city"))
    assert found.best is not None and found.best.layout.dp_replicate == 32
    assert found.num_tried == 8  # the divisors of 4096 / 32
