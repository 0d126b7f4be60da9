"""A forecast in words, and what it means for a deadline and a time limit."""

from __future__ import annotations

from hpctrain.config.schema import ClusterKind, Config
from hpctrain.plan.durations import deadline_s, duration_text, span_text
from hpctrain.plan.forecast import Forecast

SMALL_SHARE = 0.01  # of a step, below which a cause is not told


def time_findings(config: Config, forecast: Forecast | None) -> list[str]:
    """Why a run would not be done in time, or not get on between two time limits."""
    found = []
    wanted = deadline_s(config)
    if config.deadline and forecast is not None and forecast.total_s is None:
        found.append(
            f"deadline={config.deadline}: nobody knows how long the run is; data.root of packed data, "
            "plan.num_samples, or plan.num_tokens"
        )
    if forecast is None:
        return found
    total, nodes = forecast.elapsed_s, config.cluster.num_nodes
    if wanted and total is not None and total.mid > wanted:
        found.append(
            f"deadline={config.deadline}, but the run takes {span_text(total)} "
            f"{'by the calendar ' if config.plan.hours_per_day < 24 else ''}on "
            f"{nodes} node{'s' * (nodes != 1)}{_why(forecast)}{_advice(config)}"
        )
    limit_min, lead_s = config.cluster.time_limit_min, config.cluster.signal_lead_s
    if limit_min is not None:
        needed = forecast.step_s.mid + 2 * forecast.save_s.mid + lead_s
        if needed > limit_min * 60:
            found.append(
                f"cluster.time_limit_min={limit_min}: a start loads, does a step and saves, and is warned "
                f"cluster.signal_lead_s={lead_s} ahead: {duration_text(needed)} in all; it would "
                "come back to the same step for ever"
            )
    return found


def _advice(config: Config) -> str:
    if config.cluster.kind is ClusterKind.local:
        return ""
    more = "cluster.num_nodes=-1 takes as many as it needs, `hpctrain plan` shows them"
    return f"; {more}"


def _why(forecast: Forecast) -> str:
    supply = forecast.supply
    if not forecast.parts.get("data") or supply is None or supply.rate is None:
        return ""
    return f", because {supply.limit} gives {supply.rate:,.0f} samples/s and no more"


def forecast_lines(forecast: Forecast) -> list[str]:
    """The time side of a plan for a terminal."""
    step, samples = forecast.step_s, forecast.samples_per_s
    tokens = forecast.tokens_per_sample
    rate = f"{samples.scaled(tokens).text()} tokens/s" if tokens else f"{samples.text()} images/s"
    parts = sorted(forecast.parts.items(), key=lambda part: -part[1])
    total = sum(forecast.parts.values())
    shares = ", ".join(f"{name} {value / total:.0%}" for name, value in parts if value > SMALL_SHARE * total)
    lines = [f"time    {step.text()} s a step: {shares}; {rate}"]
    if forecast.influences:
        lines.append("        uncertain: " + "; ".join(each.text() for each in forecast.influences[:3]))
    if forecast.total_s is not None:
        lines += _run_lines(forecast)
    if forecast.supply is not None and forecast.supply.rate is not None:
        lines.append(_supply_line(forecast))
    save = forecast.save_s
    lines.append(
        f"saves   {forecast.checkpoint_bytes / 1e9:.1f} GB, {save.text(2)} s each; "
        f"{forecast.disk_bytes / 1e9:.0f} GB of disk for those that are kept"
    )
    if save.mid > forecast.signal_lead_s:
        lines.append(
            f"        longer than the warning before the end, cluster.signal_lead_s="
            f"{forecast.signal_lead_s:g}: an ended start goes back to the last regular save"
        )
    return lines


def _run_lines(forecast: Forecast) -> list[str]:
    assumed = ", if there are as many samples as plan.num_samples or num_tokens says" * forecast.is_assumed
    total = forecast.total_s
    assert total is not None
    done = f", {forecast.done_steps:,} of them done" if forecast.done_steps else ""
    lines = [f"run     {forecast.num_steps:,} steps{done}: {span_text(total)}{assumed}"]
    elapsed = forecast.elapsed_s
    if forecast.deadline_s is not None and elapsed is not None:
        sure = "surely" if elapsed.high <= forecast.deadline_s else "probably"
        if elapsed.mid <= forecast.deadline_s:
            lines.append(f"        meets its deadline of {duration_text(forecast.deadline_s)} {sure}")
    if forecast.one_device_s is not None and forecast.speed_up is not None:
        lines.append(
            f"        one card would take {duration_text(forecast.one_device_s)}: "
            f"{forecast.speed_up:.1f} times as long"
        )
    if forecast.days is not None and forecast.days.mid * 86_400 > 1.01 * total.mid:
        lines.append(f"        {forecast.days.text(2)} days by the calendar, with plan.hours_per_day")
    if forecast.cost is not None:
        lines.append(f"        costs {forecast.cost.text()} {forecast.currency}")
    return lines


def _supply_line(forecast: Forecast) -> str:
    supply, wanted = forecast.supply, forecast.samples_per_s.mid
    assert supply is not None and supply.rate is not None
    what = "images" if not forecast.tokens_per_sample else "sequences"
    rates = {"decoding": supply.decode, "storage": supply.storage}
    told = ", ".join(f"{name} gives {rate:,.0f}/s" for name, rate in rates.items() if rate is not None)
    waits = forecast.parts.get("data", 0.0) > 0
    verdict = f"{supply.limit} is the limit" if waits else "enough"
    size = f" of {supply.sample_bytes / 1e3:.0f} kB"
    if supply.decode is not None:
        size += f", {supply.megapixels:.2g} MP"
    return f"supply  {wanted:,.0f} {what}/s{size}: {told} with {supply.num_workers} loader workers: {verdict}"
