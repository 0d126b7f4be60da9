"""Pretending: ranks that are not there, a model without data, and a GPU's rules on the CPU.

Fakes of CUDA tensors fail in backward where there is no GPU, so fakes lie on the CPU. What autocast keeps in
fp32 differs between the two, and what norms keep: here the CPU follows the GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._device import DeviceContext

# Of CUDA's list of operators that autocast to fp32 (torch's docs, "Automatic Mixed Precision package"), those
# that the CPU's list lacks and models of pictures use.
_IN_FP32 = {
    F.layer_norm,
    F.group_norm,
    F.softmax,
    F.log_softmax,
    F.normalize,
    torch.layer_norm,
    torch.group_norm,
    torch.softmax,
    torch.log_softmax,
    torch.Tensor.softmax,
    torch.Tensor.log_softmax,
}
# Numbers are read from these while a model is built.
_REAL = {torch.randint, torch.linspace, torch.arange, torch.tensor, torch.as_tensor}


class CudaAutocast(TorchFunctionMode):
    """Under bf16 autocast of the CPU, what a GPU would compute in fp32 is computed in fp32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _IN_FP32 and torch.is_autocast_enabled("cpu"):
            args = tuple(_widen(argument) for argument in args)
        return func(*args, **(kwargs or {}))


class CudaNorms(TorchFunctionMode):
    """RMS norms keep what the kernel of a GPU keeps: their input, and a number a row. On the CPU torch puts
    them together from operators that keep two results in fp32 as well."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.rms_norm:
            return func(*args, **(kwargs or {}))
        x, weight = args[0], args[2] if len(args) > 2 else (kwargs or {})["weight"]
        if not isinstance(x, DTensor):
            return _FusedNorm.apply(x, weight)
        shares = [Partial() if placement.is_shard() else Replicate() for placement in x.placements]
        y = _FusedNorm.apply(x.to_local(), weight.to_local(grad_placements=shares))
        return DTensor.from_local(y, x.device_mesh, x.placements, run_check=False)


class _FusedNorm(torch.autograd.Function):
    """The shapes of torch's `_fused_rms_norm` and its gradient; on fakes there is nothing to compute."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


class OnMeta(DeviceContext):
    """New tensors lie on `meta`, but for small ones from which models read numbers as they are built."""

    def __init__(self) -> None:
        super().__init__(torch.device("meta"))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _REAL:
            return func(*args, **kwargs)
        if func is torch.randn:
            kwargs.pop("generator", None)
        return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]


def _widen(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def fill_with_fakes(model: nn.Module, fakes: FakeTensorMode) -> None:
    """Give parameters and buffers storages that hold nothing, as if on the CPU, in place."""
    with fakes:
        model.to_empty(device="cpu")


@contextmanager
def pretended_ranks(rank: int, world_size: int) -> Iterator[None]:
    """A process group that answers at once. What is sent arrives at once: fakes never say so, and what is
    under way stays in memory. Sums have their result, which DDP asks for."""
    send, add_up = dist.isend, dist.all_reduce

    def isend(*args: Any, **kwargs: Any) -> _Arrived:
        send(*args, **kwargs)
        return _Arrived([])

    def all_reduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        work = add_up(tensor, *args, **kwargs)
        return None if work is None else _Arrived([tensor])

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        with patch.object(dist, "isend", isend), patch.object(dist, "all_reduce", all_reduce):
            yield
    finally:
        dist.destroy_process_group()


class _Arrived:
    def __init__(self, values: list[torch.Tensor]) -> None:
        self.values = values

    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        pass

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result(self.values)
        return future
