"""A decoder of the Llama, Mistral, Qwen2 or Qwen3 family, whole or one pipeline stage of it.

Parameters are named as in Hugging Face. Nothing here is parallel: tensor, pipeline and data parallelism are
applied from outside, with the plan at the head of this file.
Shapes: B sequences, L tokens, D hidden, V vocabulary, K head_dim.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hpctrain.config.rope import get_rope_type
from hpctrain.config.schema import DecoderConfig
from hpctrain.errors import ConfigError
from hpctrain.models.attention import Block, RmsNorm
from hpctrain.models.rope import make_rotation
from hpctrain.models.token_loss import LmHead

BLOCKS = "model.layers"
TP_PLAN = {
    "model.embed_tokens": "embedding",
    "model.layers.*.input_layernorm": "norm",
    "model.layers.*.self_attn.q_proj": "colwise",
    "model.layers.*.self_attn.k_proj": "colwise",
    "model.layers.*.self_attn.v_proj": "colwise",
    "model.layers.*.self_attn.q_norm": "head_norm",
    "model.layers.*.self_attn.k_norm": "head_norm",
    "model.layers.*.self_attn.o_proj": "rowwise",
    "model.layers.*.attention_dropout": "residual_dropout",
    "model.layers.*.post_attention_layernorm": "norm",
    "model.layers.*.mlp.gate_proj": "colwise",
    "model.layers.*.mlp.up_proj": "colwise",
    "model.layers.*.mlp.down_proj": "rowwise",
    "model.layers.*.mlp_dropout": "residual_dropout",
    "model.norm": "norm",
    "lm_head": "head",
}


class Trunk(nn.Module):
    """Everything but the head: embedding, blocks, last norm, as far as this stage has them."""

    def __init__(
        self, config: DecoderConfig, layers: range, has_embedding: bool, has_norm: bool, needs_matrix: bool
    ) -> None:
        super().__init__()
        self.head_dim = config.head_dim or config.hidden_size // config.num_attention_heads
        self.has_embedding = has_embedding
        self.embed_tokens: nn.Embedding | None = None
        if needs_matrix:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleDict({str(i): Block(config, self.head_dim, i) for i in layers})
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps) if has_norm else None


class Decoder(nn.Module):
    """See the head of the file.

    Args:
        config: of the whole decoder.
        layers: the blocks of this stage; None for all.
        has_embedding: this stage turns tokens into hidden states.
        has_head: this stage has the last norm and the head. Where the head is tied it holds the embedding's
            matrix too, under the embedding's name.

    What a config may ask for is in `plan.decoder_legality`.
    """

    def __init__(
        self,
        config: DecoderConfig,
        layers: range | None = None,
        has_embedding: bool = True,
        has_head: bool = True,
    ) -> None:
        super().__init__()
        self.config = config
        layers = range(config.num_hidden_layers) if layers is None else layers
        is_tied = has_head and config.tie_word_embeddings
        self.model = Trunk(config, layers, has_embedding, has_head, has_embedding or is_tied)
        self.lm_head: LmHead | None = None
        if has_head:
            tied = self.model.embed_tokens if is_tied else None
            self.lm_head = LmHead(config.vocab_size, config.hidden_size, config.loss_chunk_tokens, tied)

    def forward(
        self,
        x: Tensor,
        position_BL: Tensor,
        document_BL: Tensor | None = None,
        label_BL: Tensor | None = None,
        weight_BL: Tensor | None = None,
        dropout_key_B: Tensor | None = None,
    ) -> Tensor:
        """Return hidden states [B, L, D]; with the head, each sequence's weighted sum of token losses, [B].

        Args:
            x: tokens, int64 [B, L], on a stage with the embedding; else hidden states [B, L, D].
            position_BL: position of each token in its document.
            document_BL: number of each token's document; tokens see their own document only. None where
                each sequence is one document.
            label_BL: the next token, int64; with the head only. Any number where the weight is 0.
            weight_BL: weight of each token's loss; with the head only.
            dropout_key_B: int64, another one for each sequence of each step; None for no dropout.

        Raises:
            ConfigError: dynamic RoPE scaling would begin to scale.
        """
        hidden_BLD = self._run_blocks(x, position_BL, document_BL, dropout_key_B)
        if self.lm_head is None:
            return hidden_BLD
        assert label_BL is not None and weight_BL is not None
        nll_B: Tensor = self.lm_head(hidden_BLD, label_BL, weight_BL)
        return nll_B

    def logits(self, x: Tensor, position_BL: Tensor, document_BL: Tensor | None = None) -> Tensor:
        """Return the logits, [B, L, V], of an undivided decoder, without dropout."""
        assert self.lm_head is not None
        return self.lm_head.logits(self._run_blocks(x, position_BL, document_BL, None))

    def _run_blocks(
        self, x: Tensor, position_BL: Tensor, document_BL: Tensor | None, dropout_key_B: Tensor | None
    ) -> Tensor:
        trunk, config = self.model, self.config
        num_tokens = position_BL.shape[1]
        if get_rope_type(config.rope_scaling) == "dynamic" and num_tokens > config.max_position_embeddings:
            raise ConfigError(
                f"sequences of {num_tokens} tokens with model.rope_scaling rope_type=dynamic",
                "beyond max_position_embeddings="
                f"{config.max_position_embeddings} its angles depend on the longest text of the batch",
                "shorten data.sequence_length, or take rope_type yarn",
            )
        hidden_BLD = x
        if trunk.has_embedding and trunk.embed_tokens is not None:
            hidden_BLD = trunk.embed_tokens(x)
        cos_B1LK, sin_B1LK = make_rotation(position_BL, config, trunk.head_dim, hidden_BLD.dtype)
        plain = make_mask(document_BL, num_tokens, None, x.device)
        windowed = plain
        if config.sliding_window is not None and config.sliding_window < num_tokens:
            windowed = make_mask(document_BL, num_tokens, config.sliding_window, x.device)
        for index, block in trunk.layers.items():
            mask = windowed if int(index) >= config.max_window_layers else plain
            hidden_BLD = block(hidden_BLD, cos_B1LK, sin_B1LK, mask, dropout_key_B)
        return hidden_BLD if trunk.norm is None else trunk.norm(hidden_BLD)


def make_mask(
    document_BL: Tensor | None, num_tokens: int, window: int | None, device: torch.device
) -> Tensor | None:
    """Return what each token may see, bool [B or 1, 1, L, L]: itself and those before it, in its document
    and among the last `window`; None where that is plain causal attention."""
    if document_BL is None and window is None:
        return None
    index_L = torch.arange(num_tokens, device=device)
    back_LL = index_L[:, None] - index_L
    seen_B1LL = (back_LL >= 0)[None, None]
    if window is not None:
        seen_B1LL = seen_B1LL & (back_LL < window)
    if document_BL is not None:
        seen_B1LL = seen_B1LL & (document_BL[:, None, :, None] == document_BL[:, None, None, :])
    return seen_B1LL
