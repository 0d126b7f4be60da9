"""From measured times to figures. `core.measure` takes the times, `launch.calibrate` keeps what comes out.

A link's time is taken as a latency for each hop and the bytes over a bandwidth (Hockney 1994), fitted over
sizes; with rings a collective of n ranks makes 2 (n-1) hops for an all-reduce and n-1 for its halves, and
moves 2 (n-1)/n or (n-1)/n of its bytes through each rank (Patarasuk & Yuan 2009).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from hpctrain.config.hardware import MOST, Figure

COLLECTIVES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}  # times that the bytes go round

# Groups in which links are measured, and the figure of their bus bandwidth.
NODE_GROUPS = {"root": "root_gbps", "node2": "node2_gbps", "node4": "node4_gbps", "node8": "node8_gbps"}
NETWORK, WORLD = "network", "world"

# Layers in training, and the figure of the share of the peak that they reach.
LAYERS = {
    "decoder_products": "matmul_efficiency",
    "attention": "attention_efficiency",
    "convolutions": "convnet_efficiency",
    "vision_transformer": "transformer_efficiency",
}


@dataclass(frozen=True)
class Row:
    """How long one thing took, several times over."""

    what: str
    size: float  #: bytes, FLOPs, megapixels or a count, as `what` has it
    seconds: list[float]  #: of each repetition; in a group its last rank's, else each rank's own
    group: str = ""
    ranks: int = 1  #: of a group
    at_once: int = 1  #: ranks of a node, or groups of it, that did the same at the same time
    moved: float = 0.0  #: bytes from and to memory that the plan counts beside FLOPs

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    def quartiles_s(self) -> tuple[float, float]:
        """The middle half of the times lies between these."""
        if len(self.seconds) < 2:
            return self.median_s, self.median_s
        first, _, last = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return first, last


@dataclass(frozen=True)
class Calibration:
    """What the ranks of a calibration have measured, and where."""

    place: dict[str, Any]  #: date, job, nodes, ranks_per_node, torch, device, precision
    rows: list[Row]

    def to_dict(self) -> dict[str, Any]:
        return {"place": self.place, "rows": [asdict(row) for row in self.rows]}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Calibration:
        return cls(fields["place"], [Row(**row) for row in fields["rows"]])

    @property
    def source(self) -> str:
        place = self.place
        job = f"job {place['job']}" if place["job"] else "no job"
        where = f"{place['nodes']} nodes x {place['ranks_per_node']} ranks"
        return f"hpctrain calibrate, {place['date']}, {job}, {where}, torch {place['torch']}"

    def of(self, *what: str, group: str | None = None) -> list[Row]:
        return [row for row in self.rows if row.what in what and group in (None, row.group)]


def fit_line(points: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Intercept and slope of a line through (x, y), by least squares of the relative errors, so that small
    sizes decide the intercept and large ones the slope. Neither comes out negative."""
    weighted = [(x, y, 1.0 / y**2) for x, y in points]
    total = sum(w for _, _, w in weighted)
    mean_x = sum(w * x for x, _, w in weighted) / total
    mean_y = sum(w * y for _, y, w in weighted) / total
    spread = sum(w * (x - mean_x) ** 2 for x, _, w in weighted)
    if not spread:
        return 0.0, mean_y / mean_x
    slope = sum(w * (x - mean_x) * (y - mean_y) for x, y, w in weighted) / spread
    intercept = mean_y - slope * mean_x
    if intercept < 0:  # through the origin
        slope = sum(w * x * y for x, y, w in weighted) / sum(w * x * x for x, _, w in weighted)
    return max(0.0, intercept), max(0.0, slope)


@dataclass(frozen=True)
class Range:
    """A number and what it was seen between."""

    value: float
    low: float
    high: float

    def times(self, factor: float) -> Range:
        return Range(self.value * factor, self.low * factor, self.high * factor)


def middle_of(ranges: Sequence[Range]) -> Range:
    """The median of several, and the widest range."""
    value = statistics.median(each.value for each in ranges)
    return Range(value, min(each.low for each in ranges), max(each.high for each in ranges))


def rate(row: Row) -> Range:
    """Size over time, a second."""
    fast, slow = row.quartiles_s()
    return Range(row.size / row.median_s, row.size / slow, row.size / fast)


def fit_rows(rows: Sequence[Row]) -> tuple[Range, Range]:
    """Intercept and slope of time over size, each in the range that the middle half of the times spans."""
    fits = [fit_line((row.size, row.median_s) for row in rows)]
    fits += [fit_line((row.size, row.quartiles_s()[side]) for row in rows) for side in (0, 1)]
    columns = ([fit[column] for fit in fits] for column in (0, 1))
    intercept, slope = (Range(found[0], min(found), max(found)) for found in columns)
    return intercept, slope


def _links(rows: Sequence[Row]) -> tuple[Range | None, Range]:
    """Seconds of a hop, and bytes a second on the busiest way, of one kind of collective in one group."""
    what, ranks = rows[0].what, rows[0].ranks
    rounds = COLLECTIVES.get(what)
    hops = 1 if rounds is None else rounds * (ranks - 1)
    share = 1.0 if rounds is None else rounds * (ranks - 1) / ranks
    intercept, slope = fit_rows(rows)
    hop = intercept.times(1 / hops) if intercept.value > 0 else None
    if slope.low > 0:
        bandwidth = Range(1 / slope.value, 1 / slope.high, 1 / slope.low)
    else:  # a busy machine: times do not grow with size, and the largest size says what is reached
        bandwidth = rate(max(rows, key=lambda row: row.size))
    return hop, bandwidth.times(share)


