"""Fits on one model size, predictions for the others, and the tables of docs/predictions.md."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

from hpctrain.config.hardware import Hardware, find_hardware
from tests.plan import others, roundpipe

MOST_CARDS = ("4 × rtx4090", "8 × rtx3090")  # of ResNet-50, those that are shown
Errors = Callable[[Hardware], list[float]]  # logarithms of predicted / published


def fit(hardware: Hardware, figure: str, low: float, high: float, errors: Errors) -> Hardware:
    """The value of a figure, between two limits, with the least squares of errors, by golden section."""
    ratio = (math.sqrt(5) - 1) / 2

    def squares(value: float) -> float:
        return sum(error**2 for error in errors(hardware.with_value(figure, value)))

    while high / low > 1.001:
        left, right = high / (high / low) ** ratio, low * (high / low) ** ratio
        low, high = (low, right) if squares(left) < squares(right) else (left, high)
    return hardware.with_value(figure, math.sqrt(low * high))


@cache
def rtx4090() -> Hardware:
    """RoundPipe's machine: the efficiency from what is known of Qwen3-1.7B there (PP=8, a block, the
    head), the links from its TP=8."""
    pipeline, tensor = roundpipe.RTX4090[:2]

    def compute(hardware: Hardware) -> list[float]:
        found = [math.log(roundpipe.predict_megatron(pipeline, hardware).seconds / pipeline.step_s)]
        for part in ("block", "head"):
            published = roundpipe.LAYERS_MS["Qwen3-1.7B", part]
            predicted = roundpipe.predict_layer_ms("Qwen3-1.7B", part, hardware)
            found += [math.log(mine / theirs) for mine, theirs in zip(predicted, published, strict=True)]
        return found

    hardware = fit(find_hardware("rtx4090"), "fp16_accumulation_efficiency", 0.4, 1.0, compute)
    return fit(hardware, "node8_gbps", 1.0, 20.0, lambda h: [_megatron_error(tensor, h)])


@cache
def a800() -> Hardware:
    """An A100 whose links are fitted on Qwen3-1.7B with TP=8."""
    tensor = roundpipe.A800[1]
    return fit(find_hardware("a100"), "node8_gbps", 50.0, 300.0, lambda h: [_megatron_error(tensor, h)])


@cache
def llmq_card() -> Hardware:
    """The efficiency in bf16, from llmq's Qwen2.5-1.5B on one card."""

    def errors(hardware: Hardware) -> list[float]:
        step_s = 512 * 1024 / others.LLMQ_ONE_CARD["Qwen2.5-1.5B"][2]
        return [math.log(others.predict_llmq("Qwen2.5-1.5B", hardware).seconds / step_s)]

    return fit(find_hardware("rtx4090"), "matmul_efficiency", 0.5, 1.2, errors)


@cache
def a100() -> Hardware:
    """The efficiency from Megatron's 22B."""
    run = others.KORTHIKANTI["22B"]
    return fit(
        find_hardware("a100"),
        "matmul_efficiency",
        0.4,
        1.0,
        lambda h: [math.log(others.predict_gpt(run, h).seconds / run.step_s)],
    )


@cache
def resnet_machine(device: str) -> Hardware:
    """tf_cnn_benchmarks adds up gradients after backward: no overlap; the rest from 64 images a card."""
    published = others.RESNET50[device][64]
    hardware = find_hardware(device).with_value("overlap", 0.0)
    for cards, figure in ((1, "convnet_efficiency"), (2, "node2_gbps"), (4, "node4_gbps"), (8, "node8_gbps")):
        if cards in published:
            low, high = (0.1, 0.9) if cards == 1 else (0.5, 50.0)

            def errors(hardware: Hardware, cards: int = cards) -> list[float]:
                return [math.log(others.predict_resnet50(64, cards, hardware) / published[cards])]

            hardware = fit(hardware, figure, low, high, errors)
    return hardware


def _megatron_error(run: roundpipe.MegatronRun, hardware: Hardware) -> float:
    return math.log(roundpipe.predict_megatron(run, hardware).seconds / run.step_s)


