"""A run compared with its plan, once it has warmed up. Rank 0 only."""

from __future__ import annotations

from statistics import median
from typing import Any

from hpctrain.plan.memory import GIB
from hpctrain.plan.plan import RunPlan
from hpctrain.run.ledger import Ledger

WARM_UP_REPORTS = 1  # compilation, autotuning and full caches
REPORTS = 3  # whose median is compared


class PlanCheck:
    """Collects a few reports of the run and writes into the ledger how they lie beside the plan."""

    def __init__(self, plan: RunPlan, ledger: Ledger, attempt: str, *, on_gpu: bool) -> None:
        self._plan, self._ledger, self._attempt, self._on_gpu = plan, ledger, attempt, on_gpu
        self._records: list[dict[str, Any]] = []

    def add(self, record: dict[str, Any]) -> dict[str, Any] | None:
        """Take in a report; returns the comparison when it is made, once."""
        forecast = self._plan.forecast
        if forecast is None or len(self._records) == WARM_UP_REPORTS + REPORTS:
            return None
        self._records.append(record)
        if len(self._records) < WARM_UP_REPORTS + REPORTS:
            return None
        seen = self._records[WARM_UP_REPORTS:]
        facts = {
            "step": record["step"],
            "step_s": forecast.samples_per_step / median(each["samples_per_s"] for each in seen),
            "planned_step_s": [forecast.step_s.low, forecast.step_s.mid, forecast.step_s.high],
            "data_wait": median(each["data_wait"] for each in seen),
            "planned_data_wait": forecast.parts.get("data", 0.0) / sum(forecast.parts.values()),
        }
        if self._on_gpu and self._plan.memory:
            facts |= {
                "memory_gib": record["memory_gib"],
                "planned_memory_gib": self._plan.memory[0].tensors / GIB,  # rank 0 is at its first place
            }
        self._ledger.append("compared", attempt=self._attempt, **facts)
        return facts
