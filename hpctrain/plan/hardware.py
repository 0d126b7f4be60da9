"""What a device can do. Each number has its source."""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Peaks are dense and per device; None where no honest number exists."""

    name: str
    bf16_tflops: float | None  #: with fp32 accumulation, which is what torch uses
    fp32_tflops: float | None  #: without TF32
    memory_gib: float | None  #: what a process can use


CATALOGUE = {
    # NVIDIA Ada whitepaper: 165.2 bf16/fp16 with fp32 accumulation, 82.6 fp32; usable memory as reported by
    # trainers on a driver with 24080 MiB in total.
    "rtx4090": Hardware(name="rtx4090", bf16_tflops=165.2, fp32_tflops=82.6, memory_gib=22.2),
    "cpu": Hardware(name="cpu", bf16_tflops=None, fp32_tflops=None, memory_gib=None),
}


def find_hardware(name: str) -> Hardware:
    """Raises ConfigError for a name that the catalogue does not have."""
    if name not in CATALOGUE:
        raise ConfigError(f"cluster.hardware={name}", f"the catalogue has {', '.join(CATALOGUE)}")
    return CATALOGUE[name]
