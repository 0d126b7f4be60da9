"""Metrics against scikit-learn, on random data with and without ties."""

import numpy as np
import pytest
from sklearn.metrics import average_precision_score, roc_auc_score, roc_curve
from sklearn.neighbors import KNeighborsClassifier

from hpctrain.models import metrics


def make_scores(seed: int, decimals: int) -> tuple[np.ndarray, np.ndarray]:
    """Return genuine and impostor scores; few decimals make many ties."""
    rng = np.random.default_rng(seed)
    genuine = rng.normal(0.5, 0.3, rng.integers(50, 400)).round(decimals)
    impostor = rng.normal(0.0, 0.3, rng.integers(1000, 3000)).round(decimals)
    return genuine, impostor


def make_faces(seed: int, num_images: int, num_identities: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    identity = rng.integers(0, num_identities, num_images)
    embedding = rng.normal(size=(num_identities, 16))[identity] + 1.5 * rng.normal(size=(num_images, 16))
    return (embedding / np.linalg.norm(embedding, axis=1, keepdims=True)).astype(np.float32), identity


@pytest.mark.parametrize("decimals", [1, 2, 12])
@pytest.mark.parametrize("seed", range(5))
def test_verification_agrees_with_scikit_learn(seed: int, decimals: int) -> None:
    genuine, impostor = make_scores(seed, decimals)
    label = np.r_[np.ones(len(genuine)), np.zeros(len(impostor))]
    score = np.r_[genuine, impostor]
    fpr, tpr, _ = roc_curve(label, score, drop_intermediate=False)
    for far in metrics.FALSE_ACCEPT_RATES:
        assert metrics.compute_tar_at_far(genuine, impostor, far) == pytest.approx(tpr[fpr <= far].max())
    assert metrics.compute_auc(genuine, impostor) == pytest.approx(roc_auc_score(label, score))


def test_a_false_accept_rate_needs_enough_impostor_pairs() -> None:
    genuine = np.array([0.9, 0.8])
    assert metrics.compute_tar_at_far(genuine, np.linspace(0, 0.5, 999), 1e-3) is None
    assert metrics.compute_tar_at_far(genuine, np.linspace(0, 0.5, 1000), 1e-3) == 1.0
    assert metrics.compute_tar_at_far(np.empty(0), np.linspace(0, 0.5, 1000), 1e-1) is None


def test_pairs_are_all_pairs_whatever_the_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    embedding, identity = make_faces(0, 40, 6)
    pairs = [(i, j) for i in range(40) for j in range(i + 1, 40)]
    expected = {
        same: sorted(
            float(embedding[i] @ embedding[j]) for i, j in pairs if (identity[i] == identity[j]) == same
        )
        for same in (True, False)
    }
    for chunk in (1, 7, 512):
        monkeypatch.setattr(metrics, "_CHUNK", chunk)
        genuine, impostor = metrics.make_pair_scores(embedding, identity)
        # fp32 sums of 16 products in another order
        np.testing.assert_allclose(np.sort(genuine), expected[True], atol=1e-6)
        np.testing.assert_allclose(np.sort(impostor), expected[False], atol=1e-6)


def test_rank1_is_a_nearest_neighbour_classifier_on_the_first_image_of_each_identity() -> None:
    embedding, identity = make_faces(1, 700, 20)
    first = np.array([np.flatnonzero(identity == i)[0] for i in range(20)])
    rest = np.setdiff1d(np.arange(700), first)
    reference = KNeighborsClassifier(1, metric="cosine").fit(embedding[first], identity[first])
    expected = reference.score(embedding[rest], identity[rest])
    assert 0.2 < expected < 0.95
    assert metrics.compute_rank1(embedding, identity) == pytest.approx(expected)


def test_rank1_needs_two_identities_and_a_probe() -> None:
    embedding, _ = make_faces(2, 4, 2)
    assert metrics.compute_rank1(embedding, np.zeros(4, dtype=np.int64)) is None
    assert metrics.compute_rank1(embedding, np.arange(4)) is None


@pytest.mark.parametrize("decimals", [1, 12])
@pytest.mark.parametrize("seed", range(5))
def test_average_precision_agrees_with_scikit_learn(seed: int, decimals: int) -> None:
    rng = np.random.default_rng(seed)
    label = (rng.random(500) < 0.2).astype(np.float32)
    score = (rng.normal(size=500) + label).round(decimals)
    found = metrics.compute_average_precision(score, label)
    assert found == pytest.approx(average_precision_score(label, score))


def test_mean_average_precision_leaves_out_behaviours_that_do_not_occur() -> None:
    rng = np.random.default_rng(9)
    score, label = rng.normal(size=(200, 3)), (rng.random((200, 3)) < 0.3).astype(np.float32)
    label[:, 1] = 0
    expected = np.mean([average_precision_score(label[:, k], score[:, k]) for k in (0, 2)])
    assert metrics.evaluate_behaviours(score, label) == {"behaviour_map": pytest.approx(expected)}
    assert metrics.evaluate_behaviours(score, np.zeros_like(label)) == {}


def test_all_labelled_images_are_taken_where_they_fit() -> None:
    identity = np.array([3, -1, 3, 0, -1, 1])
    assert metrics.select_images(identity, max_images=4).tolist() == [0, 2, 3, 5]


def test_many_identities_are_cut_to_whole_ones_always_the_same() -> None:
    identity = np.random.default_rng(0).permutation(np.repeat(np.arange(5000), 4))
    chosen = metrics.select_images(identity, max_images=1000)
    assert len(chosen) == 1000 and (np.diff(chosen) > 0).all()
    names, counts = np.unique(identity[chosen], return_counts=True)
    assert len(names) == 250 and (counts == 4).all()
    np.testing.assert_array_equal(chosen, metrics.select_images(identity, max_images=1000))


def test_one_large_identity_does_not_crowd_out_the_others() -> None:
    identity = np.concatenate([np.zeros(5000, dtype=np.int64), np.repeat(np.arange(1, 11), 20)])
    chosen = metrics.select_images(identity, max_images=1000)
    names, counts = np.unique(identity[chosen], return_counts=True)
    assert names.tolist() == list(range(11))
    assert counts.tolist() == [1000 // 11] + [20] * 10
