"""Predictions against what others measured: docs/predictions.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.config.hardware import find_hardware
from tests.plan import predictions, roundpipe
from tests.plan.predictions import layer_rows, memory_rows, resnet_rows, step_rows, table_lines

# Held out and further off than 20 %; docs/predictions.md says what is known of the reasons.
MISSES = {"8 × A800, Megatron PP=8, Llama-3.1-8B", "8 × A800, FSDP ZeRO-3, Qwen3-32B"}


def test_held_out_steps_are_within_20_percent_but_for_two() -> None:
    far = {
        name
        for name, (predicted, published, held_out) in step_rows().items()
        if held_out and abs(predicted / published - 1) > 0.2
    }
    assert far == MISSES


def test_held_out_steps_on_4090s_are_within_10_percent() -> None:
    errors = {
        name: predicted / published - 1
        for name, (predicted, published, held_out) in step_rows().items()
        if held_out and "4090" in name
    }
    assert len(errors) == 8
    assert max(map(abs, errors.values())) < 0.1, errors


@pytest.mark.parametrize("model", ["Qwen3-1.7B", "Llama-3.1-8B"])
def test_pp_8_is_18_times_as_fast_as_tp_8_on_4090s(model: str) -> None:
    """39,081 to 2,132 and 16,412 to 921 tokens/s; on A800s with NVLink it is 1.1 and 1.3 times."""
    pipeline, tensor = (run for run in roundpipe.RTX4090 if run.model == model)
    predicted = [roundpipe.predict_megatron(run, predictions.rtx4090()).seconds for run in (tensor, pipeline)]
    assert predicted[0] / predicted[1] == pytest.approx(tensor.step_s / pipeline.step_s, rel=0.2)


def test_tp_8_loses_its_time_in_all_reduces() -> None:
    step = roundpipe.predict_megatron(roundpipe.RTX4090[3], predictions.rtx4090())
    assert step.parts["tp"] > 0.9 * step.seconds


def test_pp_8_is_predicted_faster_than_tp_8_wherever_it_was() -> None:
    """The one ranking that comes out wrong is that of A800s at 8B, whose PP=8 row is a miss."""
    wrong = []
    for runs, hardware in (
        (roundpipe.RTX4090, predictions.rtx4090()),
        (roundpipe.A800, predictions.a800()),
    ):
        for model in ("Qwen3-1.7B", "Llama-3.1-8B"):
            pipeline, tensor = (run for run in runs if run.model == model)
            predicted = [roundpipe.predict_megatron(run, hardware).seconds for run in (pipeline, tensor)]
            if (predicted[0] < predicted[1]) != (pipeline.step_s < tensor.step_s):
                wrong.append((model, runs is roundpipe.A800))
    assert wrong == [("Llama-3.1-8B", True)]


def test_single_blocks_and_heads_are_within_22_percent() -> None:
    errors = [abs(predicted / published - 1) for predicted, published, _ in layer_rows().values()]
    assert max(errors) < 0.22
    assert sum(errors) / len(errors) < 0.08


def test_resnet_50_is_within_16_percent_at_other_batches_than_the_fitted() -> None:
    rows = resnet_rows()
    assert sum(held_out for _, _, held_out in rows.values()) == 21
    assert max(abs(predicted / published - 1) for predicted, published, _ in rows.values()) < 0.165


def test_out_of_memory_is_told_from_what_ran_but_for_one() -> None:
    wrong = [name for name, (_, fits, did) in memory_rows().items() if fits != did]
    assert wrong == ["8 × A800, Megatron PP=8, Qwen3-32B"]


def test_the_catalogue_has_the_fitted_efficiencies() -> None:
    for name, figure, fitted in (
        ("rtx4090", "fp16_accumulation_efficiency", predictions.rtx4090()),
        ("rtx4090", "matmul_efficiency", predictions.llmq_card()),
        ("a100", "matmul_efficiency", predictions.a100()),
    ):
        assert find_hardware(name)[figure] == pytest.approx(fitted[figure], abs=0.02)


def test_the_page_shows_these_numbers() -> None:
    page = (Path(__file__).parents[2] / "docs" / "predictions.md").read_text()
    missing = [line for line in table_lines() if line not in page]
    assert not missing, "\n".join(missing)