@cache
def step_rows() -> dict[str, tuple[float, float, bool]]:
    """Predicted and published seconds (ms for blocks and heads) of each measurement, and whether it was held
    out from the fit."""
    rows: dict[str, tuple[float, float, bool]] = {}
    for card, hardware, runs in (
        ("RTX 4090", rtx4090(), roundpipe.RTX4090),
        ("A800", a800(), roundpipe.A800),
    ):
        for run in runs:
            if run.tokens_per_s is not None:
                name = f"8 × {card}, Megatron {'PP' if run.pp > 1 else 'TP'}=8, {run.model}"
                fitted = run.model == "Qwen3-1.7B" and (card == "RTX 4090" or run.tp > 1)
                rows[name] = roundpipe.predict_megatron(run, hardware).seconds, run.step_s, not fitted
    for card, hardware, sharded in (
        ("RTX 4090", rtx4090(), roundpipe.FSDP_RTX4090),
        ("A800", a800(), roundpipe.FSDP_A800),
    ):
        for fsdp in sharded:
            name = f"8 × {card}, FSDP ZeRO-3, {fsdp.model}"
            rows[name] = roundpipe.predict_fsdp(fsdp, hardware).seconds, fsdp.step_s, True
    for size, gpt in others.KORTHIKANTI.items():
        rows[f"{8 * gpt.pp} × A100, Megatron TP=8 PP={gpt.pp}, GPT {size}"] = (
            others.predict_gpt(gpt, find_hardware("a100")).seconds,
            gpt.step_s,
            size != "22B",
        )
    for model, (_, _, tokens_per_s) in others.LLMQ_ONE_CARD.items():
        step = others.predict_llmq(model, find_hardware("rtx4090"))
        rows[f"1 × RTX 4090, llmq bf16, {model}"] = (
            step.seconds,
            512 * 1024 / tokens_per_s,
            model != "Qwen2.5-1.5B",
        )
    return rows


@cache
def layer_rows() -> dict[str, tuple[float, float, bool]]:
    """The same for RoundPipe's single blocks and heads, ms."""
    rows = {}
    for (model, part), published in roundpipe.LAYERS_MS.items():
        predicted = roundpipe.predict_layer_ms(model, part, rtx4090())
        for index, direction in enumerate(("forward", "backward")):
            rows[f"{part} {direction}, {model}"] = predicted[index], published[index], model != "Qwen3-1.7B"
    return rows


@cache
def resnet_rows() -> dict[str, tuple[float, float, bool]]:
    """The same for images a second of ResNet-50."""
    return {
        f"{cards} × {device}, {images} images a card": (
            others.predict_resnet50(images, cards, resnet_machine(device)),
            published,
            images != 64,
        )
        for device, batches in others.RESNET50.items()
        for images, scaling in batches.items()
        for cards, published in scaling.items()
    }


def memory_rows() -> dict[str, tuple[float, bool, bool]]:
    """GiB of the fullest card, whether that fits, and whether it did."""
    rows = {}
    for card, hardware, runs in (
        ("RTX 4090", find_hardware("rtx4090"), roundpipe.RTX4090),
        ("A800", find_hardware("a100"), roundpipe.A800),
    ):
        for run in runs:
            needed = roundpipe.megatron_bytes(run) / 2**30
            name = f"8 × {card}, Megatron {'PP' if run.pp > 1 else 'TP'}=8, {run.model}"
            rows[name] = needed, needed <= hardware["usable_gib"], run.tokens_per_s is not None
    return rows


def length_rows() -> dict[str, tuple[int, int]]:
    """The longest sequence that fits, thousands of tokens, predicted and published (exp/raw-data.csv)."""
    published = dict(zip(("PP 1.7B", "TP 1.7B", "PP 8B", "TP 8B"), (9, 62, 5, 20), strict=True))
    hardware = find_hardware("rtx4090")
    return {
        f"8 × RTX 4090, Megatron {name[:2]}=8, {run.model}, longest": (
            roundpipe.longest_sequence(run, hardware),
            longest,
        )
        for (name, longest), run in zip(published.items(), roundpipe.RTX4090, strict=False)
    }


def table_lines() -> list[str]:
    """Rows of the tables of docs/predictions.md."""
    lines = []
    most_cards = {name: row for name, row in resnet_rows().items() if name[:11] in MOST_CARDS}
    for rows in (step_rows(), layer_rows(), most_cards):
        for name, (predicted, published, held_out) in rows.items():
            kind = "held out" if held_out else "fit"
            error = f"{round(100 * (predicted / published - 1)):d} %"
            lines.append(f"| {name} | {predicted:.4g} | {published:.4g} | {error} | {kind} |")
    for name, (needed, fits, did) in memory_rows().items():
        words = ["out of memory", "runs"]
        lines.append(f"| {name} | {needed:.1f} | {words[fits]} | {words[did]} |")
    lines += [f"| {name} | {mine} | {theirs} |" for name, (mine, theirs) in length_rows().items()]
    return lines
