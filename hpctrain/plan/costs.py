"""Parameters and floating-point operations of decoders, in closed form from the config.

A multiply-add counts as two operations; norms, rotations and activation functions are left out, as in
Kaplan et al. 2020 (table 1) and Narayanan et al. 2021 (section 5.1).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from hpctrain.config.schema import DecoderConfig, DecoderFamily


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """One matrix of a block. `tp` splits it along its output (colwise) or its input (rowwise)."""

    name: str
    inputs: int
    outputs: int
    bias: bool

    @property
    def parameters(self) -> int:
        return self.inputs * self.outputs + (self.outputs if self.bias else 0)


def head_dim(model: DecoderConfig) -> int:
    return model.head_dim or model.hidden_size // model.num_attention_heads


def block_linears(model: DecoderConfig) -> tuple[Linear, ...]:
    """The seven matrices of a block."""
    return _block_linears(
        model.hidden_size,
        model.intermediate_size,
        model.num_attention_heads * head_dim(model),
        model.num_key_value_heads * head_dim(model),
        model.attention_bias or model.family is DecoderFamily.qwen2,
        model.attention_bias and model.family is not DecoderFamily.qwen2,
    )


@cache  # a search asks thousands of times
def _block_linears(
    hidden: int, intermediate: int, queries: int, keys: int, bias: bool, output_bias: bool
) -> tuple[Linear, ...]:
    sizes = {
        "q_proj": (hidden, queries, bias),
        "k_proj": (hidden, keys, bias),
        "v_proj": (hidden, keys, bias),
        "o_proj": (queries, hidden, output_bias),
        "gate_proj": (hidden, intermediate, False),
        "up_proj": (hidden, intermediate, False),
        "down_proj": (intermediate, hidden, False),
    }
    return tuple(
        Linear(name=name, inputs=inputs, outputs=outputs, bias=has_bias)
        for name, (inputs, outputs, has_bias) in sizes.items()
    )


def block_parameters(model: DecoderConfig) -> int:
    """Parameters of one block without adapters."""
    norms = 2 * model.hidden_size
    if model.family is DecoderFamily.qwen3:
        norms += 2 * head_dim(model)
    return _parameters(block_linears(model)) + norms


@cache
def _parameters(linears: tuple[Linear, ...]) -> int:
    return sum(linear.parameters for linear in linears)


def adapter_parameters(model: DecoderConfig) -> int:
    """Parameters of the LoRA adapters of one block."""
    rank = model.lora.rank
    targets = [linear for linear in block_linears(model) if linear.name in model.lora.targets]
    return sum(rank * (linear.inputs + linear.outputs) for linear in targets)


def embedding_parameters(model: DecoderConfig) -> int:
    """Parameters of the embedding, and of the head too, which is of the same size."""
    return model.vocab_size * model.hidden_size


def stage_parameters(model: DecoderConfig, layers: int, has_embedding: bool, has_head: bool) -> int:
    """Parameters of a pipeline stage; tied weights exist on the first and on the last stage."""
    tables = 1 if has_embedding and has_head and model.tie_word_embeddings else has_embedding + has_head
    final_norm = model.hidden_size if has_head else 0
    block = block_parameters(model) + adapter_parameters(model)
    return layers * block + tables * embedding_parameters(model) + final_norm


def parameters(model: DecoderConfig) -> int:
    """Parameters of the whole model."""
    return stage_parameters(model, model.num_hidden_layers, has_embedding=True, has_head=True)


def trainable_parameters(model: DecoderConfig) -> int:
    """Parameters that get gradients: all of them, or the adapters alone."""
    if model.lora.rank:
        return model.num_hidden_layers * adapter_parameters(model)
    return parameters(model)


def block_forward_flops(model: DecoderConfig, sequence_length: int) -> int:
    """Forward operations of one block for one sequence, causal attention counted at half of the square."""
    matrices = sum(2 * linear.inputs * linear.outputs for linear in block_linears(model))
    span = sequence_length * (sequence_length + 1) // 2
    attention = 2 * 2 * span * model.num_attention_heads * head_dim(model)
    return sequence_length * (matrices + 2 * adapter_parameters(model)) + attention


def head_forward_flops(model: DecoderConfig, sequence_length: int) -> int:
    """Forward operations of the head for one sequence."""
    return 2 * sequence_length * embedding_parameters(model)


def forward_flops(model: DecoderConfig, sequence_length: int) -> int:
    """Forward operations of the whole model for one sequence; the embedding looks up and computes nothing."""
    blocks = model.num_hidden_layers * block_forward_flops(model, sequence_length)
    return blocks + head_forward_flops(model, sequence_length)
