"""What a device, its node and its network can do: figures with their ranges, kinds and sources.

`conf/cluster/hardware/` has those of data sheets and reports; `hpctrain calibrate` writes those of a cluster
into `~/.config/hpctrain/cluster/hardware/`, which are read instead where the names are the same.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from hpctrain.config.load import conf_dir, user_conf_dir
from hpctrain.errors import ConfigError

KINDS = ("measured", "data_sheet", "reported", "guess")

# Every figure and what it means. Bandwidths are decimal: 1 GB/s is 1e9 bytes a second. The bus bandwidth of
# a collective is that of nccl-tests: bytes · (n-1)/n / time of a gather or a reduction among n ranks, twice
# that of an all-reduce; measured while all groups of the node do the same.
FIGURES = {
    "bf16_tflops": "dense products of bf16 and fp16, summed in fp32",
    "fp16_accumulation_tflops": "dense products of fp16, summed in fp16",
    "tf32_tflops": "dense products of fp32 with TF32",
    "fp32_tflops": "products of fp32 without TF32",
    "memory_gib": "memory of a device",
    "usable_gib": "what tensors and NCCL can take of it: without the driver and the CUDA context",
    "memory_gbps": "bandwidth of a device's memory",
    "matmul_efficiency": "share of the peak that a decoder's large products reach",
    "fp16_accumulation_efficiency": "the same with sums in fp16, where it differs",
    "attention_efficiency": "share of the peak that causal attention reaches",
    "convnet_efficiency": "share of the peak that convolutional backbones reach in training",
    "transformer_efficiency": "share of the peak that vision transformers reach in training",
    "launch_us": "the host's time to start an operator, when operators are not compiled",
    "host_gbps": "between a device and host memory, a direction, all devices of a node at once",
    "root_gbps": "bus bandwidth of a collective of two devices under one PCIe root",
    "node2_gbps": "bus bandwidth of a collective of two devices of a node",
    "node4_gbps": "bus bandwidth of a collective of four devices of a node",
    "node8_gbps": "bus bandwidth of a collective of eight devices of a node",
    "send_gbps": "from a device to another of its node",
    "node_latency_us": "of each hop of a collective within a node",
    "network_gbps": "of a node, a direction, all its ranks together",
    "network_latency_us": "of each hop of a collective between nodes",
    "overlap": "share of data-parallel communication that can hide behind computation",
    "host_memory_gib": "host memory of a node",
    "cores": "cores of a node",
    "host_memory_gbps": "bandwidth of a node's host memory, which updates of offloaded weights use",
    "storage_gbps": "reads of a node from the data's storage",
    "storage_total_gbps": "reads of all nodes together from the data's storage",
    "write_gbps": "writes of all nodes together to the run directory's storage",
    "decode_ms": "a core's time for an image, whatever its size",
    "decode_ms_per_megapixel": "a core's time to decode and augment a megapixel of JPEG",
    "requeue_s": "from the end of a start until the next one trains",
}

# Shares. A measured efficiency passes 1 where a card clocks higher than its data sheet's peak supposes.
MOST = {"overlap": 1.0} | {figure: 1.5 for figure in FIGURES if figure.endswith("_efficiency")}
FIELDS = ("value", "kind", "source", "low", "high")


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A number, the range it is likely in, how it is known, and from where."""

    value: float
    low: float
    high: float
    kind: str  #: one of KINDS
    source: str


