"""Cells of the parity matrix: a layout, and the tiny decoder that is trained in it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hpctrain.config.schema import (
    Checkpointing,
    ClusterConfig,
    Config,
    DecoderConfig,
    DecoderFamily,
    Device,
    LoraConfig,
    OptimConfig,
    OptimizerKind,
    ParallelismConfig,
    Precision,
    Schedule,
    TokenDataConfig,
)
from hpctrain.errors import PlanError
from hpctrain.plan.plan import make_plan

SEQUENCES, LENGTH, VOCAB, SEED = 16, 12, 33, 5


@dataclass(frozen=True)
class Cell:
    """A layout and what is trained in it."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    sequence_parallel: bool = False
    schedule: str = "1f1b"
    stages_per_rank: int = 1
    num_microbatches: int = 2
    reshard: bool = True
    checkpointing: str = "none"
    compiled: bool = False
    offload: bool = False
    layers: int = 3
    family: str = "qwen3"
    tied: bool = False
    packed: bool = True
    dropout: float = 0.0
    lora: int = 0
    chunk: int = 0
    clip: float | None = 0.5
    optimizer: str = "adamw"
    split: tuple[int, ...] | None = None
    sequences: int = SEQUENCES  #: of a step
    precision: str = "fp64"  #: which is not offered to users, but tells a lost term from rounding

    @property
    def world(self) -> int:
        return self.pp * self.dp_replicate * self.dp_shard * self.tp

    def __str__(self) -> str:
        default = Cell()
        shown = {k: v for k, v in vars(self).items() if v != getattr(default, k)}
        return " ".join(f"{k}={v}" for k, v in shown.items()) or "one rank"

    @property
    def model(self) -> DecoderConfig:
        return DecoderConfig(
            family=DecoderFamily[self.family],
            vocab_size=VOCAB,  # no multiple of any degree
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=self.layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=4,
            initializer_range=0.3,
            tie_word_embeddings=self.tied,
            residual_dropout=self.dropout,
            loss_chunk_tokens=self.chunk,
            lora=LoraConfig(rank=self.lora, dropout=self.dropout),
        )

    def config(self) -> Config:
        share = self.sequences // max(1, self.dp_replicate * self.dp_shard)
        parallelism = ParallelismConfig(
            pp=self.pp,
            dp_replicate=self.dp_replicate,
            dp_shard=self.dp_shard,
            tp=self.tp,
            schedule=Schedule[self.schedule],
            stages_per_rank=self.stages_per_rank,
            sequence_parallel=self.sequence_parallel,
            reshard_after_forward=self.reshard,
            checkpointing=Checkpointing[self.checkpointing],
            offload_optimizer=self.offload,
            compile=self.compiled,
            layers_per_stage=None if self.split is None else list(self.split),
            microbatch_size=max(1, share // self.num_microbatches),
        )
        optim = OptimConfig(
            kind=OptimizerKind[self.optimizer],
            lr=0.01,
            num_epochs=1,
            warmup_epochs=0.5,
            clip_norm=self.clip,
            weight_decay=0.1,
            global_batch_size=self.sequences,
            precision=Precision.fp32 if self.precision == "fp64" else Precision[self.precision],
        )
        device = Device.cuda if self.precision == "bf16" else Device.cpu  # of the plan, not of the ranks
        return Config(
            seed=SEED,
            model=self.model,
            parallelism=parallelism,
            cluster=ClusterConfig(ranks_per_node=self.world, device=device),
            optim=optim,
            data=TokenDataConfig(root="", sequence_length=LENGTH),
        )

    def is_legal(self) -> bool:
        """Whether the plan allows it."""
        try:
            return make_plan(self.config()).batch.num_microbatches == self.num_microbatches
        except PlanError:
            return False


def cells_for(world: int, device: Device) -> list[Cell]:
    """About a dozen cells that take exactly so many ranks, so that every axis reaches over the cluster."""
    half, quarter = world // 2, world // 4
    deep = max(pp for pp in range(1, 9) if world % pp == 0)
    deep_pairs = max((pp for pp in range(1, 9) if half and half % pp == 0), default=0)
    interleaved = {"schedule": "interleaved_1f1b", "stages_per_rank": 2, "num_microbatches": 4}
    wanted = [
        Cell(dp_replicate=world),
        Cell(dp_shard=world, tied=True),
        Cell(dp_shard=world, reshard=False, checkpointing="selective", num_microbatches=4),
        Cell(dp_shard=world, offload=True, lora=2),
        Cell(dp_replicate=2, dp_shard=half, dropout=0.2),
        Cell(dp_shard=half, tp=2, family="llama", packed=False),
        Cell(dp_shard=half, tp=2, sequence_parallel=True, chunk=5, checkpointing="full"),
        Cell(dp_replicate=half, tp=2, sequence_parallel=True, tied=True, dropout=0.2),
        Cell(pp=deep, dp_shard=world // deep, layers=max(3, deep), tied=True, num_microbatches=4),
        Cell(pp=2, dp_replicate=half, schedule="gpipe", lora=2, dropout=0.2),
        Cell(pp=2, dp_shard=half, layers=5, **interleaved),  # type: ignore[arg-type]
        Cell(pp=deep_pairs, dp_shard=half // max(1, deep_pairs), tp=2, layers=max(3, deep_pairs)),
        Cell(pp=2, dp_shard=quarter, tp=2, sequence_parallel=True, checkpointing="full", family="qwen2"),
        Cell(pp=2, dp_replicate=2, dp_shard=world // 8, tp=2, tied=True, dropout=0.2),
        *_rounded(world, "fp32"),
        *(_rounded(world, "bf16") if device is Device.cuda else []),
    ]
    cells = [replace(cell, sequences=4 * world) for cell in wanted]
    return [cell for cell in dict.fromkeys(cells) if cell.world == world and cell.is_legal()]


def _rounded(world: int, precision: str) -> list[Cell]:
    return [
        Cell(dp_shard=world, precision=precision),
        Cell(dp_shard=world // 2, tp=2, sequence_parallel=True, checkpointing="full", precision=precision),
        Cell(pp=2, dp_shard=world // 2, precision=precision),
    ]
