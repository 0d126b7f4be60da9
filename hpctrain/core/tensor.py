"""Tensor parallelism: Megatron's column and row splits (Shoeybi et al. 2019, §3), put on a model by name.

A plan maps patterns of module names to the styles below. Parameters become DTensors, so that checkpoints,
sharding and norms know what they are; activations between modules stay local tensors. With sequence parallel
(Korthikanti et al. 2022, §4.2.2) the tokens are shared between the matrices: an all-gather before the columns
and a reduce-scatter after the rows take the place of the all-reduce.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from hpctrain.models.dropout import KeyedDropout
from hpctrain.models.lora import LoraLinear
from hpctrain.models.token_loss import LmHead, VocabShard

TOKENS_DIM, HEADS_DIM, FEATURES_DIM = 1, 2, -1


def apply_tensor_parallel(
    model: nn.Module, plan: dict[str, str], mesh: DeviceMesh, *, sequence_parallel: bool
) -> None:
    """Split a model, or one pipeline stage, over a one-dimensional mesh; its forward is then collective.

    Every parameter must be in a module that the plan names: one that was forgotten would be trained apart on
    each rank. Entries for modules that this stage lacks match nothing.
    """
    tokens: Placement = Shard(TOKENS_DIM) if sequence_parallel else Replicate()
    for name, module in list(model.named_modules()):
        styles = {style for pattern, style in plan.items() if fnmatch.fnmatchcase(name, pattern)}
        assert len(styles) <= 1, f"{name} has the styles {styles}"
        for style in styles:
            _STYLES[style](module, mesh, tokens)
        if any(plan_style == "colwise" for plan_style in _styles_of_children(name, module, plan)):
            # One input for all column-split matrices, and one reduction of its gradient's parts.
            _convert_input(module, mesh, tokens, Replicate())
    left = [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
    assert not left, f"no tensor-parallel style for {left}"


def _styles_of_children(name: str, module: nn.Module, plan: dict[str, str]) -> list[str]:
    children = [f"{name}.{child}" for child, _ in module.named_children()]
    return [s for child in children for pattern, s in plan.items() if fnmatch.fnmatchcase(child, pattern)]


# Styles. `tokens` is how the residual stream lies on the ranks: whole, or a share of the tokens on each.


def _split_columns(module: nn.Module, mesh: DeviceMesh, tokens: Placement) -> None:
    _distribute(module, mesh, {"weight": Shard(0), "bias": Shard(0), "lora_B.weight": Shard(0)})
    _convert_input(module, mesh, Replicate(), Replicate())
    _convert_output(module, Shard(FEATURES_DIM))
    if isinstance(module, LoraLinear):
        _localize(module.dropout, mesh, Replicate())


def _split_rows(module: nn.Module, mesh: DeviceMesh, tokens: Placement) -> None:
    _distribute(module, mesh, {"weight": Shard(1), "lora_A.weight": Shard(1)})
    _convert_input(module, mesh, Shard(FEATURES_DIM), Shard(FEATURES_DIM))
    _convert_output(module, tokens)
    if isinstance(module, LoraLinear):
        _localize(module.dropout, mesh, Shard(FEATURES_DIM))


def _split_vocabulary(module: nn.Embedding, mesh: DeviceMesh, tokens: Placement) -> None:
    """Each rank looks up its own rows, and the sum over ranks has one row a token. On local tensors, because
    DTensor's backward makes the gradient of the whole matrix on every rank."""
    _distribute(module, mesh, {"weight": Shard(0)})
    start = _first_row(mesh, module.num_embeddings)

    def look_up(token_BL: Tensor) -> Tensor:
        weight: Any = module.weight
        weight_VD: Tensor = weight.to_local()
        row_BL = token_BL - start
        is_own_BL = (row_BL >= 0) & (row_BL < len(weight_VD))
        own_BLD = F.embedding(row_BL.clamp(0, len(weight_VD) - 1), weight_VD) * is_own_BL[..., None]
        part = DTensor.from_local(own_BLD, mesh, [Partial()], run_check=False)
        return part.redistribute(placements=[tokens]).to_local()

    module.forward = look_up  # type: ignore[method-assign,assignment]
    # FSDP2 hangs a hook on what a unit returns, and warns of views.
    module.register_forward_hook(lambda module, args, y: y.clone())


