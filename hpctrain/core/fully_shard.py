"""Sharded data parallelism with torch's FSDP2: a block's parameters lie in pieces on the ranks of `dp_shard`.

It is applied over one data-parallel rank too: parameters are fp32, and the gathering of a block is what makes
its copy in the precision of the products, and drops it again. Each microbatch's backward reduces a block's
gradients at once, in the pipeline too: whole gradients of a stage would not fit (docs/layout_32b.md).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from hpctrain.config.schema import Precision

COMPUTE_DTYPES = {Precision.bf16: torch.bfloat16, Precision.fp16: torch.float16}


def apply_fully_shard(
    stage: nn.Module,
    units: Sequence[nn.Module],
    mesh: DeviceMesh,
    *,
    precision: Precision,
    reshard_after_forward: bool,
    offload: bool,
) -> None:
    """Shard a stage, in place.

    Args:
        units: What is gathered and dropped by itself: the blocks above all. The rest of the stage is one more
            unit, which stays gathered from a microbatch's forward to its backward.
        mesh: `(dp_shard,)`, or `(dp_replicate, dp_shard)`: shards inside, replicas across (HSDP).
        precision: of products; gradients are reduced in fp32 and kept in the parameters' own format.
        reshard_after_forward: Drop a block's gathered parameters after forward and gather them again for
            backward (ZeRO-3), or keep them (ZeRO-2).
        offload: Keep parameters, gradients and optimizer states in host memory.
    """
    dtype = COMPUTE_DTYPES.get(precision)
    policy = MixedPrecisionPolicy(
        param_dtype=dtype,
        reduce_dtype=torch.float32 if dtype else None,
        cast_forward_inputs=False,  # activations follow the parameters; weights of the loss stay fp32
    )
    offloading = CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if offload else OffloadPolicy()
    for module in (*units, stage):
        fully_shard(
            module,
            mesh=mesh,
            mp_policy=policy,
            offload_policy=offloading,
            reshard_after_forward=reshard_after_forward and module is not stage,
        )
