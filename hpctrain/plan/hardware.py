"""What the figures of a device mean for a run."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from hpctrain.config.hardware import Hardware, UnknownFigureError, find_hardware
from hpctrain.config.schema import ClusterConfig, OptimConfig, Precision

P = ParamSpec("P")
T = TypeVar("T")


def none_where_unknown(predict: Callable[P, T | None]) -> Callable[P, T | None]:
    """A prediction that is None where a figure is not known, such as the links of more ranks than were
    calibrated."""

    @wraps(predict)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> T | None:
        try:
            return predict(*args, **kwargs)
        except UnknownFigureError:
            return None

    return guarded


def unknown_figure(predict: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> str | None:
    """The first figure that a guarded prediction lacks; None where it lacks none."""
    try:
        getattr(predict, "__wrapped__", predict)(*args, **kwargs)
    except UnknownFigureError as error:
        return str(error.args[0])
    return None


def hardware_of(cluster: ClusterConfig) -> Hardware:
    """The figures of a cluster's devices. Raises ConfigError."""
    return find_hardware(cluster.hardware, cluster.figures)


def peak_tflops(hardware: Hardware, optim: OptimConfig) -> float | None:
    """Peak of a device at the precision of a run, TFLOP/s; None where it has no honest one."""
    return hardware.get(peak_figure(optim))


def peak_figure(optim: OptimConfig) -> str:
    """The figure of the peak at the precision of a run."""
    if optim.precision is Precision.fp32:
        return "fp32_tflops"
    return "fp16_accumulation_tflops" if optim.fp16_accumulation else "bf16_tflops"
