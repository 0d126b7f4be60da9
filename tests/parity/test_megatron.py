"""One step of ours, tensor-parallel over two ranks, against megatron-core's GPTModel with TP=2: the same
weights and tokens, loss and every gradient, in float64.

megatron-core is written for GPUs. On the CPU it runs when told that the current device is "cpu" and that its
forked CUDA random state is nothing (there is no dropout); nothing of its arithmetic is replaced.
"""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from hpctrain.config.schema import DecoderConfig
from hpctrain.core.parallelize import own_piece
from hpctrain.models.huggingface import make_shapes
from hpctrain.models.init import make_initial
from hpctrain.selftest import compare as selftest
from tests.helpers.ranks import run_ranks
from tests.models.reference import widened
from tests.parity.cells import LENGTH, SEED, Cell, Tokens, make_batch

VOCAB = 32  # megatron-core wants a multiple of TP
TOLERANCE = 1e-10  # of float64; the largest difference measured is below 1e-14
WHY_NOT = "megatron-core is not installed: pip install -e '.[dev]'"


@dataclass(frozen=True)
class Even(Cell):
    """A cell with a vocabulary that two ranks share evenly, and norms that can be seen in the loss."""

    @property
    def model(self) -> DecoderConfig:
        return replace(super().model, vocab_size=VOCAB, rms_norm_eps=1e-3)


@pytest.fixture(scope="module", autouse=True)
def _megatron() -> None:
    """Imported once, before the ranks fork: it takes seconds, and warns of all it would like to have."""
    if importlib.util.find_spec("megatron") is None:
        pytest.fail(WHY_NOT) if os.environ.get("CI") else pytest.skip(WHY_NOT)
    with warnings.catch_warnings(action="ignore"):
        importlib.import_module("megatron.core.models.gpt.gpt_model")
        importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")


def whole(name: str, shape: tuple[int, ...], cell: Cell) -> Tensor:
    """A parameter. Norms are no ones and biases no zeros, so that a wrong one shows."""
    value = make_initial(name, shape, torch.float64, SEED, cell.model)
    generator = torch.Generator().manual_seed(sum(name.encode()))
    return value + 0.3 * torch.randn(shape, generator=generator, dtype=torch.float64)


def make_tokens(packed: bool) -> Tokens:
    batch = make_batch(0, packed)
    return replace(batch, token_BL=batch.token_BL % VOCAB, label_BL=batch.label_BL % VOCAB)


Told = dict[str, Tensor]  # this rank's part of each gradient, by Hugging Face's names, and the loss


def step_ours(cell: Even) -> Told:
    with mock.patch.object(selftest, "make_batch", lambda step, packed, sequences: make_tokens(packed)):
        microbatches = selftest.microbatches_of(cell, 0, 0)
    train = selftest.build(cell)
    with torch.no_grad():
        for name, parameter in train.parallel.model.named_parameters():
            parameter.to_local().copy_(whole(name, tuple(parameter.shape), cell)[own_piece(parameter)])
    loss = train.parallel.backward(microbatches, 0)
    dist.all_reduce(loss)
    told = {"loss": loss}
    for name, parameter in train.parallel.model.named_parameters():
        assert parameter.grad is not None
        told[name] = parameter.grad.to_local()
    return told


@contextmanager
def on_the_cpu() -> Iterator[None]:
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    with (
        warnings.catch_warnings(action="ignore"),  # of names that it has renamed itself
        mock.patch.object(torch.cuda, "current_device", lambda: "cpu"),
        mock.patch.object(CudaRNGStatesTracker, "fork", lambda self, name="": nullcontext()),
        widened(),  # its loss and rotary angles are fp32 otherwise
    ):
        yield


def build_megatron(cell: Even, tp: int) -> Any:
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
    model, has_norms = cell.model, cell.family == "qwen3"
    config = TransformerConfig(
        num_layers=model.num_hidden_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.intermediate_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_key_value_heads,
        kv_channels=model.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=model.rms_norm_eps,
        qk_layernorm=has_norms,
        add_bias_linear=False,
        add_qkv_bias=cell.family == "qwen2",
        gated_linear_unit=True,
        activation_func=F.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        params_dtype=torch.float64,
        use_cpu_initialization=True,
        perform_initialization=False,
        tensor_model_parallel_size=tp,
    )
    return GPTModel(
        config,
        get_gpt_layer_local_spec(qk_layernorm=has_norms, normalization="RMSNorm"),
        vocab_size=VOCAB,
        max_sequence_length=LENGTH,
        position_embedding_type="rope",
        rotary_base=model.rope_theta,
        share_embeddings_and_output_weights=cell.tied,
    )


