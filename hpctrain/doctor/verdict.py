"""Is a node fit for a run? Pure functions of what the nodes answered: by itself, and beside the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from hpctrain.doctor import counters
from hpctrain.doctor.drivers import first_drivers
from hpctrain.doctor.gpus import slowdowns

Answers = Mapping[str, dict[str, Any] | None]  # of each node; None from one that did not answer

SLOW = 0.5  # of the others' median
ENOUGH_DISK_GBPS = 0.2  # a disk this fast is not called slow, whatever the others do
HOT_C = 88
FOREIGN_MIB = 2048  # memory of a GPU that another process holds


@dataclass(slots=True)
class Verdict:
    """Of one node. It is bad if there is a reason."""

    node: str
    reasons: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)

    @property
    def is_bad(self) -> bool:
        return bool(self.reasons)

    def to_dict(self) -> dict[str, Any]:
        return {"verdict": "bad" if self.is_bad else "ok", **asdict(self)}


def judge(answers: Answers, *, num_gpus: int, is_cuda: bool) -> dict[str, Verdict]:
    """Verdicts on what each node said of itself.

    Args:
        num_gpus: of a node, that the run asks for.
        is_cuda: whether ranks compute on them.
    """
    verdicts = {node: Verdict(node) for node in answers}
    there = {node: answer for node, answer in answers.items() if answer is not None}
    for node in answers.keys() - there.keys():
        verdicts[node].reasons.append("did not answer")
    for node, answer in there.items():
        verdict = verdicts[node]
        if is_cuda:
            _judge_count(verdict, answer, num_gpus)
            _judge_driver(verdict, answer)
            _judge_products(verdict, answer)
        for gpu in answer.get("busy_gpus") or answer["gpus"]:
            _judge_gpu(verdict, gpu)
        _judge_storage(verdict, answer)
        if not answer["cpu"]["is_right"]:
            verdict.reasons.append("the CPU computed a wrong checksum")
    _compare(verdicts, there)
    return verdicts


def _judge_count(verdict: Verdict, answer: dict[str, Any], num_gpus: int) -> None:
    found = len(answer["gpus"])
    if found < num_gpus:
        why = f": {answer['no_gpus']}" if answer["no_gpus"] else ""
        verdict.reasons.append(f"{found} GPUs, the run asks for {num_gpus}{why}")
    for gpu in answer["gpus"]:
        if (gpu.get("used_mib") or 0) > FOREIGN_MIB:
            verdict.reasons.append(f"GPU {gpu['index']}: another process holds {gpu['used_mib']} MiB")


def _judge_driver(verdict: Verdict, answer: dict[str, Any]) -> None:
    cuda = (answer["torch"] or {}).get("cuda")
    branches = first_drivers(cuda) if cuda else None
    if answer["driver"] and branches and int(answer["driver"].split(".")[0]) < branches[1]:
        needs = f"torch for CUDA {cuda} needs {branches[1]}"
        verdict.reasons.append(f"driver {answer['driver']}: {needs}")


def _judge_products(verdict: Verdict, answer: dict[str, Any]) -> None:
    products = answer.get("matmul")
    if products is None:
        return
    if products["error"]:
        verdict.reasons.append(f"matrix products: {products['error']}")
    for gpu in products["gpus"]:
        if gpu["wrong"]:
            verdict.reasons.append(f"GPU {gpu['device']}: {gpu['wrong']} wrong matrix products")


def _judge_gpu(verdict: Verdict, gpu: dict[str, Any]) -> None:
    name = f"GPU {gpu.get('index')}"
    if gpu.get("ecc_uncorrected"):
        verdict.reasons.append(f"{name}: {gpu['ecc_uncorrected']} uncorrected ECC errors")
    for reason in slowdowns(gpu.get("throttle")):
        (verdict.notices if "software" in reason else verdict.reasons).append(f"{name}: {reason}")
    if (gpu.get("temperature_c") or 0) >= HOT_C:
        verdict.notices.append(f"{name}: {gpu['temperature_c']} °C")


def _judge_storage(verdict: Verdict, answer: dict[str, Any]) -> None:
    for disk in answer["disks"]:
        if disk["error"]:
            where = verdict.reasons if disk["what"] == "run folder" else verdict.notices
            where.append(f"{disk['what']} {disk['path']}: {disk['error']}")


def _compare(verdicts: dict[str, Verdict], answers: Mapping[str, dict[str, Any]]) -> None:
    """Nodes against each other: what half of the others do better is a fault, what none does is the make."""
    busy = {node: answer.get("busy_gpus") or [] for node, answer in answers.items()}
    gpus = {node: answer["gpus"] for node, answer in answers.items()}
    products = {node: (answer.get("matmul") or {}).get("gpus", []) for node, answer in answers.items()}
    for found, key, least, what in (
        (gpus, "pcie_width", 0.99, "PCIe width x{:g}, others x{:g}"),
        (busy, "pcie_gen", 0.99, "PCIe generation {:g}, others {:g}"),
        (busy, "sm_mhz", SLOW, "{:g} MHz, others {:g}"),
        (products, "tflops", SLOW, "{:g} TFLOP/s, others {:g}"),
    ):
        _compare_gpus(verdicts, found, key, least, what)
    for node, found_gpus in gpus.items():
        narrow = [g for g in found_gpus if (g.get("pcie_width") or 16) < (g.get("max_pcie_width") or 0)]
        if narrow and not any("PCIe width" in reason for reason in verdicts[node].reasons):
            widths = f"x{narrow[0]['pcie_width']} of x{narrow[0]['max_pcie_width']}"
            verdicts[node].notices.append(f"{len(narrow)} GPUs have PCIe {widths}")
    for key in ("write_gbps", "read_gbps"):
        speeds = {n: a["disks"][0][key] for n, a in answers.items() if a["disks"][0][key] is not None}
        middle = median(speeds.values()) if speeds else 0.0
        for node, speed in speeds.items():
            if speed < min(SLOW * middle, ENOUGH_DISK_GBPS):
                verb = key.partition("_")[0]
                text = f"run folder: {verb}s {speed:g} GB/s, others {middle:g}"
                verdicts[node].reasons.append(text)
    _compare_drivers(verdicts, answers)


def _compare_gpus(
    verdicts: dict[str, Verdict],
    gpus: Mapping[str, Sequence[dict[str, Any]]],
    key: str,
    least: float,
    what: str,
) -> None:
    """Every GPU against the median of all, of those that have the value."""
    known = [gpu[key] for found in gpus.values() for gpu in found if gpu.get(key) is not None]
    middle = median(known) if known else 0.0
    for node, found in gpus.items():
        for gpu in found:
            if gpu.get(key) is not None and gpu[key] < least * middle:
                name = gpu.get("index", gpu.get("device"))
                verdicts[node].reasons.append(f"GPU {name}: {what.format(gpu[key], middle)}")


def _compare_drivers(verdicts: dict[str, Verdict], answers: Mapping[str, dict[str, Any]]) -> None:
    drivers = [answer["driver"] for answer in answers.values() if answer["driver"]]
    usual = max(set(drivers), key=drivers.count) if drivers else None
    for node, answer in answers.items():
        if answer["driver"] not in (None, usual):
            verdicts[node].notices.append(f"driver {answer['driver']}, others {usual}")


def slow_links(links: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Links that cannot be made, or are far slower than the others."""
    speeds = [link["gbps"] or 0.0 for link in links]
    limit = SLOW * median(speeds) if speeds else 0.0
    return [link for link, speed in zip(links, speeds, strict=True) if speed < limit or not speed]


