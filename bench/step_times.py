"""How far predicted step times and memory are from what others published: fits on one model, all predictions.

No GPU is used. Prints the fitted figures, which belong into conf/cluster/hardware/, and the rows of
docs/predictions.md.

    python bench/step_times.py
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # published figures lie with the tests that hold them

from tests.plan import predictions


def main() -> None:
    fitted = {
        "RoundPipe's 8 × RTX 4090": (predictions.rtx4090(), ("fp16_accumulation_efficiency", "node8_gbps")),
        "RoundPipe's 8 × A800": (predictions.a800(), ("node8_gbps",)),
        "Megatron's A100": (predictions.a100(), ("matmul_efficiency",)),
        "llmq's RTX 4090": (predictions.llmq_card(), ("matmul_efficiency",)),
    }
    for device in ("rtx4090", "rtx3090"):
        figures = ("convnet_efficiency", "node2_gbps", "node4_gbps", "node8_gbps")
        fitted[f"server-gear's {device}"] = (predictions.resnet_machine(device), figures)
    for name, (hardware, figures) in fitted.items():
        print(f"{name}: " + ", ".join(f"{figure} {hardware[figure]:.3g}" for figure in figures))
    print("\n".join(predictions.table_lines()))
    rows = [*predictions.step_rows().values(), *predictions.layer_rows().values()]
    errors = [abs(predicted / published - 1) for predicted, published, held_out in rows if held_out]
    print(f"held out: median error {statistics.median(errors):.0%}, largest {max(errors):.0%}")


if __name__ == "__main__":
    main()
