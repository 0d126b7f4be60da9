"""How long a stage of a decoder takes for a microbatch, and the update of its weights: what `core` does.

Blocks, embedding and head are gathered in the compute format before their forward and again before their
backward, and their gradients are reduced in fp32 after it, for every microbatch (FSDP2, over one rank too,
where it is memory traffic alone). Tensor parallelism waits for each collective.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from hpctrain.config.hardware import Hardware
from hpctrain.config.schema import Checkpointing, Config, DecoderConfig, Precision, TokenDataConfig
from hpctrain.plan.batch import BatchPlan
from hpctrain.plan.collectives import Group, all_gather_s, all_reduce_s, axis_group, reduce_scatter_s
from hpctrain.plan.compute import Kernels, Passes, Work, block_passes, head_passes, update_bytes
from hpctrain.plan.costs import adapter_parameters, embedding_parameters, stage_parameters
from hpctrain.plan.layout import Layout

FP32 = 4  # bytes


@dataclass(frozen=True, slots=True)
class StageTime:
    """Seconds of one stage for a microbatch."""

    forward: float
    backward: float
    parts: dict[str, float]  #: forward and backward together, by cause


@dataclass(frozen=True)
class DecoderCosts:
    """What the times of a run's stages depend on, whatever the stages."""

    config: Config
    layout: Layout
    batch: BatchPlan
    hardware: Hardware
    work: Work

    @property
    def model(self) -> DecoderConfig:
        return self.work.model

    @property
    def hidden_bytes(self) -> float:
        """What a rank sends to the next stage."""
        return self._whole_hidden / self.work.token_shards

    @property
    def _whole_hidden(self) -> float:
        return self.work.element * self.work.tokens * self.model.hidden_size

    @cached_property
    def groups(self) -> dict[str, Group]:
        return {
            axis: axis_group(self.layout, self.config.cluster, axis)
            for axis in ("tp", "dp_shard", "dp_replicate", "pp")
        }

    @cached_property
    def block(self) -> Passes:
        return block_passes(self.work, self.config.parallelism.checkpointing)

    @cached_property
    def head(self) -> Passes:
        return head_passes(self.work)

    @cached_property
    def tp_half_s(self) -> float:
        """Half of an all-reduce of the residual stream: a gather, or a reduction."""
        return all_gather_s(self._whole_hidden, self.groups["tp"], self.hardware)

    def stage(self, layers: int, has_embedding: bool, has_head: bool) -> StageTime:
        """Time of a stage."""
        block, head = self.block, self.head
        compute_f = layers * block.forward + has_head * head.forward
        compute_b = layers * block.backward + has_head * head.backward
        recompute = layers * block.recompute + has_head * head.recompute
        tp_f, tp_b = self._tp(layers, has_embedding, has_head)
        gather, reduce = self._weights(layers, has_embedding, has_head)
        again = gather if self.config.parallelism.reshard_after_forward else 0.0
        dp_f = self._exposed(gather, compute_f)
        if self.work.kernels.reduces_once:
            reduce /= self.batch.num_microbatches
        dp_b = self._exposed(again + reduce, compute_b + recompute)
        offload_f, offload_b = self._offload(
            layers, has_embedding, has_head, compute_f, compute_b + recompute
        )
        return StageTime(
            forward=compute_f + tp_f + dp_f + offload_f,
            backward=compute_b + recompute + tp_b + dp_b + offload_b,
            parts={
                "compute": compute_f + compute_b,
                "recompute": recompute,
                "tp": tp_f + tp_b,
                "dp": dp_f + dp_b,
                "offload": offload_f + offload_b,
            },
        )

    def update(
        self, layers: int, has_embedding: bool, has_head: bool, last_backward_s: float
    ) -> dict[str, float]:
        """Seconds once a step at one place of the pipeline: sums over replicas, and the optimizer."""
        _, trained = self._parameters(layers, has_embedding, has_head)
        own = trained / (self.layout.dp_shard * self.layout.tp)
        reduction = all_reduce_s(FP32 * own, self.groups["dp_replicate"], self.hardware)
        parts = {"dp": self._exposed(reduction, last_backward_s)}
        if self.layout.pp > 1 and self.model.tie_word_embeddings and (has_embedding or has_head):
            parts["dp"] += self._tied_s()
        moved = update_bytes(self.config.optim, own)
        if self.config.parallelism.offload_optimizer:
            ranks = min(self.layout.world_size, self.config.cluster.ranks_per_node)
            parts["offload"] = moved * ranks / (self.hardware["host_memory_gbps"] * 1e9)
        else:
            parts["optimizer"] = self.work.memory_s(moved)
        return parts

    def _tp(self, layers: int, has_embedding: bool, has_head: bool) -> tuple[float, float]:
        """Halves of all-reduces, forward and backward (docs/layout_32b.md, "Traced")."""
        if self.layout.tp == 1:
            return 0.0, 0.0
        shares_tokens = self.work.token_shards > 1
        again = 0
        if self.config.parallelism.checkpointing is not Checkpointing.none:
            # The last reduction of a block is not needed again.
            again = 4 if self.work.kernels.repeats_last else 3 if shares_tokens else 2
        forward, backward = 4 * layers, (4 + again) * layers
        forward += has_embedding * (1 if shares_tokens else 2) + has_head * shares_tokens
        backward += has_embedding * shares_tokens + has_head * (1 if shares_tokens else 2)
        sums = all_reduce_s(3 * FP32 * self.work.tokens, self.groups["tp"], self.hardware)
        return forward * self.tp_half_s + has_head * sums, backward * self.tp_half_s

    @cached_property
    def _sizes(self) -> tuple[int, int]:
        """Parameters of a block and of its adapters."""
        return stage_parameters(self.model, 1, False, False), adapter_parameters(self.model)

    def _parameters(self, layers: int, has_embedding: bool, has_head: bool) -> tuple[float, float]:
        """Of a stage, over all its ranks: all, and those that are trained."""
        block, adapters = self._sizes
        tables = has_embedding + has_head
        if tables == 2 and self.model.tie_word_embeddings:
            tables = 1
        held = layers * block + tables * embedding_parameters(self.model) + has_head * self.model.hidden_size
        return held, layers * adapters if self.model.lora.rank else held

    def _weights(self, layers: int, has_embedding: bool, has_head: bool) -> tuple[float, float]:
        """Seconds of gathering the weights of a stage once, and of reducing its gradients, if nothing hides
        them. Frozen weights are stored in the compute format and need no cast."""
        held, trained = (n / self.layout.tp for n in self._parameters(layers, has_embedding, has_head))
        work, kernels, group = self.work, self.work.kernels, self.groups["dp_shard"]
        units = layers + has_embedding + has_head
        whole, own = kernels.gather_bytes
        own_weights = own * trained + max(0.0, own - FP32 - work.element) * (held - trained)
        gather = work.memory_s(whole * held + own_weights / group.size)
        whole, own = kernels.reduce_bytes
        reduce = work.memory_s((whole + own / group.size) * trained)
        if group.size > 1:
            gather += units * all_gather_s(work.element * held / units, group, self.hardware)
            reduce += units * reduce_scatter_s(kernels.reduce_element * trained / units, group, self.hardware)
        return gather, reduce

    def _exposed(self, communication_s: float, compute_s: float) -> float:
        """What computation cannot hide of it. A rank alone casts and copies weights without a link: where
        nobody knows what hides of that, nothing does."""
        is_alone = self.layout.dp == 1 and "overlap" not in self.hardware
        overlap = 0.0 if is_alone else self.hardware["overlap"]
        return communication_s - min(overlap * communication_s, compute_s)

    def _offload(
        self, layers: int, has_embedding: bool, has_head: bool, compute_f: float, compute_b: float
    ) -> tuple[float, float]:
        """Copies from and to host memory that computation does not hide, and the sums there: from the second
        microbatch on, the host adds a gradient to what it has, and waits for it."""
        if not self.config.parallelism.offload_optimizer:
            return 0.0, 0.0
        shards = self.layout.tp * self.layout.dp_shard
        held, trained = (n / shards for n in self._parameters(layers, has_embedding, has_head))
        bytes_s = self.hardware["host_gbps"] * 1e9
        frozen = held - trained
        down = (FP32 * trained + self.work.element * frozen) / bytes_s
        up = FP32 * trained / bytes_s
        again = down if self.config.parallelism.reshard_after_forward else 0.0
        if self.batch.num_microbatches == 1:
            return self._exposed(down, compute_f), self._exposed(again + up, compute_b)
        ranks = min(self.layout.world_size, self.config.cluster.ranks_per_node)
        adds = 3 * FP32 * trained * ranks / (self.hardware["host_memory_gbps"] * 1e9)
        return self._exposed(down, compute_f), self._exposed(again, compute_b) + up + adds

    def _tied_s(self) -> float:
        """The first and the last stage add up the gradients of the matrix that both use."""
        shards = self.layout.tp * self.layout.dp_shard
        stage_ranks, per_node = self.layout.tp * self.layout.dp, self.config.cluster.ranks_per_node
        across = self.layout.world_size > per_node
        group = Group(2, 1, min(stage_ranks, per_node)) if across else Group(2, 2, stage_ranks)
        return all_reduce_s(FP32 * embedding_parameters(self.model) / shards, group, self.hardware)


def make_decoder_costs(
    config: Config,
    model: DecoderConfig,
    layout: Layout,
    batch: BatchPlan,
    hardware: Hardware,
    product_flops: float,
    kernels: Kernels,
) -> DecoderCosts:
    assert isinstance(config.data, TokenDataConfig)
    work = Work(
        model=model,
        tokens=batch.microbatch_size * config.data.sequence_length,
        length=config.data.sequence_length,
        tp=layout.tp,
        token_shards=layout.tp if config.parallelism.sequence_parallel else 1,
        element=FP32 if config.optim.precision is Precision.fp32 else 2,
        product_flops=product_flops,
        hardware=hardware,
        kernels=kernels,
    )
    return DecoderCosts(config, layout, batch, hardware, work)
