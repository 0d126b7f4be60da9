"""What the figures of a device mean for a run."""

from __future__ import annotations

from hpctrain.config.hardware import Hardware, find_hardware
from hpctrain.config.schema import ClusterConfig, OptimConfig, Precision


def hardware_of(cluster: ClusterConfig) -> Hardware:
    """The figures of a cluster's devices. Raises ConfigError."""
    return find_hardware(cluster.hardware, cluster.figures)


def peak_tflops(hardware: Hardware, optim: OptimConfig) -> float | None:
    """Peak of a device at the precision of a run, TFLOP/s; None where it has no honest one."""
    if optim.precision is Precision.fp32:
        return hardware.get("fp32_tflops")
    return hardware.get("fp16_accumulation_tflops" if optim.fp16_accumulation else "bf16_tflops")
