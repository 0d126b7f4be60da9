"""How long a device computes on a block, on the head, and on an update of the weights.

A matrix product has a roofline (Williams et al. 2009) with a smooth corner, √(operations² + traffic²) in
time, so that small and thin ones are slower. Everything between products is traffic alone. Attention sums in
fp32 whatever the products do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from hpctrain.config.hardware import Hardware
from hpctrain.config.schema import Checkpointing, DecoderConfig, DecoderFamily, OptimConfig, OptimizerKind
from hpctrain.plan.costs import block_linears, head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """What an implementation moves between products: reads and writes of each number, forward and backward.

    The widths are those of the residual stream, of the query heads, of the key heads, and of the MLP.
    """

    residual: tuple[float, float]
    queries: tuple[float, float]
    keys: tuple[float, float]
    mlp: tuple[float, float]
    head_norms: tuple[float, float]  #: of queries and keys, in qwen3
    logit_bytes: tuple[float, float]  #: of each logit, in fp32 for the most part
    chunked_logit_bytes: float  #: backward, where logits are computed again
    # Moved in memory beside links, of each weight of a whole block and of each of a rank's share:
    gather_bytes: tuple[float, float]  #: to have it in the compute format
    reduce_bytes: tuple[float, float]  #: from a gradient in the compute format to a sum in fp32
    reduce_element: int = 4  #: bytes of a gradient that crosses links
    reduces_once: bool = False  #: a step, in its last microbatch, instead of in every one
    score_bytes: tuple[float, float]  #: of each entry of attention's square; 0 where it stays in the kernel
    whole_square: bool  #: attention computes what causality hides as well
    repeats_last: bool  #: recomputation goes to the very end of a block
    operators: tuple[int, int]  #: started one by one for a block


# Counted from models/attention.py, models/rope.py, models/token_loss.py and FSDP2 (torch 2.14). Rotation is
# written out and in fp32; documents are told apart by a mask, which attention reads for every head, and for
# which it computes the whole square.
EAGER = Kernels(
    residual=(10, 21),
    queries=(24, 33),
    keys=(20, 27),
    mlp=(5, 9),
    head_norms=(2, 3),
    logit_bytes=(30, 22),
    chunked_logit_bytes=36,
    gather_bytes=(4, 10),
    reduce_bytes=(6, 20),
    score_bytes=(2, 2),
    whole_square=True,
    repeats_last=False,
    operators=(40, 70),
)

# torch.compile makes one kernel of what lies between two products.
COMPILED = replace(
    EAGER,
    residual=(8, 13),
    queries=(8, 12),
    keys=(4, 5),
    mlp=(3, 5),
    head_norms=(1, 2),
    operators=(15, 25),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a rank computes of a microbatch, and with what."""

    model: DecoderConfig
    tokens: int  #: of a microbatch
    length: int  #: of a sequence
    tp: int
    token_shards: int  #: ranks that share the tokens between the matrices
    element: int  #: bytes of a number in the compute format
    product_flops: float  #: operations a second of large products
    hardware: Hardware
    kernels: Kernels

    def product_s(self, tokens: int, inputs: float, outputs: float) -> float:
        """A matrix product [tokens, inputs] · [inputs, outputs]."""
        flops = 2.0 * tokens * inputs * outputs
        moved = self.element * (tokens * inputs + inputs * outputs + tokens * outputs)
        return math.hypot(flops / self.product_flops, self.memory_s(moved))

    def memory_s(self, moved_bytes: float) -> float:
        return moved_bytes / (self.hardware["memory_gbps"] * 1e9)


@dataclass(frozen=True, slots=True)
class Passes:
    """Seconds of a block or a head for one microbatch."""

    forward: float
    backward: float
    recompute: float  #: before the backward


