"""Forecasts against the arithmetic of the people who ordered this, and against sums by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpctrain import cli
from hpctrain.config.hardware import find_hardware
from hpctrain.config.schema import Config, ImageDataConfig
from hpctrain.errors import PlanError
from hpctrain.launch.inputs import find_workload
from hpctrain.plan.durations import DAY_S, deadline_s, duration_text, parse_duration_s, span_text
from hpctrain.plan.forecast import checkpoint_bytes, save_s, total_s
from hpctrain.plan.plan import RunPlan, make_plan
from hpctrain.plan.sizing import choose, fewest_nodes, make_sizes
from hpctrain.plan.uncertainty import Interval


def composed(*overrides: str) -> Config:
    (point,) = cli.compose(list(overrides))
    return point.resolve(without_data=True)


def plan_of(config: Config) -> RunPlan:
    return make_plan(config, find_workload(config))


# The two headline plans


def test_vision_city_takes_42_days_on_one_card_and_36_hours_on_the_fewest_nodes() -> None:
    """20 million images × 100 epochs at 551 images/s a card; 28 times as fast."""
    config = composed("+exp=vision_city", "cluster.num_nodes=-1")
    sizes = make_sizes(config, find_workload(config), [1, 2, 4, 8])
    wanted = deadline_s(config)
    assert wanted == 36 * 3600
    assert fewest_nodes(sizes, wanted) == 4
    chosen = choose(config, find_workload(config))
    assert chosen.cluster.num_nodes == 4
    forecast = plan_of(chosen).forecast
    assert forecast is not None and forecast.one_device_s is not None and forecast.speed_up is not None
    assert forecast.one_device_s / DAY_S == pytest.approx(42, rel=0.03)
    assert forecast.speed_up >= 28
    assert forecast.samples_per_s.mid >= 2e9 / (36 * 3600)  # 15,432
    assert (
        forecast.total_s is not None and forecast.total_s.low < forecast.total_s.mid < forecast.total_s.high
    )


def test_storage_is_named_when_it_is_the_limit() -> None:
    """Whole frames of 1080p: 4.5 GB/s for 15,432 a second."""
    config = composed(
        "+exp=vision_city",
        "plan.image_megapixels=2.07",
        "plan.image_bytes=300000",
        "+cluster.figures.storage_total_gbps=2",
    )
    with pytest.raises(PlanError, match=r"because storage gives 6,9\d\d samples/s and no more"):
        plan_of(config)
    decoding = composed("+exp=vision_city", "plan.image_megapixels=8.3", "data.num_workers=2")
    with pytest.raises(PlanError, match="because decoding gives"):
        plan_of(decoding)


def test_finance_callbot_fits_32_cards_and_pure_tp_8_spends_most_of_its_step_in_collectives() -> None:
    chosen = plan_of(composed("+exp=finance_callbot"))
    assert chosen.world_size == 32 and chosen.forecast is not None
    assert chosen.layout.pp == 16 and chosen.layout.tp == 2
    with_tp8 = plan_of(composed("+exp=finance_callbot_tp")).forecast
    assert with_tp8 is not None
    assert with_tp8.parts["tp"] > 0.5 * sum(with_tp8.parts.values())
    assert with_tp8.step_s.mid > 2 * chosen.forecast.step_s.mid


def test_adapters_of_32b_train_on_8_cards() -> None:
    plan = plan_of(composed("+exp=finance_callbot_lora"))
    assert plan.world_size == 8 and plan.forecast is not None and plan.usable_gib is not None
    assert max(place.total for place in plan.memory) / 2**30 < plan.usable_gib


# By hand


def test_a_checkpoint_of_32b_has_12_bytes_a_parameter_and_one_of_adapters_has_little() -> None:
    assert checkpoint_bytes(composed("+exp=finance_callbot")) == 12 * 32_763_876_352
    assert checkpoint_bytes(composed("+exp=finance_callbot_lora")) < 2e9


def test_a_checkpoint_of_a_million_people_holds_their_centres_four_times() -> None:
    """fp32 weights, two moments, the average, of 512 numbers each."""
    city = composed("+exp=vision_city")
    assert checkpoint_bytes(city, 1_000_000) - checkpoint_bytes(city) == 4 * 4 * 512 * 1_000_000


def test_interruptions_cost_their_share_of_the_time() -> None:
    """A save of 10 s inside the warning: 1000 steps of 86.4 s, a save every 100, one interruption a day."""
    hardware = find_hardware(
        "rtx4090",
        {
            "write_gbps": checkpoint_bytes(lora := composed("+exp=finance_callbot_lora")) / 8e9,
            "requeue_s": 844.0,
        },
    )
    lora.plan.interruptions_per_day = 1.0
    assert save_s(checkpoint_bytes(lora), hardware) == pytest.approx(10.0)
    training = 1000 * 86.4 + 10 * 10.0
    lost = (844.0 + 2 * 10.0) / DAY_S  # 1 %
    assert total_s(lora, hardware, checkpoint_bytes(lora), 1000, 86.4) == pytest.approx(training / (1 - lost))
    lora.cluster.signal_lead_s = 5  # no time to save: half of 100 steps are done again
    lost = (844.0 + 10.0 + 50 * 86.4) / DAY_S
    assert total_s(lora, hardware, checkpoint_bytes(lora), 1000, 86.4) == pytest.approx(training / (1 - lost))


def test_each_time_limit_is_a_start() -> None:
    config, hardware = composed("+exp=finance_callbot_lora"), find_hardware("rtx4090", {"requeue_s": 360.0})
    config.plan.interruptions_per_day, config.checkpoint.every_steps = 0.0, 0
    unlimited = total_s(config, hardware, checkpoint_bytes(config), 100, 10.0)
    config.cluster.time_limit_min = 60
    size = checkpoint_bytes(config)
    save = save_s(size, hardware)
    assert unlimited == pytest.approx(1000 + save)
    assert total_s(config, hardware, checkpoint_bytes(config), 100, 10.0) == pytest.approx(
        (1000 + save) / (1 - (360 + 2 * save) / 3600)
    )


def test_costs_and_calendar_days_follow_the_hours() -> None:
    config = composed(
        "+exp=finance_callbot",
        "plan.price_per_gpu_hour=0.5",
        "plan.currency=VND",
        "plan.hours_per_day=12",
    )
    forecast = plan_of(config).forecast
    assert forecast is not None and forecast.total_s and forecast.cost and forecast.days
    hours = forecast.total_s.mid / 3600
    assert forecast.cost.mid == pytest.approx(hours * 32 * 0.5) and forecast.currency == "VND"
    assert forecast.days.mid == pytest.approx(hours / 12)


# Refusals


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["deadline=20h"], "deadline=20h, but the run takes 3"),
        (["plan.num_samples=null"], "nobody knows how long the run is"),
        (["cluster.time_limit_min=2", "cluster.signal_lead_s=119"], "come back to the same step for ever"),
    ],
)
def test_what_cannot_be_done_in_time_is_refused_and_can_be_forced(overrides: list[str], words: str) -> None:
    with pytest.raises(PlanError) as refusal:
        plan_of(composed("+exp=vision_city", *overrides))
    assert words in str(refusal.value) and "plan.force=true" in str(refusal.value)
    assert any(
        words in line
        for line in plan_of(composed("+exp=vision_city", "plan.force=true", *overrides)).warnings
    )


def test_a_deadline_counts_by_the_calendar() -> None:
    """35.5 hours in which the nodes are ours 12 hours a day take 71."""
    with pytest.raises(PlanError, match=r"but the run takes 71\.\d h .* by the calendar on 4 nodes"):
        plan_of(composed("+exp=vision_city", "plan.hours_per_day=12"))
    assert plan_of(composed("+exp=vision_city", "plan.hours_per_day=12", "deadline=80h")).forecast is not None


def test_what_is_done_already_does_not_count_against_the_deadline() -> None:
    config = composed("+exp=vision_city", "deadline=18h")
    with pytest.raises(PlanError, match="deadline=18h"):
        plan_of(config)
    forecast = make_plan(config, find_workload(config), done_steps=244_150).forecast  # half of 488,300
    whole = plan_of(composed("+exp=vision_city")).forecast
    assert (
        forecast is not None
        and forecast.total_s is not None
        and whole is not None
        and whole.total_s is not None
    )
    assert forecast.total_s.mid == pytest.approx(whole.total_s.mid / 2, rel=1e-3)
    assert forecast.speed_up == whole.speed_up


def test_a_share_that_does_not_fit_is_cut_into_microbatches_that_do() -> None:
    """256 images a rank on two nodes keep 30 GiB of activations; who asks for them is refused."""
    config = composed("+exp=vision_city", "cluster.num_nodes=2", "deadline=100h")
    plan = plan_of(choose(config, find_workload(config)))
    assert plan.batch.num_microbatches > 1 and plan.batch.microbatch_size * plan.batch.num_microbatches == 256
    config.parallelism.microbatch_size = 256
    with pytest.raises(PlanError, match="a rank needs 36"):
        plan_of(choose(config, find_workload(config)))


def test_force_does_not_pass_what_can_never_run() -> None:
    with pytest.raises(PlanError, match="deadline=tomorrow: write 36h, 5d or 1d12h"):
        plan_of(composed("+exp=vision_city", "plan.force=true", "deadline=tomorrow"))
    with pytest.raises(PlanError, match="global_batch_size"):
        plan_of(composed("+exp=vision_city", "plan.force=true", "optim.global_batch_size=4097"))


def test_a_point_where_memory_ran_out_is_refused_the_next_time() -> None:
    config = composed("+exp=finance_callbot_lora")
    point = plan_of(config).point
    with pytest.raises(PlanError, match=r"memory ran out .* before, in run calls \(7_0_1\)"):
        make_plan(config, None, {point: "calls (7_0_1)"})


def test_a_deadline_without_figures_is_no_reason_to_refuse() -> None:
    plan = plan_of(composed("+exp=vision_city_laptop", "deadline=1h"))
    assert plan.forecast is None
    assert any("`hpctrain calibrate` measures; deadline=1h cannot be judged" in line for line in plan.lines())


@pytest.mark.parametrize(
    ("text", "seconds"), [("36h", 129_600), ("1d12h", 129_600), ("90m", 5400), ("1.5d", 129_600)]
)
def test_durations_are_read(text: str, seconds: float) -> None:
    assert parse_duration_s(text) == seconds


@pytest.mark.parametrize("text", ["", "36", "h", "36 h", "-3h", "36x"])
def test_other_texts_are_no_durations(text: str) -> None:
    assert parse_duration_s(text) is None


@pytest.mark.parametrize(
    ("seconds", "text"), [(720.0, "12 min"), (129_600.0, "36.0 h"), (86_400 * 4.25, "4.2 days")]
)
def test_durations_are_told_in_a_fitting_unit(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


def test_a_range_has_the_unit_of_its_middle() -> None:
    assert span_text(Interval(65.1 * 3600, 74.4 * 3600, 96 * 3600)) == "3.1 days (2.7–4.0 days)"


def test_a_plan_with_a_forecast_survives_json() -> None:
    plan = plan_of(composed("+exp=vision_city"))
    assert RunPlan.from_json(plan.to_json()) == plan


def test_packed_data_are_counted_and_not_assumed(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "meta.json").write_text(
        json.dumps({"num_samples": 1000, "identities": ["a"], "shards": 2 * [{"size_bytes": 30_000_000}]})
    )
    config = composed("+exp=vision_city", f"data.root={tmp_path}")
    assert isinstance(config.data, ImageDataConfig)
    workload = find_workload(config)
    assert workload is not None and workload.is_packed
    assert (workload.num_samples, workload.sample_bytes) == (1000, 60_000)
    assert workload.megapixels == pytest.approx(0.4)  # 0.15 bytes a pixel