def step_megatron(cell: Even, rank: int, tp: int) -> Told:
    """One step of GPTModel, its gradients by our names: its fused matrices are q, k, v of each group of heads
    one after the other, and gate above up."""
    from megatron.core.distributed.finalize_model_grads import _allreduce_non_tensor_model_parallel_grads

    with on_the_cpu():
        model = build_megatron(cell, tp)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(from_ours(name, cell, rank, tp))
    batch = make_tokens(cell.packed)
    with on_the_cpu():
        loss = run_megatron(model, batch)
        loss.backward()
        model.ddp_config = SimpleNamespace(use_megatron_fsdp=False)
        _allreduce_non_tensor_model_parallel_grads([model], model.config)
    told = {"loss": loss.detach()}
    for name, parameter in model.named_parameters():
        told |= to_ours(name, parameter.grad, cell, tp)
    return told


def run_megatron(model: Any, batch: Tokens) -> Tensor:
    """The mean loss of the tokens that count. Its positions go on through all documents of a sequence: only
    distances matter."""
    index_L = torch.arange(LENGTH)
    hidden_BLL = (index_L > index_L[:, None]).expand(len(batch.token_BL), -1, -1)
    if batch.document_BL is not None:
        hidden_BLL = hidden_BLL | (batch.document_BL[:, :, None] != batch.document_BL[:, None, :])
    positions_BL = index_L.expand_as(batch.token_BL)
    loss_BL = model(batch.token_BL, positions_BL, hidden_BLL[:, None], labels=batch.label_BL)
    loss: Tensor = (loss_BL * batch.weight_BL).sum() / batch.counts["nll"]
    return loss


OUTSIDE = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
IN_BLOCK = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
}


def names_of(name: str) -> list[str]:
    """Ours for one of megatron-core's: one, or those of a fused matrix."""
    if name in OUTSIDE:
        return [OUTSIDE[name]]
    number, _, rest = name.removeprefix("decoder.layers.").partition(".")
    block, last = f"model.layers.{number}.", rest.rpartition(".")[2]
    if rest.startswith("self_attention.linear_qkv"):
        return [f"{block}self_attn.{which}_proj.{last}" for which in "qkv"]
    if rest.startswith("mlp.linear_fc1"):
        return [f"{block}mlp.{which}_proj.{last}" for which in ("gate", "up")]
    return [block + IN_BLOCK[rest]]


def from_ours(name: str, cell: Even, rank: int, tp: int) -> Tensor:
    """A rank's part of a parameter of megatron-core, made of ours."""
    shapes = make_shapes(cell.model)
    parts = [cut(ours, whole(ours, shapes[ours], cell), rank, tp) for ours in names_of(name)]
    if "linear_qkv" not in name:
        return torch.cat(parts)
    groups = cell.model.num_key_value_heads // tp
    return torch.cat([p.unflatten(0, (groups, -1)) for p in parts], dim=1).flatten(0, 1)


def to_ours(name: str, gradient: Tensor, cell: Even, tp: int) -> Told:
    """The inverse of `from_ours`."""
    names, model = names_of(name), cell.model
    if "linear_qkv" in name:
        assert model.head_dim is not None
        heads = model.num_attention_heads // model.num_key_value_heads
        grouped = gradient.unflatten(0, (model.num_key_value_heads // tp, -1))
        sizes = [heads * model.head_dim, model.head_dim, model.head_dim]
        parts = [part.flatten(0, 1) for part in grouped.split(sizes, dim=1)]
        return dict(zip(names, parts, strict=True))
    return dict(zip(names, gradient.chunk(len(names)), strict=True))


def cut(name: str, value: Tensor, rank: int, tp: int) -> Tensor:
    """Shoeybi et al. 2019, §3: vocabulary, queries, keys, values, gate and up by rows, what follows by
    columns."""
    if "norm" in name:
        return value
    return value.chunk(tp, dim=1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0)[rank]


def compare(rank: int, world: int, cell: Even) -> list[str]:
    torch.set_default_dtype(torch.float64)
    ours = step_ours(cell)
    theirs = step_megatron(cell, rank, world)
    assert ours.keys() == theirs.keys()
    errors = {name: float((ours[name] - theirs[name]).abs().max()) for name in ours}
    assert all(float(theirs[name].abs().max()) > 1e-6 for name in theirs), "a gradient that shows nothing"
    return [f"rank {rank}: {name} {error:.1e}" for name, error in errors.items() if not error <= TOLERANCE]


@pytest.mark.parametrize(
    "cell",
    [
        Even(tp=2, packed=False, family="llama"),
        Even(tp=2, tied=True, family="qwen2", num_microbatches=1),
        Even(tp=2, sequence_parallel=True, checkpointing="full", chunk=5),
    ],
    ids=str,
)
def test_a_step_of_megatron_core_has_the_same_loss_and_gradients(cell: Even) -> None:
    assert [line for lines in run_ranks(2, compare, cell) for line in lines] == []
