"""What a run has learnt: its model from the newest sound checkpoint, on the CPU, without a process group."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from hpctrain.checkpoint import reader, store
from hpctrain.checkpoint.store import Checkpoint
from hpctrain.config.load import load_config
from hpctrain.config.schema import VisionConfig
from hpctrain.errors import CheckpointError, ConfigError
from hpctrain.models.spec import DataFacts
from hpctrain.models.vision import VisionModel, build_vision
from hpctrain.run.directory import RunDirectory


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