def judge_links(verdicts: dict[str, Verdict], links: Sequence[dict[str, Any]]) -> None:
    """Add to the verdicts what the links say: a node is bad if all its links out, or all into it, are slow.

    Between two nodes alone it stays open which one it is: a link that is not there makes both bad.
    """
    slow = slow_links(links)
    for link in slow:
        ends = (link["from"], link["to"])
        speed = f"{link['gbps']:g} GB/s" if link["gbps"] else f"no connection ({link['error']})"
        text = f"link {ends[0]} → {ends[1]}: {speed}"
        if len(verdicts) > 2 or link["gbps"]:
            for node in ends:
                verdicts[node].notices.append(text)
        else:
            for node in ends:
                verdicts[node].reasons.append(text)
    if len(verdicts) < 3:
        return
    for node, verdict in verdicts.items():
        for end in ("from", "to"):
            own = [link for link in links if link[end] == node]
            if own and all(link in slow for link in own):
                verdict.reasons.append(f"every link {end} this node is slow or broken")


def judge_interfaces(verdicts: dict[str, Verdict], answers: Answers, interface: str | None) -> None:
    """The chosen interface has to be there, up, and as fast as the others'."""
    if interface is None:
        return
    cards: dict[str, dict[str, Any]] = {}
    for node, answer in answers.items():
        if answer is None:
            continue
        found = [card for card in answer["nics"] if card["name"] == interface]
        if not found:
            names = ", ".join(card["name"] for card in answer["nics"])
            verdicts[node].reasons.append(f"no interface {interface}; there are {names}")
        elif found[0]["address"] is None:
            verdicts[node].reasons.append(f"interface {interface} has no IPv4 address")
        else:
            cards[node] = found[0]
    speeds = {node: card["speed_gbit"] for node, card in cards.items() if card["speed_gbit"]}
    middle = median(speeds.values()) if speeds else 0.0
    for node, speed in speeds.items():
        if speed < middle:
            verdicts[node].reasons.append(f"{interface} runs at {speed:g} Gbit/s, others at {middle:g}")


def better(links: Sequence[dict[str, Any]], again: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of two measurements of the same links the faster one each: what is slow twice is slow."""
    second = {(link["from"], link["to"]): link for link in again}
    pairs = [(link, second.get((link["from"], link["to"]), link)) for link in links]
    return [max(pair, key=lambda link: link["gbps"] or 0.0) for pair in pairs]


def judge_fabric(verdicts: dict[str, Verdict], answers: Answers) -> dict[str, Any]:
    """Whether the fabric lost packets while data crossed: `{lossless: true, false or null, why}`."""
    lost: list[str] = []
    paused = repeated = watched = 0
    for node, answer in answers.items():
        if answer is None:
            continue
        watched += any(counters.is_of_card(name) for name in answer["counters"])
        for name, count in answer["moved"].items():
            if name == "tcp/retransmitted":
                repeated += count
            elif counters.is_loss(name):
                lost.append(f"{node} {name} +{count}")
                is_cable = "crc" in name.lower() or "symbol" in name.lower()
                where = verdicts[node].reasons if is_cable else verdicts[node].notices
                where.append(f"{name} +{count} while data crossed")
            elif counters.is_pause(name):
                paused += count
    tcp = f"TCP sent {repeated} segments again"
    if lost:
        return {"lossless": False, "why": f"packets were lost: {', '.join(lost)}; {tcp}"}
    if not watched:
        return {"lossless": None, "why": f"no counters of cards can be read; {tcp}"}
    pauses = f"pauses and marks rose by {paused}: flow control works" if paused else "no pause was needed"
    return {"lossless": True, "why": f"no counter of lost packets moved; {pauses}; {tcp}"}
