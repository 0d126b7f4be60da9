from __future__ import annotations

import itertools
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from hpctrain.data import sequences as sequences_module
from hpctrain.data.order import Int64Array
from hpctrain.data.sequences import PackedSequences, best_fit, pack
from hpctrain.data.tokens import TokenSet
from hpctrain.errors import ConfigError


def _best_fit_one_by_one(sizes: list[int], capacity: int) -> list[int]:
    """Room left in the bins of the textbook's algorithm."""
    rooms: list[int] = []
    for size in sorted(sizes, reverse=True):
        fitting = [(room, i) for i, room in enumerate(rooms) if room >= size]
        if fitting:
            rooms[min(fitting)[1]] -= size
        else:
            rooms.append(capacity - size)
    return sorted(rooms)


@pytest.mark.parametrize("seed", range(60))
def test_pieces_are_packed_as_one_by_one_best_fit_packs_them(seed: int) -> None:
    rng = np.random.default_rng(seed)
    capacity = int(rng.integers(2, 60))
    sizes = rng.integers(1, capacity + 1, rng.integers(1, 150))
    bins, num_bins = best_fit(sizes, capacity)
    rooms = capacity - np.bincount(bins, weights=sizes, minlength=num_bins)
    assert sorted(rooms.tolist()) == _best_fit_one_by_one(sizes.tolist(), capacity)


def _samples(lengths: Int64Array, sequence_length: int) -> list[list[tuple[int, int]]]:
    """Of each sequence: document and first token of its pieces."""
    document, start, firsts = pack(lengths, sequence_length)
    pieces = list(zip(document.tolist(), start.tolist(), strict=True))
    return [pieces[a:b] for a, b in itertools.pairwise(firsts)]


@pytest.mark.parametrize("group_pieces", [7, 1 << 17])
@pytest.mark.parametrize("sequence_length", [2, 5, 64, 1000])
def test_every_token_is_in_one_sequence_and_documents_that_fit_are_whole(
    monkeypatch: pytest.MonkeyPatch, sequence_length: int, group_pieces: int
) -> None:
    monkeypatch.setattr(sequences_module, "_GROUP_PIECES", group_pieces)
    lengths = np.random.default_rng(0).integers(1, 200, 300)
    pieces: list[tuple[int, int]] = []
    for sample in _samples(lengths, sequence_length):
        pieces += sample
        sizes = [min(int(lengths[document]) - start, sequence_length) for document, start in sample]
        assert sample and sum(sizes) <= sequence_length
    expected = [
        (document, start)
        for document, length in enumerate(lengths.tolist())
        for start in range(0, length, sequence_length)
        # A rest of one token is no input to anything; it is the label of the token before it.
        if start == 0 or length - start > 1
    ]
    assert sorted(pieces) == expected


def test_packing_is_a_function_of_the_lengths_alone() -> None:
    lengths = np.random.default_rng(0).integers(1, 3000, 5000)
    assert _samples(lengths, 1024) == _samples(lengths.copy(), 1024)
    assert Counter(map(len, _samples(lengths, 1024))) != Counter(map(len, _samples(lengths + 1, 1024)))


def test_neighbouring_sequences_are_mixed_by_length() -> None:
    """Longest first would give all long documents to the first steps of a window."""
    lengths = np.random.default_rng(0).integers(1, 1000, 20_000)
    counts = np.array([len(sample) for sample in _samples(lengths, 1000)], dtype=float)
    assert abs(np.corrcoef(counts[1:], counts[:-1])[0, 1]) < 0.05
    halves = counts[: len(counts) // 2].mean() / counts[len(counts) // 2 :].mean()
    assert 0.95 < halves < 1.05


def test_a_million_documents_are_packed_in_seconds_and_nearly_without_waste() -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(6.3, 1.0, 1_000_000), 2, 200_000).astype(np.int64)
    started_s = time.process_time()
    _, _, firsts = pack(lengths, 4096)
    assert time.process_time() - started_s < 6  # ten million in a minute; measured: 1.5
    assert 1 - lengths.sum() / ((len(firsts) - 1) * 4096) < 1e-3


def test_waste_and_sizes_of_real_documents(token_folder: Path) -> None:
    tokens = TokenSet(token_folder / "train")
    for sequence_length in (16, 64, 512):
        packed = PackedSequences(tokens, sequence_length)
        filled = [sum(b - a for _, a, b in packed.pieces(i)) for i in range(packed.num_samples)]
        assert packed.waste == pytest.approx(1 - sum(filled) / (packed.num_samples * sequence_length))
        assert max(filled) <= sequence_length


def test_weights_of_all_samples_are_those_of_the_split_for_any_sequence_length(token_folder: Path) -> None:
    tokens = TokenSet(token_folder / "train")
    for sequence_length in (2, 3, 16, 64, 512):
        packed = PackedSequences(tokens, sequence_length)
        assert packed.num_learnt(np.arange(packed.num_samples)) == tokens.meta.num_learnt
        one_by_one = [packed.num_learnt(np.array([i])) for i in range(packed.num_samples)]
        assert sum(one_by_one) == tokens.meta.num_learnt
    assert packed.num_learnt(np.array([], dtype=np.int64)) == 0


def test_a_sequence_of_one_token_is_refused(token_folder: Path) -> None:
    with pytest.raises(ConfigError, match="sequence_length=1"):
        PackedSequences(TokenSet(token_folder / "train"), 1)
