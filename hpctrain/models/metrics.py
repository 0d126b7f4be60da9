"""How good a model is, in numpy alone: verification, identification, behaviours.

Memory is bounded: faces are judged on at most `MAX_IMAGES` images (8.4 million pairs), always the same ones.
Shapes: N images, D embedding, K behaviours.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

FALSE_ACCEPT_RATES = (1e-1, 1e-2, 1e-3)
MAX_IMAGES = 4096
_CHUNK = 512  # rows of the similarity matrix that are made at once


def select_images(identity_N: Array, max_images: int = MAX_IMAGES) -> Array:
    """Return the indices of at most `max_images` images with an identity, always the same ones, ascending.

    Everything is taken where it fits. Otherwise identities come in a fixed random order, whole, but none
    with more images than its even share (at least 32), until there is no more room: a plain pick of images
    from many identities would leave no two of one person.
    """
    labelled_M = np.flatnonzero(identity_N >= 0)
    if len(labelled_M) <= max_images:
        return labelled_M
    _, group_M, counts_G = np.unique(identity_N[labelled_M], return_inverse=True, return_counts=True)
    by_group_M = np.argsort(group_M, kind="stable")
    starts_G = np.concatenate([[0], np.cumsum(counts_G)[:-1]])
    nth_M = np.empty(len(labelled_M), dtype=np.int64)  # how manieth image of its identity
    nth_M[by_group_M] = np.arange(len(labelled_M)) - np.repeat(starts_G, counts_G)
    turn_G = np.random.default_rng(0).permutation(len(counts_G))
    share = max(32, max_images // len(counts_G))
    allowed_M = np.flatnonzero(nth_M < share)
    order_M = allowed_M[np.lexsort((nth_M[allowed_M], turn_G[group_M[allowed_M]]))]
    return np.sort(labelled_M[order_M[:max_images]])


def make_pair_scores(embedding_ND: Array, identity_N: Array) -> tuple[Array, Array]:
    """Return the cosines of all pairs i < j: those of one identity, and those of two.

    Args:
        embedding_ND: embeddings of length 1.
        identity_N: their identities.
    """
    genuine, impostor = [], []
    for start in range(0, len(identity_N), _CHUNK):
        rows = slice(start, start + _CHUNK)
        cos_RN = embedding_ND[rows] @ embedding_ND.T
        same_RN = identity_N[rows, None] == identity_N[None, :]
        row_R1 = np.arange(start, start + len(cos_RN))[:, None]
        pair_RN = np.arange(len(identity_N))[None, :] > row_R1
        genuine.append(cos_RN[same_RN & pair_RN])
        impostor.append(cos_RN[~same_RN & pair_RN])
    if not genuine:
        return np.empty(0, np.float32), np.empty(0, np.float32)
    return np.concatenate(genuine), np.concatenate(impostor)


def compute_tar_at_far(genuine: Array, impostor: Array, far: float) -> float | None:
    """Return the largest true accept rate at a false accept rate of at most `far`.

    A pair is accepted when its score reaches the threshold; the threshold is any of the scores (the steps
    of the ROC curve, no interpolation). None where fewer than 1/far impostor pairs cannot resolve that rate.
    """
    allowed = int(np.floor(far * len(impostor) + 1e-9))  # 0.001 · 1000 is not quite 1 in floating point
    if allowed < 1 or len(genuine) == 0:
        return None
    if allowed >= len(impostor):
        return 1.0
    # A genuine pair can be accepted exactly if at most `allowed` impostors reach its score.
    first_refused = np.partition(impostor, -allowed - 1)[-allowed - 1]
    return float(np.mean(genuine > first_refused))


def compute_auc(genuine: Array, impostor: Array) -> float | None:
    """Return the area under the ROC curve: P(genuine > impostor) + ½ P(equal) (Hanley & McNeil 1982)."""
    if len(genuine) == 0 or len(impostor) == 0:
        return None
    ordered = np.sort(impostor)
    below = np.searchsorted(ordered, genuine, side="left")
    not_above = np.searchsorted(ordered, genuine, side="right")
    return float((below.mean() + not_above.mean()) / 2 / len(ordered))


def compute_rank1(embedding_ND: Array, identity_N: Array) -> float | None:
    """Return the share of probes whose nearest gallery image is of their own identity.

    Closed-set identification: the gallery holds the first image of every identity, the others are the probes.
    None where no identity has two images, or there is only one identity.
    """
    identities, gallery_G = np.unique(identity_N, return_index=True)
    probe_P = np.setdiff1d(np.arange(len(identity_N)), gallery_G)
    if len(identities) < 2 or len(probe_P) == 0:
        return None
    hits = 0
    for start in range(0, len(probe_P), _CHUNK):
        rows_R = probe_P[start : start + _CHUNK]
        nearest_R = np.argmax(embedding_ND[rows_R] @ embedding_ND[gallery_G].T, axis=1)
        hits += int(np.sum(identities[nearest_R] == identity_N[rows_R]))
    return hits / len(probe_P)


def compute_average_precision(score_N: Array, positive_N: Array) -> float | None:
    """Return Σ (Rₙ - Rₙ₋₁) · Pₙ over the distinct scores, highest first; None without a positive.

    Samples of equal score come in together, as in scikit-learn's `average_precision_score`.
    """
    num_positive = int(np.sum(positive_N > 0.5))
    if num_positive == 0:
        return None
    order_N = np.argsort(-score_N, kind="stable")
    hits_N = np.cumsum(positive_N[order_N] > 0.5)
    last_of_tie = np.flatnonzero(np.append(np.diff(score_N[order_N]) != 0, True))
    hits = hits_N[last_of_tie]
    precision = hits / (last_of_tie + 1)
    return float(np.sum(np.diff(hits, prepend=0) * precision) / num_positive)


def evaluate_faces(embedding_ND: Array, identity_N: Array) -> dict[str, float]:
    """Return `tar_at_far_…`, `verification_auc` and `rank1`, as far as the images allow them."""
    chosen = select_images(identity_N)
    embedding_ND, identity_N = embedding_ND[chosen], identity_N[chosen]
    genuine, impostor = make_pair_scores(embedding_ND, identity_N)
    found = {
        f"tar_at_far_{far:.0e}": compute_tar_at_far(genuine, impostor, far) for far in FALSE_ACCEPT_RATES
    }
    found["verification_auc"] = compute_auc(genuine, impostor)
    found["rank1"] = compute_rank1(embedding_ND, identity_N)
    return {name: value for name, value in found.items() if value is not None}


def evaluate_behaviours(score_NK: Array, label_NK: Array) -> dict[str, float]:
    """Return `behaviour_map`: the mean of the average precisions of the behaviours that occur."""
    found = [compute_average_precision(score_NK[:, k], label_NK[:, k]) for k in range(score_NK.shape[1])]
    occurring = [value for value in found if value is not None]
    return {"behaviour_map": float(np.mean(occurring))} if occurring else {}