def link_figures(calibration: Calibration) -> dict[str, Range]:
    """Bandwidths and latencies within a node and between nodes."""
    found: dict[str, list[Range]] = {}

    def note(figure: str, value: Range | None, scale: float) -> None:
        if value is not None:
            found.setdefault(figure, []).append(value.times(scale))

    for group in (*NODE_GROUPS, NETWORK):
        for what in (*COLLECTIVES, "send"):
            rows = calibration.of(what, group=group)
            if not rows:
                continue
            hop, bandwidth = _links(rows)
            if group == NETWORK:
                note("network_latency_us", hop, 1e6)
                note("network_gbps", bandwidth, rows[0].at_once * 1e-9)
                continue
            note("node_latency_us", hop, 1e6)
            if what == "send":
                note("send_gbps", bandwidth, 1e-9)
            else:
                note(NODE_GROUPS[group], bandwidth, 1e-9)
    return {figure: middle_of(values) for figure, values in found.items()}


def compute_figures(calibration: Calibration, known_tflops: float | None) -> dict[str, Range]:
    """Peak and efficiencies. Where no data sheet gives the peak, the fastest product is the peak."""
    rates = [rate(row) for row in calibration.of("matmul")]
    if not rates:
        return {}
    best, found = max(rates, key=lambda each: each.value), {}
    if known_tflops is None:
        found[calibration.place["peak"]] = best.times(1e-12)
    peak = best.value if known_tflops is None else known_tflops * 1e12
    copies = [rate(row).value for row in calibration.of("device_memory")]
    memory = statistics.median(copies) if copies else math.inf
    for what, figure in LAYERS.items():
        layers = [rate(_without_memory(row, memory)) for row in calibration.of(what)]
        if layers:
            found[figure] = middle_of(layers).times(1 / peak)
    return found


def _without_memory(row: Row, bytes_s: float) -> Row:
    """The times without the memory traffic for which plan/compute.py has a time of its own: of products both
    make a hypotenuse, of attention a sum. At most half of a time is taken away."""
    power, moved_s = (1 if row.what == "attention" else 2), row.moved / bytes_s
    left = [max(s**power - moved_s**power, (s / 2) ** power) ** (1 / power) for s in row.seconds]
    return replace(row, seconds=left)


def overlap_figure(calibration: Calibration) -> dict[str, Range]:
    """Of computation and communication that are as long, the share that hides: 1 where both together take
    as long as one of them. Less than 0.01 is told as that."""
    alone = [calibration.of(what) for what in ("compute_alone", "reduce_alone", "both")]
    if not all(alone):
        return {}
    compute, reduce, both = ([row.median_s, *row.quartiles_s()] for (row, *_) in alone)
    hidden = [(c + r - b) / min(c, r) for c, r, b in zip(compute, reduce, both, strict=True)]
    hidden = [min(1.0, max(0.01, share)) for share in hidden]
    return {"overlap": Range(hidden[0], min(hidden), max(hidden))}


def node_figures(calibration: Calibration) -> dict[str, Range]:
    """Memory, copies, storage and decoding."""
    found = {}
    for what, figure in (
        ("device_memory", "memory_gbps"),
        ("host_memory", "host_memory_gbps"),
        ("host_copy", "host_gbps"),
        ("read", "storage_gbps"),
        ("read_by_all", "storage_total_gbps"),
        ("write", "write_gbps"),
    ):
        rates = [rate(row).times(row.at_once * 1e-9) for row in calibration.of(what)]
        if rates:
            found[figure] = middle_of(rates)
    for row in calibration.of("launch"):
        fast, slow = row.quartiles_s()
        found["launch_us"] = Range(row.median_s, fast, slow).times(1e6)
    decoded = calibration.of("decode")
    if decoded:
        for figure, value in zip(("decode_ms", "decode_ms_per_megapixel"), fit_rows(decoded), strict=True):
            found[figure] = value.times(1e3)
    for figure in ("memory_gib", "usable_gib", "host_memory_gib", "cores"):
        if figure in calibration.place:
            found[figure] = Range(*3 * [calibration.place[figure]])
    return found


def figures_of(calibration: Calibration, known_tflops: float | None) -> dict[str, Figure]:
    """Every figure that was measured, four digits of it; a share above what it can be (MOST) as the most.

    Args:
        known_tflops: The data sheet's peak at the precision of the run, if there is one.
    """
    ranges = {
        **compute_figures(calibration, known_tflops),
        **link_figures(calibration),
        **overlap_figure(calibration),
        **node_figures(calibration),
    }
    return {name: _figure(name, each, calibration.source) for name, each in ranges.items() if each.low > 0}


def _figure(name: str, found: Range, source: str) -> Figure:
    most = MOST.get(name, math.inf)
    value, low, high = (min(most, float(f"{each:.4g}")) for each in (found.value, found.low, found.high))
    return Figure(value=value, low=min(low, value), high=max(high, value), kind="measured", source=source)
