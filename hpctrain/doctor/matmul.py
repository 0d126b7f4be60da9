"""Matrix products with known results, on every GPU of a node at once: `python -m hpctrain.doctor.matmul`.

A child process of the probe, so that a GPU that hangs or a torch that does not load harms nobody else. Prints
`GPU 0`, `GPU 1`, … as it turns to them, `busy` when all are at work, then a line of JSON.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from typing import Any

SIZE = 4096
BUSY_S = 4.0
# Of 16 MiB of zero bytes, as sha256sum(1) says it.
ZEROS_SHA256 = "080acf35a507ac9849cfcba47dc2ad83e01b75663a516279c8b9d243b719643e"


def check_cpu() -> dict[str, Any]:
    """A checksum of this node's CPU against a known one, and how fast it was."""
    begun = time.perf_counter()
    is_right = hashlib.sha256(bytes(2**24)).hexdigest() == ZEROS_SHA256
    # The sum of the squares below n is (n - 1) n (2 n - 1) / 6.
    n = 10**6
    is_right = is_right and sum(i * i for i in range(n)) == (n - 1) * n * (2 * n - 1) // 6
    return {"is_right": is_right, "seconds": round(time.perf_counter() - begun, 3)}


def check_gpus() -> list[dict[str, Any]]:
    """Wrong products and TFLOP/s of each visible GPU, all busy at once."""
    import torch

    if not torch.cuda.is_available():
        return []
    return check_devices([torch.device("cuda", index) for index in range(torch.cuda.device_count())])


def check_devices(devices: Sequence[Any], size: int = SIZE, busy_s: float = BUSY_S) -> list[dict[str, Any]]:
    """The same for these devices. Every tenth product is looked at."""
    pairs = []
    for index, device in enumerate(devices):
        print(f"GPU {index}", flush=True)
        a, b, expected = make_pair(size, device)
        a @ b
        pairs.append((a, b, expected))
    counts, errors = [0] * len(devices), [0] * len(devices)
    begun = time.perf_counter()
    print("busy", flush=True)
    while True:
        products = [[a @ b for _ in range(20)] for a, b, _ in pairs]
        for index, (each, (_, _, expected)) in enumerate(zip(products, pairs, strict=True)):
            counts[index] += len(each)
            errors[index] += sum(not is_right(product, expected) for product in each[::10])
        seconds = time.perf_counter() - begun
        if seconds >= busy_s:
            break
    speeds = [round(count * 2 * size**3 / seconds / 1e12, 1) for count in counts]
    return [{"device": n, "wrong": errors[n], "tflops": speeds[n]} for n in range(len(devices))]


def make_pair(size: int, device: Any) -> tuple[Any, Any, Any]:
    """Two matrices of -1, 0, 1 in fp16, and the exact product times a vector of ones and twos.

    Every sum is an integer below 2048 in size, which fp16 holds exactly, if the sums are made in fp32: a
    third of the terms is 0 and the signs fall like coins.
    """
    import torch

    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-1, 2, (size, size), generator=generator) for _ in range(2))
    weights = 1 + torch.arange(size) % 2
    rows = a.double() @ (b.double() @ weights.double())  # integers far below 2^53
    expected = (rows.to(device), weights.double().to(device))
    return a.to(device, torch.float16), b.to(device, torch.float16), expected


def is_right(product: Any, expected: Any) -> bool:
    """Whether every row of the product is as expected (Freivalds 1977: one wrong entry shows in its row)."""
    import torch

    rows, weights = expected
    return bool(torch.equal(product.double() @ weights, rows))


if __name__ == "__main__":
    print(json.dumps(check_gpus()))
