"""The contract between `core` and a model.

A model returns sums of weighted losses, one per term; `core` divides each sum by the number of labelled
samples of the whole global batch. So the result of a step does not depend on how the batch is cut over ranks.
Shapes: B samples, C channels, H height, W width, K behaviours.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from hpctrain.config.schema import ModelConfig


@dataclass(frozen=True)
class DataFacts:
    """What the training data say about the model's heads."""

    num_identities: int  #: identities of the training split
    behaviours: list[str]  #: names of the behaviours, in label order; empty for none


class Batch(Protocol):
    """The fields of a batch that models read; all tensors are on the model's device."""

    @property
    def image_BCHW(self) -> Tensor:
        """Images, uint8, RGB."""

    @property
    def identity_B(self) -> Tensor:
        """Identity labels, int64; -1 where a sample has none."""

    @property
    def behaviour_BK(self) -> Tensor:
        """Behaviour labels, float32, 0 or 1."""

    @property
    def has_behaviour_B(self) -> Tensor:
        """1.0 where a sample has behaviour labels, else 0.0."""

    @property
    def weight_B(self) -> Tensor:
        """Sample weights, float32; 0 for padding."""

    @property
    def sample_id_B(self) -> Tensor:
        """Number of each sample in its split, int64."""


class Model(nn.Module, ABC):
    """A network with its losses.

    `term_weights` lists the loss terms and their weights; its keys are exactly those that `forward` returns.
    """

    term_weights: dict[str, float]

    @abstractmethod
    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Return the loss sum of every term: scalars of at least fp32.

        Every parameter is in the graph of every term sum, taken together, whatever labels the batch has.
        """

    @abstractmethod
    def eval_outputs(self, batch: Batch) -> dict[str, Tensor]:
        """Return what `ModelSpec.evaluate` needs, each with B as its first dimension."""

    def no_decay_names(self) -> set[str]:
        """Return further parameters that weight decay must leave alone (position embeddings, …)."""
        return set()


#: reads a part of a parameter: its name, its whole shape, which part, the dtype of the result
ReadPiece = Callable[[str, tuple[int, ...], tuple[slice, ...], torch.dtype], Tensor]


@dataclass(frozen=True)
class StagedModel:
    """A kind of model that can be cut into pipeline stages and split by tensor parallelism.

    A stage takes (tokens or hidden states, **batch.inputs()) and returns hidden states [B, L, D], the last
    one each sequence's loss sum [B].
    """

    #: config, the blocks it has, whether it has the embedding, and the head; adapters included
    build_stage: Callable[[ModelConfig, range, bool, bool], nn.Module]
    blocks: str  #: name of the ModuleDict that holds the blocks
    tp_plan: dict[str, str]  #: pattern of module names → style of `core.tensor`
    #: name of the matrix that embedding and head share, None where they have one each
    tied_weight: Callable[[ModelConfig], str | None]
    tables: tuple[str, ...]  #: modules outside the blocks with a large matrix of their own
    initial_weights: Callable[[ModelConfig, int], ReadPiece]  #: config and seed


@dataclass(frozen=True)
class ModelSpec:
    """A kind of model, as `core` sees it: `build` for a whole one on every rank, or `staged`."""

    kind: str
    #: metrics from the outputs of the whole split, gathered in any order, padding included
    evaluate: Callable[[dict[str, np.ndarray[Any, Any]]], dict[str, float]]
    build: Callable[[ModelConfig, DataFacts], Model] | None = None
    #: submodules that `torch.compile` gains from; the rest is small
    compiled_modules: tuple[str, ...] = ()
    staged: StagedModel | None = None


def make_parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return optimizer groups: matrices and filters decay; norms, biases and named exceptions do not.

    Frozen parameters are left out. The order is that of `named_parameters()`, so it is the same on all ranks.
    """
    exempt = model.no_decay_names() if isinstance(model, Model) else set()
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    decayed = [p for name, p in trained if p.ndim >= 2 and name not in exempt]
    plain = [p for name, p in trained if p.ndim < 2 or name in exempt]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
