from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpctrain.config.schema import TokenDataConfig
from hpctrain.data.loader import TrainLoader
from hpctrain.data.order import EpochOrder, samples_after, steps_per_epoch
from hpctrain.data.sequences import PackedSequences
from hpctrain.data.token_batch import TokenBatch, make_token_batch
from hpctrain.data.token_loader import build_token_eval_loader, build_token_train_loader
from hpctrain.data.tokens import TokenSet
from hpctrain.errors import ConfigError, DataError

# More workers than this machine may have cores is what some of these tests are about.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

LENGTH = 64
GLOBAL_BATCH = 24
SEED = 5


@pytest.fixture(scope="module")
def sequences(token_folder: Path) -> PackedSequences:
    packed = PackedSequences(TokenSet(token_folder / "train"), LENGTH)
    assert packed.num_samples % GLOBAL_BATCH and packed.num_samples > 3 * GLOBAL_BATCH
    assert len(packed.tokens.meta.shards) > 3
    return packed


def _data(num_workers: int = 0) -> TokenDataConfig:
    return TokenDataConfig(
        num_workers=num_workers, prefetch=2, block_samples=8, window_blocks=3, sequence_length=LENGTH
    )


def _loader(sequences: PackedSequences, rank: int, world: int, **changed: Any) -> TrainLoader[TokenBatch]:
    arguments: dict[str, Any] = {
        "data": _data(),
        "seed": SEED,
        "global_batch_size": GLOBAL_BATCH,
        "samples_consumed": 0,
        "num_epochs": 2,
    }
    return build_token_train_loader(sequences, rank=rank, world=world, **{**arguments, **changed})


@dataclass
class _Seen:
    """What all ranks together saw, in the global order."""

    ids: dict[tuple[int, int], list[int]] = field(default_factory=dict)  #: by epoch and step
    rows: dict[tuple[int, int], list[bytes]] = field(default_factory=dict)  #: tokens, labels, weights …
    counts: dict[tuple[int, int], float] = field(default_factory=dict)
    weights: dict[tuple[int, int], float] = field(default_factory=dict)

    def add(self, batch: TokenBatch) -> None:
        at = (batch.epoch, batch.step)
        self.ids.setdefault(at, []).extend(batch.sample_id_B.tolist())
        tensors = [batch.token_BL, *batch.inputs().values()]
        for i in range(len(batch.sample_id_B)):
            self.rows.setdefault(at, []).append(b"".join(each[i].numpy().tobytes() for each in tensors))
        assert self.counts.setdefault(at, batch.counts["nll"]) == batch.counts["nll"]
        self.weights[at] = self.weights.get(at, 0.0) + float(batch.weight_BL.sum())


def _see(sequences: PackedSequences, world: int, **changed: Any) -> _Seen:
    seen = _Seen()
    for rank in range(world):
        for step in _loader(sequences, rank, world, **changed):
            for batch in step:
                seen.add(batch)
    return seen


@pytest.fixture(scope="module")
def reference(sequences: PackedSequences) -> _Seen:
    """One rank, no worker, undisturbed."""
    return _see(sequences, 1)


def _expected_row(sequences: PackedSequences, sample_id: int) -> list[tuple[int, int, float, int, int]]:
    """Token, label, weight, position and document of each place, one by one."""
    tokens, places = sequences.tokens, []
    for number, (document, start, stop) in enumerate(sequences.pieces(sample_id)):
        ids, learnt = tokens.tokens(document).tolist(), tokens.learnt(document).tolist()
        for at in range(start, stop):
            has_next = at + 1 < len(ids)
            label, weight = (ids[at + 1], float(learnt[at + 1])) if has_next else (0, 0.0)
            places.append((ids[at], label, weight, at - start, number))
    padding = LENGTH - len(places)
    return places + [(0, 0, 0.0, i, len(sequences.pieces(sample_id))) for i in range(padding)]


def test_a_row_holds_its_documents_with_next_tokens_as_labels(sequences: PackedSequences) -> None:
    ids = np.arange(sequences.num_samples)
    batch = make_token_batch(sequences, ids, np.ones(len(ids), dtype=bool), 0, 0, 1.0)
    assert isinstance(batch, TokenBatch)
    columns = (batch.token_BL, batch.label_BL, batch.weight_BL, batch.position_BL, batch.document_BL)
    assert [each.dtype for each in columns] == [
        torch.int64,
        torch.int64,
        torch.float32,
        torch.int64,
        torch.int32,
    ]
    for i in ids.tolist():
        found = list(zip(*(each[i].tolist() for each in columns), strict=True))
        assert found == _expected_row(sequences, i)
    assert any(len(sequences.pieces(i)) > 1 for i in ids.tolist())


