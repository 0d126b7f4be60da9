"""Batch arithmetic: global batch, microbatches, steps."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """Samples per optimizer step and how each data-parallel rank cuts its share."""

    global_batch_size: int
    microbatch_size: int  #: samples per data-parallel rank per forward
    num_microbatches: int  #: forwards per data-parallel rank per step


def resolve_batch(
    global_batch_size: int, microbatch_size: int | None, dp: int
) -> tuple[BatchPlan | None, list[str]]:
    """The batch plan, or the findings that say what does not divide."""
    if global_batch_size < 1:
        return None, [f"optim.global_batch_size={global_batch_size}: at least 1"]
    if global_batch_size % dp:
        near = max(dp, round(global_batch_size / dp) * dp)
        return None, [
            f"optim.global_batch_size={global_batch_size} does not divide by {dp} data-parallel ranks; "
            f"the nearest that does is {near}"
        ]
    share = global_batch_size // dp
    size = share if microbatch_size is None else microbatch_size
    if size < 1 or share % size:
        return None, [
            f"parallelism.microbatch_size={size} does not divide a rank's share of {share} samples "
            f"(optim.global_batch_size {global_batch_size} / {dp} data-parallel ranks)"
        ]
    return BatchPlan(
        global_batch_size=global_batch_size, microbatch_size=size, num_microbatches=share // size
    ), []
