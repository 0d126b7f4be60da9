from __future__ import annotations

import multiprocessing
from pathlib import Path

import numpy as np
import pytest

from hpctrain.data.images import decode
from hpctrain.data.shards import ShardSet
from hpctrain.data.synthetic import make_faces
from hpctrain.errors import ConfigError


@pytest.fixture(scope="module")
def faces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("faces") / "out"
    make_faces(out, num_identities=10, images_per_identity=8, size=(80, 64))
    return out


def test_val_holds_people_whom_train_does_not(faces: Path) -> None:
    train, val = ShardSet(faces / "train"), ShardSet(faces / "val")
    assert train.num_samples + val.num_samples == 80
    assert (train.num_identities, val.num_identities) == (8, 2)
    assert not set(train.meta.identities) & set(val.meta.identities)


def test_some_images_lack_a_label_of_either_kind_and_behaviours_vary(faces: Path) -> None:
    train = ShardSet(faces / "train")
    assert train.behaviours == ["eyes_closed", "glasses", "hand_raised", "smiling"]
    assert 0 < (train.index["identity"] < 0).sum() < 20
    labelled = train.index[train.index["has_behaviour"] == 1]
    assert 40 < len(labelled) < train.num_samples
    share = train.behaviour_matrix(labelled).mean(axis=0)
    assert ((share > 0.1) & (share < 0.6)).all()


def test_pictures_of_a_person_differ(faces: Path) -> None:
    train = ShardSet(faces / "train")
    first, second = train.read(np.flatnonzero(train.index["identity"] == 0)[:2])
    one, other = decode(first), decode(second)
    assert one.shape == (3, 80, 64)
    assert (one.float() - other.float()).abs().mean() > 10  # of 255: other light, pose and background


def test_the_seed_decides_the_faces(tmp_path: Path) -> None:
    small = {"num_identities": 2, "images_per_identity": 2, "size": (80, 64)}
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        make_faces(tmp_path / name, seed=seed, **small)  # type: ignore[arg-type]
    shards = [next((tmp_path / name / "train").glob("*.tar")).read_bytes() for name in "abc"]
    assert shards[0] == shards[1] != shards[2]


def test_what_is_there_is_left_alone(faces: Path) -> None:
    before = (faces / "train" / "meta.json").stat().st_mtime_ns
    make_faces(faces, num_identities=3, images_per_identity=1)
    assert (faces / "train" / "meta.json").stat().st_mtime_ns == before


@pytest.mark.parametrize("drawing", [None, '{"version": 1}'])
def test_faces_of_another_version_are_not_taken_for_these(tmp_path: Path, drawing: str | None) -> None:
    out = tmp_path / "faces"
    make_faces(out, num_identities=2, images_per_identity=2, size=(40, 32))
    if drawing is None:
        (out / "drawing.json").unlink()
    else:
        (out / "drawing.json").write_text(drawing)
    with pytest.raises(ConfigError, match="folder removed"):
        make_faces(out, num_identities=2, images_per_identity=2, size=(40, 32))


def test_two_processes_at_once_leave_one_whole_folder_and_nothing_else(tmp_path: Path) -> None:
    out, context = tmp_path / "faces", multiprocessing.get_context("fork")
    options = {"num_identities": 4, "images_per_identity": 3, "size": (80, 64)}
    drawers = [context.Process(target=make_faces, args=(out,), kwargs=options) for _ in range(2)]
    for drawer in drawers:
        drawer.start()
    for drawer in drawers:
        drawer.join(60)
        assert drawer.exitcode == 0
    assert [path.name for path in tmp_path.iterdir()] == ["faces"]
    assert ShardSet(out / "train").num_samples == 9 and ShardSet(out / "val").num_samples == 3


def test_a_folder_with_something_else_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("")
    with pytest.raises(ConfigError, match=r"data\.root"):
        make_faces(tmp_path, num_identities=2, images_per_identity=1, size=(80, 64))
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
