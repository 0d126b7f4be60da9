"""How long the planner takes: a plan of each headline run, and the search of all layouts by number of GPUs.

python bench/planning.py [--repetitions 5]
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable

from hpctrain import cli
from hpctrain.config.schema import Config
from hpctrain.launch.inputs import find_workload
from hpctrain.plan.hardware import hardware_of
from hpctrain.plan.plan import make_plan
from hpctrain.plan.search import search

AIMS_S = {64: 2.0, 1024: 10.0}


def composed(*overrides: str) -> Config:
    (point,) = cli.compose(list(overrides))
    return point.resolve(without_data=True)


def median_s(work: Callable[[], object], repetitions: int) -> float:
    times = []
    for _ in range(repetitions):
        begun = time.perf_counter()
        work()
        times.append(time.perf_counter() - begun)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repetitions", type=int, default=5)
    repetitions = parser.parse_args().repetitions
    print(f"{platform.machine()}, Python {platform.python_version()}; medians of {repetitions}\n")
    for name in ("vision_city", "finance_callbot", "finance_callbot_lora"):
        config = composed(f"+exp={name}")
        workload = find_workload(config)
        seconds = median_s(lambda c=config, w=workload: make_plan(c, w), repetitions)  # type: ignore[misc]
        print(f"{'plan of ' + name:<34}{seconds:>8.2f} s")
    for num_gpus in (32, 64, 256, 1024):
        config = composed(
            "+exp=finance_callbot", f"cluster.num_nodes={num_gpus // 8}", "optim.global_batch_size=1024"
        )
        found = search(config, hardware_of(config.cluster))
        seconds = median_s(lambda c=config: search(c, hardware_of(c.cluster)), repetitions)  # type: ignore[misc]
        aim = f"   (aim {AIMS_S[num_gpus]:g} s)" if num_gpus in AIMS_S else ""
        print(f"{f'search, {num_gpus} GPUs, {found.num_tried} layouts':<34}{seconds:>8.2f} s{aim}")


if __name__ == "__main__":
    main()
