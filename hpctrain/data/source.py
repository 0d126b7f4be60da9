"""Where samples come from: packed images or packed tokens, behind one face."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from pathlib import Path
from typing import Any

from hpctrain.config.schema import Config, ImageDataConfig, TokenDataConfig, VisionConfig
from hpctrain.data.loader import EvalLoader, TrainLoader, build_eval_loader, build_train_loader
from hpctrain.data.sequences import PackedSequences
from hpctrain.data.shards import ShardSet
from hpctrain.data.token_loader import build_token_eval_loader, build_token_train_loader
from hpctrain.data.tokens import TokenSet

EVAL_BATCH_SIZE = 64


class Source(ABC):
    """The splits of a run's data, and the loaders over them.

    Attributes:
        num_samples: samples of the training split.
        facts: what the data say about the model's heads, and what a trained run keeps of them; JSON values.
    """

    num_samples: int
    facts: dict[str, Any]

    def __init__(self, config: Config) -> None:
        self.config = config
        val = Path(config.data.root) / "val"
        self.val = val if (val / "meta.json").exists() else None

    @abstractmethod
    def train_loader(
        self, *, rank: int, world: int, samples_consumed: int, microbatch_size: int, pin_memory: bool
    ) -> TrainLoader[Any]:
        """The rest of the run for one data-parallel rank; see `build_train_loader`."""

    @abstractmethod
    def eval_loader(
        self, *, rank: int, world: int, microbatch_size: int, pin_memory: bool
    ) -> EvalLoader[Any]:
        """The val split, which must exist, for one data-parallel rank; see `build_eval_loader`."""

    def _training(self) -> dict[str, Any]:
        optim = self.config.optim
        return {
            "data": self.config.data,
            "seed": self.config.seed,
            "global_batch_size": optim.global_batch_size,
            "num_epochs": optim.num_epochs,
        }


class ImageSource(Source):
    """Images packed by `hpctrain data images`."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        assert isinstance(config.data, ImageDataConfig) and isinstance(config.model, VisionConfig)
        self.data, self.image_size = config.data, config.model.image_size
        self.shards = ShardSet(Path(config.data.root) / "train")
        self.num_samples = self.shards.num_samples
        self.facts = {
            "num_identities": self.shards.num_identities,
            "behaviours": list(self.shards.behaviours),
            "identities": self.shards.meta.identities,
        }

    def train_loader(
        self, *, rank: int, world: int, samples_consumed: int, microbatch_size: int, pin_memory: bool
    ) -> TrainLoader[Any]:
        return build_train_loader(
            self.shards,
            image_size=self.image_size,
            rank=rank,
            world=world,
            samples_consumed=samples_consumed,
            microbatch_size=microbatch_size,
            pin_memory=pin_memory,
            **self._training(),
        )

    def eval_loader(
        self, *, rank: int, world: int, microbatch_size: int, pin_memory: bool
    ) -> EvalLoader[Any]:
        assert self.val is not None
        return build_eval_loader(
            ShardSet(self.val),
            image_size=self.image_size,
            batch_size=EVAL_BATCH_SIZE,  # without gradients more fit than in training
            rank=rank,
            world=world,
            num_workers=self.data.num_workers,
            scaled_decode=self.data.scaled_decode,
            pin_memory=pin_memory,
        )


class TokenSource(Source):
    """Tokens packed by `hpctrain data tokens`."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        assert isinstance(config.data, TokenDataConfig)
        self.data = config.data
        tokens = TokenSet(Path(config.data.root) / "train")
        self.sequences = PackedSequences(tokens, config.data.sequence_length)
        self.num_samples = self.sequences.num_samples
        self.facts = {"vocab_size": tokens.vocab_size}

    def train_loader(
        self, *, rank: int, world: int, samples_consumed: int, microbatch_size: int, pin_memory: bool
    ) -> TrainLoader[Any]:
        return build_token_train_loader(
            self.sequences,
            rank=rank,
            world=world,
            samples_consumed=samples_consumed,
            microbatch_size=microbatch_size,
            pin_memory=pin_memory,
            **self._training(),
        )

    @cached_property
    def _val_sequences(self) -> PackedSequences:
        """Packed once, for all evaluations."""
        assert self.val is not None
        return PackedSequences(TokenSet(self.val), self.data.sequence_length)

    def eval_loader(
        self, *, rank: int, world: int, microbatch_size: int, pin_memory: bool
    ) -> EvalLoader[Any]:
        return build_token_eval_loader(
            self._val_sequences,
            batch_size=microbatch_size,  # what travels between pipeline stages has one shape
            rank=rank,
            world=world,
            num_workers=self.data.num_workers,
            pin_memory=pin_memory,
        )


def open_source(config: Config) -> Source:
    """Open the training split of a run. Raises DataError when it is not there or damaged."""
    return TokenSource(config) if isinstance(config.data, TokenDataConfig) else ImageSource(config)
