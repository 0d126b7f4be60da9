"""From a config to the model on the ranks."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import init_device_mesh

from hpctrain.config.schema import Config, VisionConfig
from hpctrain.core import rng
from hpctrain.core.class_parallel import apply_class_parallel
from hpctrain.core.hybrid import Hybrid
from hpctrain.core.mesh import Mesh
from hpctrain.core.parallel import Parallel
from hpctrain.core.replicated import Replicated
from hpctrain.core.sync_batchnorm import apply_sync_batchnorm
from hpctrain.data.source import Source
from hpctrain.models.spec import DataFacts, ModelSpec
from hpctrain.plan.plan import RunPlan


def build_parallel(config: Config, plan: RunPlan, spec: ModelSpec, source: Source, mesh: Mesh) -> Parallel:
    """Build this rank's part of the model with its initial weights. Collective over the world."""
    if spec.staged is not None:
        torch.backends.cuda.matmul.allow_fp16_accumulation = config.optim.fp16_accumulation
        return Hybrid(config, plan, spec.staged, mesh.device)
    assert spec.build is not None
    rng.seed_weights(config.seed)
    facts = DataFacts(source.facts["num_identities"], source.facts["behaviours"])
    model = spec.build(config.model, facts)
    ranks = init_device_mesh(mesh.device.type, (mesh.world_size,))
    class_heads = apply_class_parallel(model, ranks)
    model.to(mesh.device)
    if mesh.device.type == "cuda":
        model.to(memory_format=torch.channels_last)  # what tensor cores want of convolutions
    if isinstance(config.model, VisionConfig) and config.model.sync_batchnorm:
        apply_sync_batchnorm(model)
    if config.parallelism.compile:
        for name in spec.compiled_modules:
            model.get_submodule(name).compile()
    return Replicated(
        model,
        config.optim,
        mesh.rank,
        mesh.world_size,
        mesh.device,
        config.parallelism.bucket_mib,
        class_heads,
    )
