"""A small training run whose state depends on every part that a checkpoint must bring back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # every optimizer imports it: once here, not in each forked rank
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from hpctrain.checkpoint.reader import Loaded, load
from hpctrain.checkpoint.writer import save

ATTEMPT = "17_0_0"
OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)


class Training:
    """Adam with momentum state, dropout and data from this rank's own random numbers.

    Gradients are averaged by hand: DDP sums in another order in its first step after a restart.
    """

    def __init__(self, seed: int = 0, shard: bool = False) -> None:
        torch.manual_seed(seed)
        # 5 and 3 rows: uneven shards at 2 and 3 ranks, an empty one at 4.
        self.model = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Dropout(0.5), nn.Linear(5, 3))
        if shard:
            fully_shard(self.model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        self.shard = shard
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01 * (seed + 1))
        torch.manual_seed(1000 * seed + dist.get_rank())

    def train(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.optimizer.zero_grad()
            self.model(torch.randn(4, 7)).square().sum().backward()
            if not self.shard:
                for parameter in self.model.parameters():
                    dist.all_reduce(parameter.grad)
            self.optimizer.step()

    def state(self) -> dict[str, Any]:
        model, optim = get_state_dict(self.model, self.optimizer, options=OPTIONS)
        return {
            "model": model,
            "optim": optim,
            "per_rank": {"torch_rng": torch.get_rng_state(), "notes": (dist.get_rank(), b"own")},
        }

    def save(self, root: Path, step: int = 1, attempt: str = ATTEMPT, timeout_s: float = 20) -> Path:
        return save(
            root,
            step=step,
            attempt=attempt,
            state=self.state(),
            facts={"samples_consumed": 4 * step},
            group=dist.group.WORLD,
            timeout_s=timeout_s,
            layout={"dp_replicate": dist.get_world_size()},
        )

    def load(self, root: Path, timeout_s: float = 20) -> Loaded | None:
        state = self.state()
        loaded = load(root, state=state, group=dist.group.WORLD, timeout_s=timeout_s)
        if loaded:
            set_state_dict(
                self.model,
                self.optimizer,
                model_state_dict=state["model"],
                optim_state_dict=state["optim"],
                options=OPTIONS,
            )
            if loaded.per_rank:
                torch.set_rng_state(loaded.per_rank["torch_rng"])
        return loaded

    def values(self) -> dict[str, torch.Tensor]:
        """Model and optimizer by name, whole. Collective if sharded."""
        state = self.state()
        flat = {**state["model"], **state["optim"]}
        return {
            key: (value.full_tensor() if isinstance(value, DTensor) else torch.as_tensor(value)).clone()
            for key, value in flat.items()
            if isinstance(value, torch.Tensor | int | float) and not isinstance(value, bool)
        }


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """The same names and the same bits."""
    assert found.keys() == expected.keys()
    different = [name for name in found if not torch.equal(found[name], expected[name])]
    assert not different
