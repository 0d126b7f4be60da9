"""Memory of decoder ranks: by hand, against what is known of the 32B model, and the page that uses it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hpctrain.config.hardware import find_hardware
from hpctrain.config.schema import (
    ClusterConfig,
    Config,
    DecoderConfig,
    Device,
    ParallelismConfig,
    Schedule,
    TokenDataConfig,
)
from hpctrain.models.decoder import Decoder
from hpctrain.models.rope import make_rotation
from hpctrain.plan.batch import BatchPlan
from hpctrain.plan.decoder_memory import Shape, make_memory_model, saved_bytes
from hpctrain.plan.fit import host_findings
from hpctrain.plan.layout import Layout
from hpctrain.plan.memory import GIB, RankMemory, host_bytes_per_node
from tests.plan.large import LAYOUTS, QWEN_32B, SIXTEEN, memory_of, table_rows

USABLE = find_hardware("rtx4090")["usable_gib"]


def worst_gib(name: str, sequence_parallel: bool = True) -> float:
    return max(memory.total for memory in memory_of(name, sequence_parallel)) / GIB


def state_bytes(memory: RankMemory) -> int:
    return memory.weights + memory.gradients + memory.optimizer


def test_states_take_16_bytes_a_parameter_over_all_cards() -> None:
    """fp32 weights, gradients and two moments of the published 32,763,876,352 parameters."""
    places = memory_of("PP16×TP2")
    assert abs(2 * sum(map(state_bytes, places)) - 16 * 32_763_876_352) < 16 * 32


def test_middle_stage_of_the_chosen_layout_by_hand() -> None:
    """Place 1: four layers of 487,605,248 parameters over two ranks, 15 microbatches in flight."""
    memory = memory_of("PP16×TP2")[1]
    assert SIXTEEN[1] == 4
    assert state_bytes(memory) == 16 * 4 * 487_605_248 // 2
    # A block's input each and the stage's output, halved by sequence parallelism; a mask, a byte an entry;
    # cosines and sines in fp32. Of one microbatch the last block's is gone when the next block goes back.
    in_flight = 15 * ((4 + 1) * 2 * 4096 * 5120 // 2 + 4096**2 + 2 * 4 * 4096 * 128)
    assert memory.activations == in_flight - 2 * 4096 * 5120 // 2
    # In the MLP: a block's weights in bf16, its first gradient, and the fp32 input of the reduction before.
    assert memory.gathered == (2 + 4) * 487_605_248 // 2 + 2 * 5120 * 27648 // 2


@pytest.mark.parametrize(("schedule", "in_flight"), [("gpipe", 4), ("1f1b", 1)])
def test_without_chunks_the_last_stage_keeps_the_logits_of_what_is_in_flight(
    schedule: str, in_flight: int
) -> None:
    def last_place(chunk: int) -> RankMemory:
        model = replace(QWEN_32B, loss_chunk_tokens=chunk)
        parallelism = ParallelismConfig(schedule=Schedule[schedule])
        config = Config(model=model, data=TokenDataConfig(sequence_length=4096), parallelism=parallelism)
        batch = BatchPlan(global_batch_size=4, microbatch_size=1, num_microbatches=4)
        layout = Layout(pp=2, dp_replicate=1, dp_shard=1, tp=1)
        return make_memory_model(config, model, layout, batch).rank(1, {1: 32})

    kept = last_place(0).activations - last_place(1024).activations
    assert kept == in_flight * 4 * 4096 * 152_064


def test_replicas_keep_a_second_set_of_reduced_gradients_until_backward_ends() -> None:
    """torch 2.14's FSDPParamGroup._all_reduce_state: the fp32 output of each block's reduction."""
    alone, replicated = (
        make_memory_model(
            Config(model=QWEN_32B, data=TokenDataConfig(sequence_length=4096)),
            QWEN_32B,
            Layout(pp=1, dp_replicate=replicas, dp_shard=8, tp=1),
            BatchPlan(global_batch_size=16, microbatch_size=1, num_microbatches=2),
        ).rank(0, {0: 64})
        for replicas in (1, 2)
    )
    assert replicated.total - alone.total == replicated.gradients == 4 * 32_763_876_352 // 8


def test_a_block_saves_for_backward_what_torch_saves() -> None:
    """Counted on a real block. The norms of the CPU keep two fp32 tensors each, where the fused kernel of a
    GPU keeps its input: those are left out, and the two inputs added."""
    model = DecoderConfig(
        vocab_size=33,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=1,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
    )
    tokens = 32
    block = Decoder(model).bfloat16().model.layers["0"]
    inputs_BLD = torch.randn(1, tokens, 64, dtype=torch.bfloat16, requires_grad=True)
    cosines, sines = make_rotation(torch.arange(tokens)[None], model, 16, torch.bfloat16)
    own = {p.untyped_storage().data_ptr() for p in block.parameters()}
    saved: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if tensor.dtype is torch.bfloat16 and storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output_BLD = block(inputs_BLD, cosines, sines, None, None)
    shape = Shape(model=model, tokens=tokens, masks=0, element=2, tp=1, token_shards=1, dp_shard=1)
    assert saved_bytes(shape) == sum(saved.values()) + 2 * 2 * tokens * 64
    del output_BLD


def test_whole_gradients_under_torchs_stage_do_not_fit() -> None:
    """Place 2, eight blocks of 487,605,248 parameters: weights in fp32 and Adam over four ranks, whole fp32
    gradients and bf16 weights take 32.7 GiB before any activation."""
    memory = memory_of("PP8×DP4, torch's stage")[2]
    blocks = 8 * 487_605_248
    resident = state_bytes(memory) + memory.gathered - 2 * 487_605_248
    assert resident == (4 // 4 + 8 // 4 + 4 + 2) * blocks
    assert resident > USABLE * GIB


def test_only_layouts_with_two_or_more_tensor_parallel_ranks_fit() -> None:
    assert USABLE == 22.2
    fits = {name for name in LAYOUTS if worst_gib(name) <= USABLE}
    assert fits == {"PP16×TP2", "PP8×TP2×DP2", "PP8×TP4", "PP4×TP8"}


def test_sequence_parallelism_is_what_makes_the_chosen_layout_fit() -> None:
    """NCCL's buffers and the allocator's holes included: 0.2 GiB to spare with it, too much without."""
    assert worst_gib("PP16×TP2") < USABLE - 0.2
    assert worst_gib("PP16×TP2", sequence_parallel=False) > USABLE


def test_a_growing_segment_leaves_more_room() -> None:
    """torch's expandable_segments, which the cluster's environment turns on."""
    config = Config(model=QWEN_32B, data=TokenDataConfig(sequence_length=4096))
    config.cluster = ClusterConfig(device=Device.cuda, hardware="rtx4090")
    layout = Layout(pp=16, dp_replicate=1, dp_shard=1, tp=2)
    batch = BatchPlan(global_batch_size=32, microbatch_size=1, num_microbatches=32)
    slack = {}
    for setting in ("", "expandable_segments:True"):
        config.cluster.env = {"PYTORCH_ALLOC_CONF": setting}
        memory = make_memory_model(config, QWEN_32B, layout, batch).rank(1, {1: 4})
        moving = memory.activations + memory.working + memory.gathered
        slack[setting] = memory.slack
        assert memory.total == memory.tensors + memory.slack + memory.buffers
    assert slack[""] - slack["expandable_segments:True"] == pytest.approx(0.05 * moving, rel=1e-6)


def test_nccl_takes_its_buffers_for_each_peer_and_channel() -> None:
    """4 MiB, 4.69 MiB and 512 KiB: the sizes that NCCL's source gives its three protocols. A rank in the
    middle of 16 × 2 has two neighbours in the pipeline, one in its pair, three in the world."""
    memory = memory_of("PP16×TP2")[1]
    assert memory.buffers == 4 * 6 * (4194304 + 4915200 + 524288)
    config = Config(model=QWEN_32B, data=TokenDataConfig(sequence_length=4096))
    layout, batch = (
        Layout(pp=2, dp_replicate=1, dp_shard=1, tp=1),
        BatchPlan(global_batch_size=2, microbatch_size=1, num_microbatches=2),
    )
    assert make_memory_model(config, QWEN_32B, layout, batch).rank(1, {1: 32}).buffers == 0  # on the CPU


def test_what_is_offloaded_lies_in_the_memory_of_the_node() -> None:
    """32.76 B parameters at 16 bytes over eight ranks of one node, and each rank's process."""
    config = Config(model=QWEN_32B, data=TokenDataConfig(sequence_length=4096, num_workers=2))
    config.parallelism = ParallelismConfig(offload_optimizer=True)
    config.cluster = ClusterConfig(device=Device.cuda, hardware="rtx4090", ranks_per_node=8)
    layout = Layout(pp=1, dp_replicate=1, dp_shard=8, tp=1)
    batch = BatchPlan(global_batch_size=8, microbatch_size=1, num_microbatches=1)
    memory = make_memory_model(config, QWEN_32B, layout, batch).rank(0, {0: 64})
    assert (memory.weights, memory.gradients, memory.optimizer) == (0, 0, 0)
    assert memory.host == 16 * 32_763_876_352 // 8
    processes = 8 * (3 * GIB + GIB + 10_000_000 + 2 * GIB // 2)
    assert host_bytes_per_node(config, (memory,)) == 16 * 32_763_876_352 + processes
    config.cluster.mem_gib = 512
    (finding,) = host_findings(config, (memory,))
    assert "528 GiB of host memory" in finding and "cluster.mem_gib=512" in finding
    config.cluster.mem_gib = 640
    assert host_findings(config, (memory,)) == []


def test_the_page_shows_these_numbers() -> None:
    page = (Path(__file__).parents[2] / "docs" / "layout_32b.md").read_text()
    missing = [row for row in table_rows() if row not in page]
    assert not missing, "\n".join(missing)
