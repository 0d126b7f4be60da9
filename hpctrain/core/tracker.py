"""Which storages are alive and which collectives are called while code runs on torch's fake tensors.

Counted are the bytes of what is alive, storage by storage: not the allocator's rounding, nor what the driver
and NCCL take.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_COUNTED = {
    # operator: kind, which argument is the whole tensor (None: the result), which one the group
    torch.ops.c10d.allreduce_.default: ("all_reduce", 0, 1),
    torch.ops.c10d.allgather_.default: ("all_gather", 0, 2),
    torch.ops.c10d.reduce_scatter_.default: ("reduce_scatter", 1, 2),
    torch.ops.c10d._allgather_base_.default: ("all_gather", 0, 2),
    torch.ops.c10d._reduce_scatter_base_.default: ("reduce_scatter", 1, 2),
    torch.ops.c10d.send.default: ("send", 0, 1),
    torch.ops.c10d.recv_.default: ("recv", 0, 1),
    torch.ops._c10d_functional.all_reduce.default: ("all_reduce", 0, 2),
    torch.ops._c10d_functional.all_gather_into_tensor.default: ("all_gather", None, 2),
    torch.ops._c10d_functional.reduce_scatter_tensor.default: ("reduce_scatter", 0, 3),
}
_WAIT = torch.ops._c10d_functional.wait_tensor.default
# Fused updates work in place; fakes would take them apart and keep every intermediate result.
_UPDATES = {torch.ops.aten._fused_adamw_.default, torch.ops.aten._fused_sgd_.default}


@dataclass(frozen=True, slots=True)
class Traffic:
    """Collectives of one kind: how many, and the bytes of their whole tensors, which is what an all-gather
    makes and a reduce-scatter takes."""

    count: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """What one step does on a rank."""

    peak_bytes: int
    state_bytes: int  #: alive when it has ended: parameters, gradients, optimizer states
    #: by axis of the mesh (`world` for a group of all ranks) and kind: all_gather, reduce_scatter,
    #: all_reduce, send, recv
    collectives: dict[tuple[str, str], Traffic]


class Tracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches, below autograd, which storages are alive and which collectives are called."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0  #: bytes
        self.calls: dict[tuple[str, str], Traffic] = {}  #: by group and kind
        self._storages: dict[int, tuple[Any, int]] = {}  # weak reference, bytes when last seen

    def watch(self, tree: Any) -> None:
        """Count what was there before."""
        for tensor in tree_leaves(tree):
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if isinstance(local, FakeTensor) and local.device.type != "meta":
                self._see(local.untyped_storage())

    def alive(self) -> int:
        """Bytes alive. FSDP empties storages and fills them again without an operator: so all are read."""
        for reference, _ in list(self._storages.values()):
            if (storage := reference()) is not None:
                self._see(storage)
        return self.now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes again as what it means on this rank
        result = None if func in _UPDATES else func(*args, **(kwargs or {}))
        if func in _COUNTED:
            self._count(func, args, result)
        else:
            assert func is _WAIT or func.namespace not in ("c10d", "_c10d_functional"), f"{func} is not known"
        self.watch((args, kwargs, result))
        if self.now > self.peak:
            self.peak = max(self.peak, self.alive())
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        reference, before = self._storages.get(key, (None, 0))
        if reference is None:
            reference = weakref.ref(storage, partial(self._forget, key))
        if size != before:
            self.now += size - before
        self._storages[key] = reference, size

    def _forget(self, key: int, reference: Any) -> None:
        self.now -= self._storages.pop(key)[1]

    def _count(self, func: Any, args: Any, result: Any) -> None:
        kind, whole, group = _COUNTED[func]
        name = args[group] if isinstance(args[group], str) else _unbox(args[group]).group_name
        known = self.calls.get((name, kind), Traffic(0, 0))
        size = sum(tensor.nbytes for tensor in tree_leaves(result if whole is None else args[whole]))
        self.calls[name, kind] = Traffic(known.count + 1, known.size_bytes + size)


def _unbox(group: Any) -> dist.ProcessGroup:
    return dist.ProcessGroup.unbox(group)
