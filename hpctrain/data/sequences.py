"""Samples of tokens: sequences that hold whole documents, packed best-fit, and pieces of long ones.

A document that fits into a sequence is never cut; a longer one is cut into whole sequences and a rest. The
pieces of some neighbouring documents are packed together, longest first, each into the fullest sequence that
still has room (best-fit decreasing, Johnson et al., SIAM J. Comput. 3, 1974), and the sequences then mixed.
It is a pure function of the documents' lengths: every rank computes it anew.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import numpy.typing as npt

from hpctrain.data.order import Int64Array, Stream, permutation
from hpctrain.data.tokens import TokenSet
from hpctrain.errors import ConfigError

#: Pieces packed together. Many fill sequences well; few lie near each other in storage.
_GROUP_PIECES = 1 << 17


class PackedSequences:
    """The samples 0 … num_samples-1 of a split for one sequence length.

    Raises:
        ConfigError: the sequence length is below 2.
    """

    def __init__(self, tokens: TokenSet, sequence_length: int) -> None:
        if sequence_length < 2:
            raise ConfigError(
                f"data.sequence_length={sequence_length}", "a token needs a next one", "set 2 or more"
            )
        self.tokens, self.sequence_length, self.folder = tokens, sequence_length, tokens.folder
        lengths = tokens.documents["length"].astype(np.int64)
        self._document, self._start, self._first = pack(lengths, sequence_length)

    @property
    def num_samples(self) -> int:
        """Samples in the split."""
        return len(self._first) - 1

    @property
    def waste(self) -> float:
        """Share of all positions that are padding, 0 … 1."""
        num_tokens = int(self._lengths(slice(None)).sum())
        return 1.0 - num_tokens / max(1, self.num_samples * self.sequence_length)

    def pieces(self, sample_id: int) -> list[tuple[int, int, int]]:
        """Returns the pieces of a sample in order: document, first token in it, token after the last."""
        own = slice(self._first[sample_id], self._first[sample_id + 1])
        starts = self._start[own]
        stops = starts + self._lengths(own)
        return list(zip(self._document[own].tolist(), starts.tolist(), stops.tolist(), strict=True))

    def num_learnt(self, sample_ids: Int64Array) -> int:
        """Returns how many tokens of these samples have weight in the loss, all samples together."""
        firsts, counts = self._first[sample_ids], np.diff(self._first)[sample_ids]
        before = np.cumsum(counts) - counts
        own = np.arange(counts.sum()) + np.repeat(firsts - before, counts)
        records = self.tokens.documents[self._document[own]]
        is_whole = records["length"] <= self.sequence_length
        total = int(records["learnt"][is_whole].sum(dtype=np.int64))
        stops = self._start[own] + self._lengths(own)
        for document, start, stop in zip(
            *(array[~is_whole].tolist() for array in (self._document[own], self._start[own], stops)),
            strict=True,
        ):
            total += int(self.tokens.learnt(document, start + 1, stop + 1).sum())
        return total

    def _lengths(self, pieces: slice | Int64Array) -> Int64Array:
        lengths: Int64Array = self.tokens.documents["length"][self._document[pieces]].astype(np.int64)
        return np.asarray(np.minimum(self.sequence_length, lengths - self._start[pieces]), dtype=np.int64)


def pack(
    lengths: Int64Array, sequence_length: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], Int64Array]:
    """Cuts documents into pieces and packs these into sequences.

    Args:
        lengths: Tokens of each document, at least 1.

    Returns:
        Of each piece, in the order of the sequences, its document and its first token in it; and of each
        sequence its first piece, with the number of pieces at the end.
    """
    # A last piece of one token would predict nothing: the piece before it predicts that token.
    used = lengths - ((lengths > sequence_length) & (lengths % sequence_length == 1))
    counts = -(-used // sequence_length)
    document = np.repeat(np.arange(len(lengths)), counts)
    number = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    start = number * sequence_length
    sizes = np.minimum(used[document] - start, sequence_length)
    sequence_of, num_sequences = np.empty(len(document), dtype=np.int64), 0
    for group, first in enumerate(range(0, len(document), _GROUP_PIECES)):
        own = slice(first, first + _GROUP_PIECES)
        bins, num_bins = best_fit(sizes[own], sequence_length)
        # Longest first would put like by like; neighbours shall be as mixed as the documents.
        sequence_of[own] = num_sequences + permutation(0, 0, Stream.packing, group, num_bins)[bins]
        num_sequences += num_bins
    order = np.argsort(sequence_of, kind="stable")
    firsts = np.searchsorted(sequence_of[order], np.arange(num_sequences + 1))
    return document[order].astype(np.int32), start[order].astype(np.int32), firsts.astype(np.int64)


def best_fit(sizes: Int64Array, capacity: int) -> tuple[Int64Array, int]:
    """Packs pieces, longest first, each into the fullest bin with room; equal ones in one go.

    Args:
        sizes: Of the pieces, 1 … capacity.

    Returns:
        The bin of each piece, and the number of bins.
    """
    order = np.argsort(-sizes, kind="stable")
    values, counts = np.unique(sizes, return_counts=True)
    bin_of_sorted, num_bins = np.empty(len(sizes), dtype=np.int64), 0
    rooms: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)  # room left -> ranges of bins
    has_room = 0  # bit r: some bin has room r
    place = 0  # next piece, in sorted order
    for size, count in zip(values[::-1].tolist(), counts[::-1].tolist(), strict=True):
        while count:
            fitting = has_room >> size
            if fitting:
                room = size + (fitting & -fitting).bit_length() - 1
                first, after = rooms[room].pop()
                if not rooms[room]:
                    has_room ^= 1 << room
            else:
                room, first, after = capacity, num_bins, num_bins - (-count // (capacity // size))
                num_bins = after
            # The fullest bin takes the next one too, as long as it has room.
            each = min(room // size, count)
            last = min(after, first + count // each)
            bin_of_sorted[place : place + each * (last - first)] = np.repeat(np.arange(first, last), each)
            place, count = place + each * (last - first), count - each * (last - first)
            for left, begin, end in ((room - each * size, first, last), (room, last, after)):
                if begin < end and left:
                    rooms[left].append((begin, end))
                    has_room |= 1 << left
    bins = np.empty(len(sizes), dtype=np.int64)
    bins[order] = bin_of_sorted
    return bins, num_bins
