"""The closed form of memory against traces of the real code, layout by layout; docs/memory.md shows both."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from hpctrain.config.schema import (
    Checkpointing,
    ClusterConfig,
    ClusterKind,
    Config,
    DecoderConfig,
    DecoderFamily,
    Device,
    GpuRequest,
    GradientCompression,
    LoraConfig,
    ModelConfig,
    OptimConfig,
    OptimizerKind,
    ParallelismConfig,
    Precision,
    Schedule,
    TokenDataConfig,
    VisionConfig,
)
from hpctrain.core.trace import Trace, trace_step
from hpctrain.plan.memory import MIB
from hpctrain.plan.plan import RunPlan, make_plan
from hpctrain.plan.supply import Workload
from tests.helpers.ranks import run_ranks

PAGE = Path(__file__).parents[2] / "docs" / "memory.md"
FULL, SELECTIVE = Checkpointing.full, Checkpointing.selective


@dataclass(frozen=True)
class Case:
    """A layout, and where in its pipeline to look."""

    name: str
    parallelism: dict[str, Any]
    model: dict[str, Any] = field(default_factory=dict)
    optim: dict[str, Any] = field(default_factory=dict)
    microbatch_size: int = 1
    num_microbatches: int = 8
    identities: int | None = None
    place: int = 0

    @property
    def is_vision(self) -> bool:
        return "backbone" in self.model

    def make_config(self) -> Config:
        given = {"pp": 1, "dp_replicate": 1, "dp_shard": 1, "tp": 1, **self.parallelism}
        config = Config(model=self._model(), optim=OptimConfig(**{"precision": Precision.bf16, **self.optim}))
        if not self.is_vision:
            config.data = TokenDataConfig(root="", sequence_length=1024)
        config.parallelism = ParallelismConfig(microbatch_size=self.microbatch_size, **given)
        dp = given["dp_replicate"] * given["dp_shard"]
        config.optim.global_batch_size = self.num_microbatches * self.microbatch_size * dp
        config.cluster = ClusterConfig(
            kind=ClusterKind.slurm,
            device=Device.cuda,
            gpu_request=GpuRequest.gres,
            hardware="a100",
            ranks_per_node=dp * given["pp"] * given["tp"],
        )
        return config

    def _model(self) -> ModelConfig:
        if self.is_vision:
            return VisionConfig(**self.model)
        sizes = {"vocab_size": 16384, "hidden_size": 1024, "intermediate_size": 3072, "head_dim": 64}
        counts = {"num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 4}
        return DecoderConfig(family=DecoderFamily.qwen3, **{**sizes, **counts, **self.model})


def vision(name: str, batch: int, size: int, identities: int | None = None, **more: Any) -> Case:
    model = {"image_size": [size, size], **more.pop("model")}
    parallelism = {"dp_replicate": more.pop("ranks", 8)}
    more = {"num_microbatches": 1, **more}
    return Case(name, parallelism, model, microbatch_size=batch, identities=identities, **more)


FP32, EMA = {"precision": Precision.fp32}, {"ema_decay": 0.999}
LORA = {"lora": LoraConfig(rank=16, alpha=32.0)}
CASES = [
    Case("pp 4", {"pp": 4}),
    Case("pp 4, checkpointing full", {"pp": 4, "checkpointing": FULL}, place=3),
    Case("pp 4, gpipe", {"pp": 4, "schedule": Schedule.gpipe}),
    Case("pp 4, no AdamW", {"pp": 4}, optim={"kind": OptimizerKind.sgd}, place=3),
    Case("pp 4, loss in chunks", {"pp": 4}, {"loss_chunk_tokens": 256}, place=3),
    Case("pp 4, adapters", {"pp": 4, "checkpointing": FULL}, LORA, place=3),
    vision("ResNet-50, fp32", 64, 224, model={"backbone": "resnet50"}, optim=FP32),
    vision("ConvNeXt-T, EMA", 64, 224, model={"backbone": "convnext_tiny"}, optim=EMA),
    vision("ViT-S", 64, 224, model={"backbone": "vit_small_patch16_224"}),
    vision("ResNet-50, 100,000 identities", 64, 112, 100_000, model={"backbone": "resnet50"}),
    vision("ResNet-18, 1 M shared", 128, 112, 10**6, model={"backbone": "resnet18", "class_parallel": True}),
    vision(
        "ResNet-18, 1 M shared, 10 % of them",
        128,
        112,
        10**6,
        model={"backbone": "resnet18", "class_parallel": True, "sample_rate": 0.1},
    ),
    vision(
        "ResNet-50, compressed",
        64,
        112,
        20_000,
        model={"backbone": "resnet50"},
        optim={"gradient_compression": GradientCompression.bf16},
    ),
    vision("ResNet-50, four microbatches", 64, 112, model={"backbone": "resnet50"}, num_microbatches=4),
]
LONG = [
    Case("dp_shard 8", {"dp_shard": 8}),
    Case("dp_shard 8, checkpointing full", {"dp_shard": 8, "checkpointing": FULL}),
    Case("dp_shard 4, checkpointing selective", {"dp_shard": 4, "checkpointing": SELECTIVE}),
    Case("dp_shard 8, weights kept gathered", {"dp_shard": 8, "reshard_after_forward": False}),
    Case("tp 4, sequence parallel", {"tp": 4, "sequence_parallel": True}),
    Case(
        "pp 2 × dp_shard 2 × tp 2",
        {"pp": 2, "dp_shard": 2, "tp": 2, "sequence_parallel": True, "checkpointing": FULL},
    ),
    Case("pp 2, tied", {"pp": 2}, {"tie_word_embeddings": True}),
    Case("pp 2, interleaved", {"pp": 2, "schedule": Schedule["interleaved_1f1b"], "stages_per_rank": 2}),
    vision("Swin-T", 32, 224, model={"backbone": "swin_tiny_patch4_window7_224"}),
    vision("ConvNeXt-B, 200,000 identities", 128, 224, 200_000, model={"backbone": "convnext_base"}),
]


def trace_case(case: Case) -> tuple[RunPlan, Trace]:
    """In a process of its own."""
    config = case.make_config()
    workload = Workload(num_samples=10**6, sample_bytes=1e5, num_identities=case.identities)
    plan = make_plan(config, workload)

    def trace_one(rank: int, world: int) -> Trace:
        dist.destroy_process_group()
        return trace_step(config, plan, case.place, case.identities)

    (traced,) = run_ranks(1, trace_one, timeout_s=300)
    return plan, traced


@pytest.mark.parametrize(
    "case",
    [*CASES, *(pytest.param(case, marks=pytest.mark.long) for case in LONG)],
    ids=lambda case: case.name,
)
def test_the_closed_form_is_within_5_percent_of_the_trace(case: Case) -> None:
    plan, traced = trace_case(case)
    memory = plan.memory[case.place]
    where = f"| {case.name} | {case.place} |"
    sizes = f"{traced.peak_bytes / MIB:.0f} | {memory.tensors / MIB:.0f}"
    row = f"{where} {sizes} | {memory.tensors / traced.peak_bytes - 1:+.1%} |"
    assert memory.tensors == pytest.approx(traced.peak_bytes, rel=0.05), f"{row}\n{memory.text()}"
    (shown,) = [line for line in PAGE.read_text().splitlines() if line.startswith(where)]
    told = [float(cell) for cell in shown.split("|")[3:5]]
    assert told == pytest.approx([traced.peak_bytes / MIB, memory.tensors / MIB], rel=0.01), row