def test_what_is_learnt_in_a_batch_are_the_agents_words(sequences: PackedSequences) -> None:
    """A loss on the wrong side of the shift would learn the first token of the customer."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(sequences.tokens.tokenizer_folder / "tokenizer.json"))
    calls = [i for i in range(sequences.tokens.num_documents) if not sequences.tokens.learnt(i).all()]
    whole = [i for i in range(sequences.num_samples) if any(d in calls for d, _, _ in sequences.pieces(i))]
    assert whole
    for i in whole:
        batch = make_token_batch(sequences, np.array([i]), np.array([True]), 0, 0, 1.0)
        assert isinstance(batch, TokenBatch)
        for number, (document, start, _) in enumerate(sequences.pieces(i)):
            if document in calls and start == 0:
                chosen = (batch.document_BL[0] == number) & (batch.weight_BL[0] > 0)
                learnt = tokenizer.decode(batch.label_BL[0][chosen].tolist(), skip_special_tokens=False)
                given = tokenizer.decode(
                    sequences.tokens.tokens(document).tolist(), skip_special_tokens=False
                )
                turns = [part.split("<|im_end|>")[0] for part in given.split("<|im_start|>assistant\n")[1:]]
                assert "".join(f"{turn}<|im_end|>" for turn in turns).startswith(learnt)


def test_a_step_is_its_stretch_of_the_epoch_order_and_padding_has_no_weight(
    sequences: PackedSequences, reference: _Seen
) -> None:
    num_samples = sequences.num_samples
    for epoch in range(2):
        order = EpochOrder(num_samples, SEED, epoch, 8, 3)
        counted: Counter[int] = Counter()
        for step in range(steps_per_epoch(num_samples, GLOBAL_BATCH)):
            expected = sorted(order.slice(step * GLOBAL_BATCH, (step + 1) * GLOBAL_BATCH).tolist())
            counted.update(expected)
            padding = GLOBAL_BATCH - len(expected)
            assert reference.ids[epoch, step] == expected + order.slice(0, padding).tolist()
        assert counted == Counter(range(num_samples))
        # Every learnt token of the split has weight once an epoch, padding samples none.
        own = [weight for at, weight in reference.weights.items() if at[0] == epoch]
        assert sum(own) == sequences.tokens.meta.num_learnt


def test_counts_are_the_weights_of_the_global_batch(reference: _Seen) -> None:
    assert reference.counts == reference.weights


@pytest.mark.parametrize("num_workers", [0, 1, 2])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_ranks_and_workers_change_nothing(
    sequences: PackedSequences, reference: _Seen, world: int, num_workers: int
) -> None:
    assert _see(sequences, world, data=_data(num_workers), microbatch_size=2) == reference


def test_resuming_at_every_step_gives_the_rest_of_the_undisturbed_run(
    sequences: PackedSequences, reference: _Seen
) -> None:
    keys = list(reference.ids)
    for step in range(len(keys) + 1):
        consumed = samples_after(step, sequences.num_samples, GLOBAL_BATCH)
        rest = _see(sequences, (1, 2, 3, 4)[step % 4], samples_consumed=consumed)
        assert rest.rows == {key: reference.rows[key] for key in keys[step:]}
        assert rest.counts == {key: reference.counts[key] for key in keys[step:]}
        assert len(_loader(sequences, 0, 1, samples_consumed=consumed)) == len(keys) - step


def test_ranks_may_change_in_the_middle_of_an_epoch(sequences: PackedSequences, reference: _Seen) -> None:
    seen = _Seen()
    for first, stop, world in ((0, 2, 4), (2, 3, 1), (3, 7, 2), (7, len(reference.ids), 3)):
        consumed = samples_after(first, sequences.num_samples, GLOBAL_BATCH)
        for rank in range(world):
            loader = iter(_loader(sequences, rank, world, samples_consumed=consumed))
            for _ in range(first, stop):
                for batch in next(loader):
                    seen.add(batch)
            loader.close()  # type: ignore[attr-defined]
    assert seen == reference


@pytest.mark.parametrize("world", [1, 2, 4])
def test_evaluation_covers_the_split_once_in_id_order(sequences: PackedSequences, world: int) -> None:
    per_rank = [
        list(build_token_eval_loader(sequences, batch_size=8, rank=rank, world=world, num_workers=rank % 2))
        for rank in range(world)
    ]
    assert len({len(batches) for batches in per_rank}) == 1
    ids: list[int] = []
    total = counted = 0.0
    for batches in zip(*per_rank, strict=True):
        counted += batches[0].counts["nll"]
        for batch in batches:
            ids += batch.sample_id_B.tolist()
            total += float(batch.weight_BL.sum())
    assert ids[: sequences.num_samples] == list(range(sequences.num_samples))
    assert total == counted == sequences.tokens.meta.num_learnt


def test_a_batch_that_does_not_divide_and_a_resume_within_a_step_are_refused(
    sequences: PackedSequences,
) -> None:
    with pytest.raises(ConfigError, match="global_batch_size=24"):
        _loader(sequences, 0, 5)
    with pytest.raises(ConfigError, match="lies within a step"):
        _loader(sequences, 0, 1, samples_consumed=25)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_shard_that_vanishes_ends_with_a_data_error(
    token_folder: Path, tmp_path: Path, num_workers: int
) -> None:
    copy = shutil.copytree(token_folder / "train", tmp_path / "train")
    packed = PackedSequences(TokenSet(copy), LENGTH)
    for path in copy.glob("*.tokens"):
        path.unlink()
    with pytest.raises(DataError, match="cannot be read") as error:
        list(_loader(packed, 0, 1, data=_data(num_workers)))
    assert "Traceback" not in str(error.value)


def test_inputs_are_what_a_decoder_takes_and_a_batch_moves_as_a_whole(sequences: PackedSequences) -> None:
    [batch] = next(iter(_loader(sequences, 0, 1)))
    assert set(batch.inputs()) == {"position_BL", "document_BL", "label_BL", "weight_BL"}
    moved = batch.to("meta", non_blocking=True)
    assert {each.device.type for each in (moved.token_BL, moved.sample_id_B, *moved.inputs().values())} == {
        "meta"
    }
    assert moved.counts == batch.counts and moved.damaged == []
