"""What a run is at a step, and its way into and out of a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from hpctrain.core import rng
from hpctrain.core.loss_scale import LossScale
from hpctrain.core.mesh import Mesh
from hpctrain.core.optim import Ema

_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)
_MASK = (1 << 64) - 1


def hash_samples(sample_ids: npt.NDArray[np.int64], step: int) -> int:
    """A 64-bit sum over the samples of a step, whatever the order in which ranks add them up.

    Each (sample, step) is mixed by splitmix64's finaliser (Steele, Lea & Flood 2014), so that a repeated,
    missing or swapped batch changes the sum.
    """
    with np.errstate(over="ignore"):
        x = sample_ids.astype(np.uint64) + np.uint64(step + 1) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return int((x ^ (x >> np.uint64(31))).sum(dtype=np.uint64))


@dataclass
class Progress:
    """How far a run is. `samples_hash` of the steps before this start is the whole run's; what was read
    since is this rank's share until `total_hash` adds the ranks up."""

    step: int = 0  #: finished optimizer steps
    samples_consumed: int = 0
    evaluated_step: int = 0  #: step of the last evaluation
    saved_step: int | None = None
    samples_hash: int = 0
    own_hash: int = 0
    damaged: list[tuple[int, str]] = field(default_factory=list)  #: not yet written to the ledger

    def advance(self, microbatches: list[Any], samples: int) -> None:
        """Count a finished step of `samples` real samples over all ranks."""
        for microbatch in microbatches:
            self.own_hash = (self.own_hash + hash_samples(microbatch.sample_id_B.numpy(), self.step)) & _MASK
            self.damaged += microbatch.damaged
        self.step += 1
        self.samples_consumed += samples

    def total_hash(self, mesh: Mesh) -> int:
        """The hash over all steps and ranks. Collective."""
        signed = self.own_hash - (1 << 64) if self.own_hash >> 63 else self.own_hash
        total = torch.tensor([signed], dtype=torch.int64)
        dist.all_reduce(total, group=mesh.control)
        return (self.samples_hash + int(total)) & _MASK

    def to_facts(self, samples_hash: int) -> dict[str, Any]:
        return {
            "samples_consumed": self.samples_consumed,
            "evaluated_step": self.evaluated_step,
            "samples_hash": f"{samples_hash:016x}",
        }

    @classmethod
    def from_facts(cls, step: int, facts: dict[str, Any]) -> Progress:
        return cls(
            step=step,
            samples_consumed=facts["samples_consumed"],
            evaluated_step=facts["evaluated_step"],
            saved_step=step,
            samples_hash=int(facts["samples_hash"], 16),
        )


@dataclass
class Kept:
    """What of a run changes from step to step, on this rank."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    ema: Ema | None = None
    loss_scale: LossScale | None = None


def make_state(kept: Kept, device: torch.device) -> dict[str, Any]:
    """Everything that decides how the run goes on, as a nested dict for the checkpoint. The learning rate
    is a function of the step and needs no entry; frozen weights come from where they came from."""
    frozen = {name for name, p in kept.model.named_parameters() if not p.requires_grad}
    state: dict[str, Any] = {
        "model": {name: v for name, v in kept.model.state_dict().items() if name not in frozen},
        "optim": get_optimizer_state_dict(kept.model, kept.optimizer, options=_OPTIONS),
        "per_rank": {"rng": rng.rng_state(device)},
    }
    if kept.ema is not None:
        state["ema"] = dict(kept.ema.average)
    if kept.loss_scale is not None:
        state["loss_scale"] = kept.loss_scale.state_dict()
    return state


def restore_state(
    state: dict[str, Any], per_rank: dict[str, Any] | None, kept: Kept, device: torch.device
) -> None:
    """Put a loaded state to work. All but the optimizer's was filled in place."""
    set_optimizer_state_dict(kept.model, kept.optimizer, state["optim"], options=_OPTIONS)
    if per_rank is not None:
        rng.set_rng_state(per_rank["rng"], device)
