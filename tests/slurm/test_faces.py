"""vision_city on real faces: 30 people to learn from, 10 others to verify, on 2 nodes × 2 ranks.

Baselines and the network's scores are computed here with scikit-learn, from pixels and from exported
embeddings: none of hpctrain's own metrics decides.
"""

from __future__ import annotations

import csv
import random
import statistics
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image
from sklearn.decomposition import PCA
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.metrics import roc_auc_score, roc_curve

from hpctrain.data.prepare import pack_images
from tests.helpers.runs import FACES, Cluster, Run

pytestmark = pytest.mark.slurm
TRAIN = [f"s{n}" for n in range(1, 31)]
VERIFY = [f"s{n}" for n in range(31, 41)]
RECIPE = [
    "cluster.ranks_per_node=2",
    "model.margin_rad=0.5",
    "model.margin_scale=16",
    "model.drop_rate=0.2",
    "data.random_crop_min_scale=0.8",
    "data.color_jitter=0",
    "optim.global_batch_size=60",
    "optim.num_epochs=20",
    "optim.warmup_epochs=2",
    "optim.lr=3e-3",
    "optim.clip_norm=null",
    "log_every_steps=10",
    "checkpoint.every_steps=50",
]


def pixels(people: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """All photos of these people as rows of grey values, and who they are."""
    rows, names = [], []
    for person in people:
        for path in sorted((FACES / person).glob("*.pgm")):
            rows.append(np.asarray(Image.open(path), dtype=np.float64).ravel())
            names.append(person)
    return np.stack(rows), np.array(names)


def verify(features: np.ndarray, names: np.ndarray) -> tuple[float, float]:
    """TAR at FAR 1e-2 and AUC over all pairs, by cosine similarity."""
    unit = features / np.linalg.norm(features, axis=1, keepdims=True)
    first, second = np.triu_indices(len(names), k=1)
    score = (unit @ unit.T)[first, second]
    same = names[first] == names[second]
    far, tar, _ = roc_curve(same, score, drop_intermediate=False)
    return float(tar[far <= 1e-2].max()), float(roc_auc_score(same, score))


def score_of(cluster: Cluster, run: Run) -> tuple[float, float]:
    """The network's scores, from the embeddings that `hpctrain export` writes for the original photos."""
    out = cluster.folder / f"{run.directory.name}.parquet"
    cluster.cli("export", "embeddings", str(run.directory.path), str(FACES), str(out))
    table = pq.read_table(out).to_pydict()
    names = np.array([Path(path).parent.name for path in table["path"]])
    wanted = np.isin(names, VERIFY)
    return verify(np.array(table["embedding"])[wanted], names[wanted])


def baselines() -> dict[str, tuple[float, float]]:
    """What needs no network: TAR at FAR 1e-2 and AUC on the people to verify."""
    known, known_names = pixels(TRAIN)
    unseen, unseen_names = pixels(VERIFY)
    pca = PCA(80, random_state=0).fit(known)
    lda = LinearDiscriminantAnalysis().fit(pca.transform(known), known_names)
    return {
        "raw pixels": verify(unseen - known.mean(axis=0), unseen_names),
        "PCA-80": verify(pca.transform(unseen), unseen_names),
        "LDA": verify(lda.transform(pca.transform(unseen)), unseen_names),
    }


@pytest.mark.long
def test_a_network_trained_on_two_nodes_verifies_people_it_never_saw(cluster: Cluster) -> None:
    run = cluster.submit("faces", "seed=0", *RECIPE)
    assert run.wait_until_over(600) == "COMPLETED", run.story()
    tar, auc = score_of(cluster, run)
    plain = baselines()
    print("TAR@FAR=1e-2, AUC:", {**plain, "network": (tar, auc)})
    assert all(tar > other_tar + 0.1 and auc > other_auc for other_tar, other_auc in plain.values())
    status = run.status()
    assert status["state"] == "COMPLETED" and status["step"] == status["num_steps"] > 0
    assert status["samples_per_s"] > 0
    own = run.metrics("eval")[-1]
    assert abs(own["tar_at_far_1e-02"] - tar) < 0.03, "exported embeddings score otherwise than the run"


@pytest.mark.long
def test_three_seeds_beat_the_baselines_and_shuffled_labels_do_not(cluster: Cluster) -> None:
    runs = [cluster.submit(f"faces-{seed}", f"seed={seed}", *RECIPE) for seed in range(3)]
    shuffled = cluster.submit("faces-shuffled", f"data.root={shuffled_faces(cluster.folder)}", *RECIPE)
    assert {run.wait_until_over(600) for run in (*runs, shuffled)} == {"COMPLETED"}
    scores, control = [score_of(cluster, run) for run in runs], score_of(cluster, shuffled)
    plain = baselines()
    print("TAR@FAR=1e-2, AUC:", {**plain, "network": scores, "shuffled labels": control})
    for tar, auc in plain.values():
        assert tar < 0.60 and auc < 0.96
    assert statistics.median(tar for tar, _ in scores) >= 0.70
    assert statistics.median(auc for _, auc in scores) >= 0.96
    assert control[0] < 0.60


def shuffled_faces(folder: Path) -> Path:
    """The same photos, those of the training people under a random training person's name."""
    photos = [
        (f"{person}/{path.name}", person)
        for person in TRAIN
        for path in sorted((FACES / person).glob("*.pgm"))
    ]
    names = [person for _, person in photos]
    random.Random(0).shuffle(names)
    rows = [(path, name) for (path, _), name in zip(photos, names, strict=True)]
    rows += [
        (f"{person}/{path.name}", person) for person in VERIFY for path in (FACES / person).glob("*.pgm")
    ]
    with (folder / "shuffled.csv").open("w", newline="") as handle:
        csv.writer(handle).writerows([("path", "identity"), *rows])
    out = folder / "shuffled"
    pack_images(FACES, out, list_file=folder / "shuffled.csv", val_identities=VERIFY)
    return out
