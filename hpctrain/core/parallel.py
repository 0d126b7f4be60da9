"""A model as it lies on the ranks: `Replicated` or `Hybrid`. What the loop and evaluation know of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor, nn


class Parallel(Protocol):
    """This rank's part of the model, under the names of the whole one."""

    @property
    def model(self) -> nn.Module:
        """This rank's parameters and buffers."""

    dp_rank: int  #: ranks that see the same samples have the same number
    dp: int  #: how many such numbers there are
    reads_for_replica: bool  #: one of the ranks with a number, which counts their samples
    eval_group: int  #: batches that `eval_outputs` wants at once

    def start(self, first: Callable[[], Sequence[Any]]) -> None:
        """Get ready to train, once the state is restored. `first` gives the first microbatches."""

    def backward(self, microbatches: Sequence[Any], step: int, scale: Tensor | None = None) -> Tensor:
        """Add the gradients of a step; returns this rank's share of the loss, a device scalar. Collective.

        Args:
            scale: What the loss is multiplied by for backward, and so the gradients are.
        """

    def counted_parameters(self) -> list[nn.Parameter]:
        """The trained parameters that the gradient norm counts on this rank."""

    def eval_outputs(self, batches: Sequence[Any]) -> list[dict[str, Tensor]]:
        """What the metrics need of each batch; the same keys on all ranks, with length 0 where a rank has
        nothing to add. Collective."""

    def flops_per_sample(self, first: Callable[[], Sequence[Any]]) -> float:
        """Model FLOPs of a training sample, forward and backward, without recomputation."""
