"""Saving and restoring a run: its state into a checkpoint, its position into the ledger, and back."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from hpctrain.checkpoint import reader, store, writer
from hpctrain.config.schema import Config
from hpctrain.core import rng
from hpctrain.core.mesh import Mesh
from hpctrain.core.state import Kept, Progress, make_state, restore_state
from hpctrain.run.directory import RunDirectory
from hpctrain.run.ledger import Ledger


class Keeper:
    """Keeps the checkpoints of a run. All methods are collective over all ranks."""

    def __init__(
        self,
        config: Config,
        run: RunDirectory,
        attempt: str,
        mesh: Mesh,
        kept: Kept,
    ) -> None:
        self.config, self.run, self.attempt, self.mesh, self.kept = config, run, attempt, mesh, kept
        self.ledger = Ledger(run.ledger)

    def restore(self) -> Progress:
        """Go on from the newest sound checkpoint, if there is one; returns where that is.

        Raises CheckpointError when there are checkpoints and none is usable.
        """
        state = make_state(self.kept, self.mesh.device)
        loaded = reader.load(
            self.run.checkpoints,
            state=state,
            group=self.mesh.control,
            timeout_s=self.config.checkpoint.timeout_s,
        )
        progress = Progress.from_facts(loaded.step, loaded.facts) if loaded else Progress()
        rng.seed_rank(self.config.seed, self.mesh.rank, progress.step)
        if loaded is None:
            # To have something to load into, an empty step was made: Adam would count it as one.
            self.kept.optimizer.state.clear()
        else:
            restore_state(state, loaded.per_rank, self.kept, self.mesh.device)
        if self.mesh.rank == 0:
            skipped = loaded.skipped if loaded else []
            for name, reason in skipped:
                print(f"hpctrain: checkpoint {name} was passed over: {reason}", flush=True)
            self.ledger.append(
                "restored",
                attempt=self.attempt,
                step=progress.step,
                checkpoint=loaded.path.name if loaded else None,
                skipped=skipped,
            )
        return progress

    def save(self, progress: Progress, layout: dict[str, Any]) -> None:
        """Write a checkpoint of this step, buffers being equal on all ranks. Raises CheckpointError on every
        rank if it failed on any."""
        begun = time.monotonic()
        facts = progress.to_facts(progress.total_hash(self.mesh))
        path = writer.save(
            self.run.checkpoints,
            step=progress.step,
            attempt=self.attempt,
            state=make_state(self.kept, self.mesh.device),
            facts=facts,
            group=self.mesh.control,
            timeout_s=self.config.checkpoint.timeout_s,
            layout=layout,
        )
        progress.saved_step = progress.step
        self._note_saved(path, progress, {**facts, "save_s": round(time.monotonic() - begun, 3)})

    def _note_saved(self, path: Path, progress: Progress, facts: dict[str, Any]) -> None:
        damaged = self.mesh.gather_objects(progress.damaged)
        progress.damaged = []
        if damaged is None:
            return
        found: list[Any] = [entry for rank in damaged for entry in rank]  # type: ignore[attr-defined]
        if found:
            self.ledger.append("damaged", attempt=self.attempt, samples=found)
        self.ledger.append("saved", attempt=self.attempt, step=progress.step, checkpoint=path.name, **facts)
        keep = self.config.checkpoint
        store.retain(
            self.run.checkpoints,
            keep_last=keep.keep_last,
            keep_every_steps=keep.keep_every_steps,
            attempt=self.attempt,
        )
