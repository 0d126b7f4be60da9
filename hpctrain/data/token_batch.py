"""A batch of packed sequences, and how it is made of sample ids.

B samples   L positions of a sequence
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from hpctrain.data.batch import TensorFields
from hpctrain.data.order import Int64Array
from hpctrain.data.sequences import PackedSequences
from hpctrain.errors import DataError


@dataclass
class TokenBatch(TensorFields):
    """One microbatch of one rank."""

    token_BL: torch.Tensor  #: int64; 0 where padded
    label_BL: torch.Tensor  #: int64: the document's next token, also beyond a cut; 0 where there is none
    #: float32; 1 where the label is learnt, 0 where it is not, at the last token of a document, in padding,
    #: and in samples that are padding themselves.
    weight_BL: torch.Tensor
    position_BL: torch.Tensor  #: int64, from 0 in each document, and in each piece of a cut one
    document_BL: torch.Tensor  #: int32, number of the document in the sequence; padding is one more
    sample_id_B: torch.Tensor  #: int64
    epoch: int
    step: int  #: step in the epoch, from 0
    #: "nll": weights of the whole global batch (all ranks, all microbatches; without padding).
    counts: dict[str, float]
    damaged: list[tuple[int, str]] = field(default_factory=list)  #: stays empty: tokens cannot half decode

    def inputs(self) -> dict[str, torch.Tensor]:
        """Returns what `Decoder.forward` takes besides the tokens."""
        return {name: getattr(self, name) for name in ("position_BL", "document_BL", "label_BL", "weight_BL")}


def make_token_batch(
    sequences: PackedSequences,
    sample_ids: Int64Array,
    is_real: npt.NDArray[np.bool_],
    epoch: int,
    step: int,
    num_learnt: float,
) -> TokenBatch | DataError:
    """Makes a batch, or returns the error: raised in a worker, it would come out as a traceback.

    Args:
        is_real: Of each sample; the others get weight 0.
        num_learnt: Weights of the whole global batch.
    """
    shape = (len(sample_ids), sequences.sequence_length)
    token_BL, label_BL, position_BL = (np.zeros(shape, dtype=np.int64) for _ in range(3))
    weight_BL, document_BL = np.zeros(shape, dtype=np.float32), np.zeros(shape, dtype=np.int32)
    try:
        for i, sample_id in enumerate(sample_ids.tolist()):
            end = _fill(
                sequences, sample_id, token_BL[i], label_BL[i], weight_BL[i], position_BL[i], document_BL[i]
            )
            position_BL[i, end:] = np.arange(shape[1] - end)
    except DataError as error:
        return error
    weight_BL *= is_real[:, None]
    return TokenBatch(
        token_BL=torch.from_numpy(token_BL),
        label_BL=torch.from_numpy(label_BL),
        weight_BL=torch.from_numpy(weight_BL),
        position_BL=torch.from_numpy(position_BL),
        document_BL=torch.from_numpy(document_BL),
        sample_id_B=torch.from_numpy(sample_ids),
        epoch=epoch,
        step=step,
        counts={"nll": num_learnt},
    )


def _fill(
    sequences: PackedSequences,
    sample_id: int,
    token_L: Int64Array,
    label_L: Int64Array,
    weight_L: npt.NDArray[np.float32],
    position_L: Int64Array,
    document_L: npt.NDArray[np.int32],
) -> int:
    """Writes a sample's documents one after the other; returns where padding begins."""
    at = 0
    for number, (document, start, stop) in enumerate(sequences.pieces(sample_id)):
        end = at + stop - start
        # One token more, where there is one: the label of a piece's last token.
        tokens = sequences.tokens.tokens(document, start, stop + 1)
        token_L[at:end] = tokens[: stop - start]
        label_L[at : at + len(tokens) - 1] = tokens[1:]
        weight_L[at : at + len(tokens) - 1] = sequences.tokens.learnt(document, start + 1, stop + 1)
        position_L[at:end] = np.arange(stop - start)
        document_L[at:end] = number
        document_L[end:] = number + 1
        at = end
    return at
