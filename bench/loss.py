"""Peak memory of the loss over 152,064 tokens: ours, whole and in chunks, against torch's cross-entropy.

Each runs forward and backward in a process of its own, in fp32 on the CPU. What is counted is the highest
resident memory above that of the inputs (hidden states and the matrix), as the kernel keeps it, so the two
gradients that are wanted are in it.

    python bench/loss.py [--tokens 2048] [--hidden 256]
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from hpctrain.models.token_loss import token_losses

VOCAB = 152_064
PLAIN = "F.cross_entropy(F.linear(h, W), label)"
LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    PLAIN: lambda h, w, label: F.cross_entropy(F.linear(h, w), label, reduction="sum"),
    "token_losses": lambda h, w, label: token_losses(h, w, label).sum(),
    "token_losses, chunks of 512": lambda h, w, label: token_losses(h, w, label, 512).sum(),
    "token_losses, chunks of 128": lambda h, w, label: token_losses(h, w, label, 128).sum(),
}


def memory_bytes(key: str) -> int:
    found = re.search(rf"^{key}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def measure(name: str, num_tokens: int, hidden_size: int) -> dict[str, float]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    hidden_TD = torch.randn(num_tokens, hidden_size, requires_grad=True)
    weight_VD = (torch.randn(VOCAB, hidden_size) / hidden_size**0.5).requires_grad_()
    label_T = torch.randint(VOCAB, (num_tokens,))
    before = memory_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    start = time.process_time()
    loss = LOSSES[name](hidden_TD, weight_VD, label_T)
    loss.backward()
    assert hidden_TD.grad is not None and weight_VD.grad is not None
    return {
        "peak_bytes": memory_bytes("VmHWM") - before,
        "cpu_s": time.process_time() - start,
        "loss": float(loss.detach()) / num_tokens,
        "gradient": float(hidden_TD.grad.norm() + weight_VD.grad.norm()),
    }


def in_a_process(name: str, num_tokens: int, hidden_size: int) -> dict[str, float]:
    options = [f"--tokens={num_tokens}", f"--hidden={hidden_size}", f"--only={name}"]
    command = [sys.executable, __file__, *options]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    told: dict[str, float] = json.loads(done.stdout)
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--only", choices=list(LOSSES), help="one loss in this process, as JSON")
    options = parser.parse_args()
    if options.only:
        print(json.dumps(measure(options.only, options.tokens, options.hidden)))
        return
    told = {name: in_a_process(name, options.tokens, options.hidden) for name in LOSSES}
    logits_gib = 4 * options.tokens * VOCAB / 2**30
    gradients_gib = 4 * options.hidden * (options.tokens + VOCAB) / 2**30
    print(f"torch {torch.__version__}; {options.tokens} tokens, hidden size {options.hidden}, fp32")
    print(f"logits once {logits_gib:.2f} GiB, gradients of the inputs {gradients_gib:.2f} GiB\n")
    print("| loss | peak above its inputs, GiB | CPU s |\n|---|---|---|")
    for name, each in told.items():
        print(f"| {name} | {each['peak_bytes'] / 2**30:.2f} | {each['cpu_s']:.1f} |")
    for key in ("loss", "gradient"):
        values = [each[key] for each in told.values()]
        assert max(values) - min(values) < 1e-5 * abs(values[0]), f"they compute another {key}: {values}"
    for name, each in told.items():
        if name != PLAIN:
            print(f"memory of {name} / plain: {each['peak_bytes'] / told[PLAIN]['peak_bytes']:.3f}")


if __name__ == "__main__":
    main()