class UnknownFigureError(KeyError):
    """A figure that nobody has measured or reported for this hardware."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """Figures by name. `hardware["bf16_tflops"]` is the value, or an UnknownFigureError."""

    name: str
    figures: Mapping[str, Figure]

    def __getitem__(self, figure: str) -> float:
        if figure not in self.figures:
            raise UnknownFigureError(figure)
        return self.figures[figure].value

    def __contains__(self, figure: str) -> bool:
        return figure in self.figures

    def get(self, figure: str) -> float | None:
        return self.figures[figure].value if figure in self.figures else None

    def with_value(self, figure: str, value: float) -> Hardware:
        """The same but for one value, taken as certain."""
        changed = replace(self.figures[figure], value=value, low=value, high=value)
        return Hardware(self.name, {**self.figures, figure: changed})


def hardware_folders() -> tuple[Path, ...]:
    """Where hardware files are looked for, first to last."""
    return user_conf_dir() / "cluster" / "hardware", conf_dir() / "cluster" / "hardware"


def known_hardware() -> list[str]:
    return sorted({path.stem for folder in hardware_folders() for path in folder.glob("*.yaml")})


def find_hardware(name: str, figures: Mapping[str, float] | None = None) -> Hardware:
    """The figures of that name: the user's own file if there is one, else the shipped one.

    Args:
        figures: values that replace those of the file (`cluster.figures`).

    Raises:
        ConfigError: no such file, or what it says is no figure.
    """
    hardware = _read(name, hardware_folders())
    for figure, value in (figures or {}).items():
        if figure not in FIGURES:
            found = f"no figure has this name; {_nearest(figure, FIGURES)}"
            raise ConfigError(f"cluster.figures.{figure}={value}", found)
        try:
            value = _number(figure, value)
        except ValueError as error:
            raise ConfigError(f"cluster.figures.{figure}={value}", str(error)) from None
        given = Figure(value=value, low=value, high=value, kind="measured", source="cluster.figures")
        hardware = Hardware(hardware.name, {**hardware.figures, figure: given})
    return hardware


def save_hardware(hardware: Hardware) -> Path:
    """Write the user's own file of that name, whole or not at all, over one that is there. Returns its
    path."""
    lines = ["# Written by `hpctrain calibrate`. What each figure means: hpctrain/config/hardware.py."]
    for name, figure in hardware.figures.items():
        fields = asdict(figure)
        if figure.low == figure.value == figure.high:
            del fields["low"], fields["high"]
        flow = yaml.safe_dump(fields, default_flow_style=True, sort_keys=False, width=10_000)
        lines.append(f"{name}: {flow.strip()}")
    path = hardware_folders()[0] / f"{hardware.name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}")  # not *.yaml, which would be a name of hardware
    partial.write_text("\n".join(lines) + "\n", encoding="utf-8")
    partial.replace(path)
    _read.cache_clear()
    return path


@cache
def _read(name: str, folders: tuple[Path, ...]) -> Hardware:
    for folder in folders:
        path = folder / f"{name}.yaml"
        if path.is_file():
            return parse_hardware(name, _text(name, path), str(path))
    raise ConfigError(f"cluster.hardware={name}", f"the catalogue has {', '.join(known_hardware())}")


def _text(name: str, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        found = f"it is not UTF-8: byte {error.object[error.start]:#04x} at {error.start}"
    except OSError as error:
        found = error.strerror or str(error)
    raise ConfigError(f"cluster.hardware={name}: {path}", found, "a text file of figures")


def parse_hardware(name: str, text: str, where: str) -> Hardware:
    """Figures from YAML: `bf16_tflops: {value: 165.2, kind: data_sheet, source: …}`, with `low` and `high`
    where the value is not certain. Raises ConfigError."""
    try:
        raw = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        if not isinstance(raw, dict | None):
            raise ValueError(f"it is {_said(raw)}, no table of figures")
        figures = {figure: _figure(figure, fields) for figure, fields in (raw or {}).items()}
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        found = f"no YAML: {line}{error.problem or error.context}"
    except (yaml.YAMLError, ValueError) as error:
        found = str(error)
    else:
        return Hardware(name, figures)
    raise ConfigError(f"cluster.hardware={name}: {where}", found, "value, kind and source for each figure")


def _figure(name: Any, fields: Any) -> Figure:
    """A figure from its fields. Raises ValueError, which says what is wrong with it."""
    if name not in FIGURES:
        raise ValueError(f"{name} is no figure; {_nearest(name, FIGURES)}")
    if not isinstance(fields, dict):
        raise ValueError(f"{name}: {_said(fields)} in place of {{value: …, kind: …, source: …}}")
    for field in fields:
        if field not in FIELDS:
            raise ValueError(f"{name}: {field} is no part of a figure; {_nearest(field, FIELDS)}")
    missing = [field for field in FIELDS[:3] if fields.get(field) is None]
    if missing:
        raise ValueError(f"{name}: no {' and no '.join(missing)}")
    if fields["kind"] not in KINDS:
        raise ValueError(f"{name}: kind {fields['kind']}; kinds: {', '.join(KINDS)}")
    if not isinstance(fields["source"], str):
        raise ValueError(f"{name}: source {_said(fields['source'])} is no text")
    given = [
        fields["value"] if fields.get(field) is None else fields[field] for field in ("low", "value", "high")
    ]
    low, value, high = (_number(name, each) for each in given)
    if not low <= value <= high:
        raise ValueError(f"{name}: low {low:g} <= value {value:g} <= high {high:g} does not hold")
    return Figure(value=value, low=low, high=high, kind=fields["kind"], source=fields["source"])


def _number(figure: str, value: Any) -> float:
    """A number that this figure can have. Raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{figure}: {_said(value)} is no number, such as 0.5 or 1.0e+3")
    if not 0 < value < math.inf:
        raise ValueError(f"{figure}: {value}, but a figure is positive and finite")
    if value > MOST.get(figure, math.inf):
        raise ValueError(f"{figure}: {value:g}, but it is a share, and at most {MOST[figure]:g}")
    return float(value)


def _said(value: Any) -> str:
    """What stands in a YAML file, in its words."""
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "a table"
    return "nothing" if value is None else f"{value!r}"


def _nearest(name: Any, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(str(name), list(known), n=1)
    return f"nearest: {near[0]}" if near else f"known: {', '.join(known)}"