def _first_row(mesh: DeviceMesh, num_rows: int) -> int:
    """Where this rank's rows begin, as torch.chunk cuts: the last share may be smaller."""
    return int(mesh.get_local_rank() * -(-num_rows // mesh.size()))


def _share_norm(module: nn.Module, mesh: DeviceMesh, tokens: Placement) -> None:
    _distribute(module, mesh, {})
    _convert_input(module, mesh, tokens, tokens)
    _convert_output(module, tokens)


def _share_head_norm(module: nn.Module, mesh: DeviceMesh, tokens: Placement) -> None:
    _share_norm(module, mesh, Shard(HEADS_DIM))


def _split_head(module: nn.Module, mesh: DeviceMesh, tokens: Placement) -> None:
    """The loss over a share of the vocabulary: it leaves this rank's part of the gradient of its input."""
    assert isinstance(module, LmHead)
    _distribute(module, mesh, {"weight": Shard(0)})
    _convert_input(module, mesh, tokens, Replicate())

    def to_parts(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (args[0].to_local(grad_placements=[Partial()]), *args[1:])

    module.register_forward_pre_hook(to_parts)
    module.shard = VocabShard(
        start=_first_row(mesh, module.parameter.shape[0]),
        max=_reducer(mesh, dist.ReduceOp.MAX),
        sum=_reducer(mesh, dist.ReduceOp.SUM),
    )


def _add_residual_dropout(module: nn.Module, mesh: DeviceMesh, tokens: Placement) -> None:
    assert isinstance(module, KeyedDropout)
    if tokens.is_shard():

        def note_first_token(module: KeyedDropout, args: tuple[Any, ...]) -> None:
            module.token_start = mesh.get_local_rank() * args[0].shape[TOKENS_DIM]

        module.register_forward_pre_hook(note_first_token)


_STYLES: dict[str, Callable[[Any, DeviceMesh, Placement], None]] = {
    "embedding": _split_vocabulary,
    "colwise": _split_columns,
    "rowwise": _split_rows,
    "norm": _share_norm,
    "head_norm": _share_head_norm,
    "head": _split_head,
    "residual_dropout": _add_residual_dropout,
}


def _distribute(module: nn.Module, mesh: DeviceMesh, placements: dict[str, Placement]) -> None:
    """Replace parameters by this rank's parts, those not named by replicas. No communication; on meta too."""
    for name, parameter in list(module.named_parameters()):
        if isinstance(parameter, DTensor):
            continue  # a tied weight that another module has brought
        placed = [placements.get(name, Replicate())]
        part = distribute_tensor(parameter.detach(), mesh, placed, src_data_rank=None)
        owner, _, last = name.rpartition(".")
        trained = nn.Parameter(part, requires_grad=parameter.requires_grad)
        module.get_submodule(owner).register_parameter(last, trained)


def _convert_input(module: nn.Module, mesh: DeviceMesh, given: Placement, wanted: Placement) -> None:
    """Turn the first argument, local and lying as `given`, into a DTensor that lies as `wanted`."""

    def convert(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x = args[0]
        if not isinstance(x, DTensor):
            x = DTensor.from_local(x, mesh, [given], run_check=False)
        # Not where it lies so already: backward would reduce each user's part of a gradient by itself.
        if x.placements != (wanted,):
            x = x.redistribute(placements=[wanted])
        return (x, *args[1:])

    module.register_forward_pre_hook(convert)


def _convert_output(module: nn.Module, wanted: Placement) -> None:
    def convert(module: nn.Module, args: Any, y: DTensor) -> Tensor:
        return y.redistribute(placements=[wanted]).to_local()

    module.register_forward_hook(convert)


def _localize(dropout: KeyedDropout, mesh: DeviceMesh, placement: Placement) -> None:
    """Let a dropout inside a split matrix see local values, and which features they are."""

    def enter(module: KeyedDropout, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x: Tensor = args[0].to_local()
        if placement.is_shard():
            module.feature_start = mesh.get_local_rank() * x.shape[FEATURES_DIM]
        return (x, *args[1:])

    def leave(module: nn.Module, args: Any, y: Tensor) -> DTensor:
        return DTensor.from_local(y, mesh, [placement], run_check=False)

    dropout.register_forward_pre_hook(enter)
    dropout.register_forward_hook(leave)


def _reducer(mesh: DeviceMesh, op: Any) -> Callable[[Tensor], None]:
    group = mesh.get_group()

    def reduce(value: Tensor) -> None:
        dist.all_reduce(value, op, group=group)

    return reduce