def block_passes(work: Work, checkpointing: Checkpointing) -> Passes:
    """One block. Frozen matrices have no gradient of their own."""
    model, kernels, hardware = work.model, work.kernels, work.hardware
    products = trained = last = 0.0
    for linear in block_linears(model):
        rowwise = linear.name in ("o_proj", "down_proj")
        inputs = linear.inputs / work.tp if rowwise else linear.inputs
        outputs = linear.outputs if rowwise else linear.outputs / work.tp
        own = work.product_s(work.tokens, inputs, outputs)
        products += own
        if linear.name == "down_proj":
            last = own
        if model.lora.rank and linear.name in model.lora.targets:
            trained += _adapter_s(work, inputs, outputs)
    frozen = bool(model.lora.rank)
    attention, scores = _attention_s(work), [_scores_s(work, index) for index in (0, 1)]
    forward_memory, backward_memory = (_memory_s(work, index) for index in (0, 1))
    forward = products + trained + attention + scores[0] + forward_memory
    # Gradient of the input and gradient of the weights; attention computes its scores again (Dao 2023, §3).
    backward = products * (1 if frozen else 2) + 2 * trained + 2.5 * attention + scores[1] + backward_memory
    forward = max(forward, kernels.operators[0] * hardware["launch_us"] * 1e-6)
    backward = max(backward, kernels.operators[1] * hardware["launch_us"] * 1e-6)
    recompute = {
        Checkpointing.none: 0.0,
        Checkpointing.selective: forward_memory,
        Checkpointing.full: forward - (0.0 if kernels.repeats_last else last),
    }[checkpointing]
    return Passes(forward, backward, recompute)


def _adapter_s(work: Work, inputs: float, outputs: float) -> float:
    """x A B and its addition to what the frozen matrix gives."""
    rank = work.model.lora.rank
    adds = 3 * work.element * work.tokens * outputs
    drops = 3 * work.element * work.tokens * inputs if work.model.lora.dropout else 0
    down, up = work.product_s(work.tokens, inputs, rank), work.product_s(work.tokens, rank, outputs)
    return down + up + work.memory_s(adds + drops)


def _attention_s(work: Work) -> float:
    """Q·K and P·V of all heads of this rank, over the causal half or the whole of the square."""
    span = work.length if work.kernels.whole_square else (work.length + 1) / 2
    if work.model.sliding_window is not None and not work.kernels.whole_square:
        span = min(span, work.model.sliding_window)
    width = work.model.num_attention_heads * head_dim(work.model) / work.tp
    peak = work.hardware["fp32_tflops" if work.element == 4 else "bf16_tflops"] * 1e12
    return 4.0 * work.tokens * span * width / (peak * work.hardware["attention_efficiency"])


def _scores_s(work: Work, index: int) -> float:
    heads = work.model.num_attention_heads / work.tp
    return work.memory_s(work.kernels.score_bytes[index] * work.tokens * work.length * heads)


def _memory_s(work: Work, index: int) -> float:
    """Everything between the products of a block. `index`: 0 forward, 1 backward."""
    model, kernels = work.model, work.kernels
    queries = model.num_attention_heads * head_dim(model) / work.tp
    keys = model.num_key_value_heads * head_dim(model) / work.tp
    numbers = (
        kernels.residual[index] * model.hidden_size / work.token_shards
        + kernels.queries[index] * queries
        + kernels.keys[index] * keys
        + kernels.mlp[index] * model.intermediate_size / work.tp
    )
    if model.family is DecoderFamily.qwen3:
        numbers += kernels.head_norms[index] * (queries + keys)
    return work.memory_s(numbers * work.element * work.tokens)


def head_passes(work: Work) -> Passes:
    """The head and the loss; with chunks the logits are computed again in backward."""
    model, kernels = work.model, work.kernels
    vocabulary = model.vocab_size / work.tp
    product = work.product_s(work.tokens, model.hidden_size, vocabulary)
    logits = work.tokens * vocabulary
    chunks = model.loss_chunk_tokens
    tables = 1 if model.lora.rank else 2
    if chunks and not model.lora.rank:  # each chunk's part of the gradient is added in fp32
        added = (4 + 4 + work.element) * model.hidden_size * vocabulary * -(-work.tokens // chunks)
    else:
        added = 0.0
    forward = product + work.memory_s(logits * kernels.logit_bytes[0])
    backward = product * tables + work.memory_s(
        logits * (kernels.chunked_logit_bytes if chunks else kernels.logit_bytes[1]) + added
    )
    return Passes(forward, backward, product if chunks else 0.0)


def update_bytes(optim: OptimConfig, trained: float) -> float:
    """Bytes that the optimizer reads and writes for so many parameters, all fp32: weight, gradient and states
    read, weight and states written; the norm reads the gradient, clipping reads and writes it."""
    numbers = 7 if optim.kind is OptimizerKind.adamw else 5
    numbers += 1 + (2 if optim.clip_norm is not None else 0) + (3 if optim.ema_decay is not None else 0)
    return 4.0 * numbers * trained
