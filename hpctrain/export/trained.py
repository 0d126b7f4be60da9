"""What a run has learnt: its model from the newest sound checkpoint, on the CPU, without a process group."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from hpctrain.checkpoint import reader, store
from hpctrain.checkpoint.store import Checkpoint
from hpctrain.config.load import load_config
from hpctrain.config.schema import DecoderConfig, VisionConfig
from hpctrain.errors import CheckpointError, ConfigError
from hpctrain.models.decoder_spec import initial_weights
from hpctrain.models.huggingface import make_shapes
from hpctrain.models.spec import DataFacts
from hpctrain.models.vision import VisionModel, build_vision
from hpctrain.run.directory import RunDirectory


class DecoderWeights(Mapping[str, Tensor]):
    """A decoder's whole parameters by name, each read when it is asked for: what was trained from a
    checkpoint, what was frozen from where the run took it.

    Raises:
        CheckpointError: the checkpoint is incomplete or damaged.
        ConfigError: the folder of `model.pretrained` no longer holds the base model.
    """

    def __init__(self, checkpoint: Path, model: DecoderConfig, seed: int) -> None:
        self._trained = reader.Part(checkpoint, "model")
        self._frozen = {n: shape for n, shape in make_shapes(model).items() if n not in set(self._trained)}
        self._read = initial_weights(model, seed) if self._frozen else None

    def __getitem__(self, name: str) -> Tensor:
        if self._read is None or name not in self._frozen:
            return self._trained[name]
        shape = self._frozen[name]
        return self._read(name, shape, (slice(None),) * len(shape), torch.float32)

    def __contains__(self, name: object) -> bool:
        return name in set(self)  # the inherited one would read the tensor

    def __iter__(self) -> Iterator[str]:
        return itertools.chain(self._trained, self._frozen)

    def __len__(self) -> int:
        return len(self._trained) + len(self._frozen)


@dataclass(frozen=True)
class TrainedModel:
    """What a run has learnt so far."""

    model: VisionModel
    config: VisionConfig
    identities: list[str]  #: names of the identity head's rows; empty where the run does not keep them
    behaviours: list[str]
    step: int
    uses_ema: bool


def load_trained(run_dir: Path, ema: bool | None = None) -> TrainedModel:
    """Load the model of a run's newest sound checkpoint onto the CPU, for evaluation.

    Args:
        run_dir: Folder of the run.
        ema: Take the averaged weights; None takes them where the run has them.

    Raises:
        ConfigError: the run keeps no averaged weights, or is no vision run.
        CheckpointError: it has no sound checkpoint.
    """
    run = RunDirectory(run_dir)
    config = load_config(run.config)
    if not isinstance(config.model, VisionConfig):
        raise ConfigError(f"export {run_dir}", f"model.kind={config.model.kind}", "export a vision run")
    has_ema = config.optim.ema_decay is not None
    if ema and not has_ema:
        raise ConfigError(
            f"--ema: export the averaged weights of {run_dir}",
            "the run keeps none (optim.ema_decay=null)",
            "leave --ema out",
        )
    uses_ema = has_ema if ema is None else ema
    checkpoint = find_sound(run)
    state = reader.load_full(checkpoint.path, ("model", "ema") if uses_ema else ("model",))
    facts = json.loads(run.data_facts.read_text())
    data = DataFacts(facts["num_identities"], facts["behaviours"])
    model = build_vision(replace(config.model, pretrained=None, class_parallel=False), data)
    model.load_state_dict(state["model"] | state.get("ema", {}))
    identities = facts.get("identities") or []
    return TrainedModel(model.eval(), config.model, identities, data.behaviours, checkpoint.step, uses_ema)


def refuse_existing(out: Path) -> None:
    if out.exists():
        raise ConfigError(f"write {out}", "it exists already", "remove it, or name another")


def find_sound(run: RunDirectory) -> Checkpoint:
    """Return the newest checkpoint that proves sound; damaged ones are named on stderr.

    Raises:
        CheckpointError: there is none.
    """
    for checkpoint in store.find(run.checkpoints):
        problems = store.verify(checkpoint.path)
        if not problems:
            return checkpoint
        print(f"passing over {checkpoint.path.name}: {'; '.join(problems)}", file=sys.stderr)
    raise CheckpointError(
        f"export the model of {run.path}", f"no sound checkpoint in {run.checkpoints}", "let the run save one"
    )
