"""The training loop, and nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpctrain.run.causes import CauseKind

if TYPE_CHECKING:
    from hpctrain.core.training import Training


def train(run: Training) -> CauseKind:
    """Train to the end, or to an agreed stop; either way the state is saved when this returns.

    Returns why it ended: `done`, or the reason all ranks agreed on. Raises PeerLostError, DataError,
    CheckpointError, FloatingPointError (the loss is not finite), or what the model raises.
    """
    while True:
        evaluated = run.evaluate_if_due()
        if run.finished and evaluated:
            run.save()
            return CauseKind.done
        run.trace.at(run.progress.step)
        batches = next(run.feed, None)  # while the answer to `post` travels; none at the end
        reason = run.stop.agreed()
        if reason is not None:
            run.save()  # without these batches: the next start reads them again
            return reason
        assert batches is not None
        host_batches, device_batches = batches
        scalars = run.step(device_batches, run.progress.step)
        run.advance(host_batches, scalars)
        run.stop.post()
        run.watchdog.beat()
        run.save_if_due()
