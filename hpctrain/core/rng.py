"""Random numbers: the same initial weights on every rank, a stream of its own for each rank's dropout."""

from __future__ import annotations

import torch


def seed_weights(seed: int) -> None:
    """Before the model is built: the same on every rank."""
    torch.manual_seed(seed)


def seed_rank(seed: int, rank: int, step: int) -> None:
    """Before training: a stream of this rank's own, also after a resume on another number of ranks."""
    torch.manual_seed(((seed * 1_000_003 + step) * 65_537 + rank + 1) % 2**63)


def dropout_keys(seed: int, step: int, sample_id_B: torch.Tensor) -> torch.Tensor:
    """A number for each sequence of each step, int64, from which its dropout masks follow on every rank."""
    number = (step * 1_000_003 + seed + 1) * 0x9E3779B1
    return sample_id_B * 0x2545F4914F6CDD1D + ((number + 2**63) % 2**64 - 2**63)  # wraps like int64


def rng_state(device: torch.device) -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_rng_state(state: dict[str, torch.Tensor], device: torch.device) -> None:
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
