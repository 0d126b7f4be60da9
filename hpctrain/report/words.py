"""Numbers of a plan in words."""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.plan.memory import GIB

CAUSES = {
    "compute": "computing",
    "recompute": "computing again (checkpointing)",
    "tp": "collectives of tp",
    "dp": "gathers and reductions of dp",
    "classes": "collectives of the class-parallel head",
    "pp": "messages between stages",
    "bubble": "idle in the pipeline (bubble)",
    "optimizer": "optimizer",
    "offload": "copies to and from host memory",
    "data": "waiting for data",
}


def seconds_text(seconds: float) -> str:
    """`325 ms`, `14.7 s`, `1,010 s`."""
    if 0 < seconds < 1e-3:
        return f"{seconds * 1e6:.3g} µs"
    if 0 < seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 999.5 else f"{seconds:,.0f} s"


def gib_text(size: int) -> str:
    """`21.2 GiB`, `128 MiB`."""
    return f"{size / GIB:.1f} GiB" if size >= 0.95 * GIB else f"{size / 2**20:.3g} MiB"


def count_text(count: int, what: str) -> str:
    """`1 node`, `4 nodes`."""
    return f"{count:,} {what}" + "s" * (count != 1)


UNITS = {
    "_tflops": " TFLOP/s",
    "_gbps": " GB/s",
    "_gib": " GiB",
    "_us": " µs",
    "_ms": " ms",
    "_ms_per_megapixel": " ms/megapixel",
    "_s": " s",
}


def unit_of(figure: str) -> str:
    """The unit of a figure, from its name; nothing for shares and counts."""
    return next((unit for ending, unit in UNITS.items() if figure.endswith(ending)), "")


def numbers_text(numbers: Sequence[int]) -> str:
    """`1–3, 5, 7–16`, of numbers in order."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number])
    return ", ".join("–".join(map(str, run)) for run in runs)
