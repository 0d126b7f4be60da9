"""One rank's part of a decoder, made parallel in one fixed order.

1. pp: only this rank's stages are built, on `meta`, so nothing whole is ever in memory.
2. tp: splits matrices. Before anything that wraps a block, because it finds modules by name.
3. activation checkpointing: wraps the forward of split blocks, so their collectives run again with it.
4. compile: sees a block with its collectives and recomputation, and none of the gathering around it.
5. dp: shards what is left of each parameter, block by block, around all of the above.
6. weights: each rank reads or draws its own pieces.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from hpctrain.config.schema import Checkpointing, Config
from hpctrain.core.fully_shard import COMPUTE_DTYPES, apply_fully_shard
from hpctrain.core.tensor import apply_tensor_parallel
from hpctrain.models.spec import ReadPiece, StagedModel


def build_stages(
    config: Config,
    kind: StagedModel,
    layers: dict[int, range],
    num_stages: int,
    axes: DeviceMesh,
    device: torch.device,
) -> dict[int, nn.Module]:
    """Build this rank's stages, parallel and with their weights. Collective over the world.

    Args:
        layers: The blocks of each of this rank's stages, by the stage's number.
        axes: The mesh (pp, dp_replicate, dp_shard, tp).
    """
    parallelism = config.parallelism
    read = kind.initial_weights(config.model, config.seed)
    is_tied = kind.tied_weight(config.model) is not None  # one matrix for both is in use all the time
    replicates = axes["dp_replicate"].size() > 1
    stages: dict[int, nn.Module] = {}
    for number, own in layers.items():
        with torch.device("meta"):
            stage = kind.build_stage(config.model, own, number == 0, number == num_stages - 1)
        freeze_in(stage, COMPUTE_DTYPES.get(config.optim.precision))
        if axes["tp"].size() > 1:
            apply_tensor_parallel(
                stage, kind.tp_plan, axes["tp"], sequence_parallel=parallelism.sequence_parallel
            )
        blocks: Any = stage.get_submodule(kind.blocks)
        for block in blocks.values():
            apply_checkpointing(block, parallelism.checkpointing)
            if parallelism.compile:
                block.compile()
        modules = dict(stage.named_modules())
        tables = [modules[name] for name in kind.tables if name in modules and not is_tied]
        apply_fully_shard(
            stage,
            [*tables, *blocks.values()],
            axes["dp_replicate", "dp_shard"] if replicates else axes["dp_shard"],
            precision=config.optim.precision,
            reshard_after_forward=parallelism.reshard_after_forward,
            offload=parallelism.offload_optimizer,
        )
        stage.to_empty(device="cpu" if parallelism.offload_optimizer else device)
        load_weights(stage, read)
        stages[number] = stage
    return stages


def freeze_in(stage: nn.Module, dtype: torch.dtype | None) -> None:
    """Keep weights that are not trained in the precision of the products: they need no fp32 master."""
    for parameter in stage.parameters():
        if dtype is not None and not parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)


def apply_checkpointing(block: nn.Module, kind: Checkpointing) -> None:
    """Compute a block's activations again in backward instead of keeping them (Chen et al. 2016).

    `selective` keeps the results of matrix products and of attention, which are most of the time and a part
    of the memory. Dropout is keyed, so no random state needs to be restored.
    """
    if kind is Checkpointing.none:
        return
    forward = block.forward
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if kind is Checkpointing.selective:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _keep_products)
    block.forward = partial(checkpoint, forward, **options)


_KEPT = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
}


def _keep_products(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


@torch.no_grad()
def load_weights(stage: nn.Module, read: ReadPiece) -> None:
    """Fill every parameter of a stage with its piece of the whole one. No communication."""
    for name, parameter in stage.named_parameters():
        assert isinstance(parameter, DTensor)
        local = parameter.to_local()
        local.copy_(read(name, tuple(parameter.shape), own_piece(parameter), parameter.dtype))


def own_piece(parameter: DTensor) -> tuple[slice, ...]:
    """Which part of the whole parameter this rank holds: cut by `tp` first, then by `dp_shard`, each as
    `torch.chunk` cuts. The inner axis comes last in a placement's list but was cut first."""
    starts, lengths = [0] * parameter.ndim, list(parameter.shape)
    mesh = parameter.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    for axis in reversed(range(mesh.ndim)):
        placement = parameter.placements[axis]
        if placement.is_replicate():
            continue
        dim: int = placement.dim  # type: ignore[attr-defined]
        share = -(-lengths[dim] // mesh.size(axis))
        first = min(coordinate[axis] * share, lengths[dim])
        starts[dim] += first
        lengths[dim] = min(share, lengths[dim] - first)
    return tuple(slice(start, start + length) for start, length in zip(starts, lengths, strict=True))


def assemble(stages: dict[int, nn.Module]) -> nn.Module:
    """Show the stages of one rank as one module with the names that the whole model has, for checkpoints and
    the optimizer. It is never called."""
    if len(stages) == 1:
        return next(iter(stages.values()))
    whole = nn.Module()
    for stage in stages.values():
        _merge(stage, whole)
    return whole


def _merge(module: nn.Module, into: nn.Module) -> None:
    for name, child in module.named_children():
        if name not in into._modules:
            into.add_module(name, child if next(child.children(), None) is None else nn.Module())
        if next(child.children(), None) is not None:
            _merge(child, into.get_submodule(name))
    for name, parameter in module.named_parameters(recurse=False):
        into.register_parameter(name, parameter)
