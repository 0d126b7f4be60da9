"""Small packed image folders: real JPEGs of noise, in several shards."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hpctrain.data.prepare import pack_images
from hpctrain.data.shards import ShardSet

NUM_IMAGES = 90


@pytest.fixture(scope="session")
def image_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """90 JPEGs of about 37 kB and `list.csv`; every fifth has no identity, every third no behaviour label."""
    folder = tmp_path_factory.mktemp("images")
    rng = np.random.Generator(np.random.PCG64(0))
    with open(folder / "list.csv", "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["path", "identity", "behaviours"])
        for i in range(NUM_IMAGES):
            pixels = rng.integers(0, 256, (160, 150, 3)).astype(np.uint8)
            Image.fromarray(pixels).save(folder / f"{i}.jpg", quality=90)
            behaviours = ["-", "smile", "smile;run"][i % 3] if i % 3 != 1 or i % 2 else ""
            rows.writerow([f"{i}.jpg", "" if i % 5 == 0 else f"p{i % 7}", behaviours])
    return folder


@pytest.fixture(scope="session")
def packed(image_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The images in one split of several shards; not to be changed."""
    out = tmp_path_factory.mktemp("packed") / "out"
    pack_images(
        image_folder, out, list_file=image_folder / "list.csv", val_fraction=0, shard_mib=1, show=False
    )
    return out / "train"


@pytest.fixture
def own_copy(packed: Path, tmp_path: Path) -> Path:
    """A copy of the packed split that a test may damage."""
    return Path(shutil.copytree(packed, tmp_path / "copy"))


@pytest.fixture(scope="session")
def shards(packed: Path) -> ShardSet:
    return ShardSet(packed)


@pytest.fixture
def people(tmp_path: Path) -> Path:
    """Folders s1 … s12 with four grey PNGs each."""
    rng = np.random.Generator(np.random.PCG64(0))
    for person in range(1, 13):
        folder = tmp_path / "people" / f"s{person}"
        folder.mkdir(parents=True)
        for view in range(4):
            pixels = rng.integers(0, 256, (40, 30)).astype(np.uint8)
            Image.fromarray(pixels).save(folder / f"{view}.png")
    return tmp_path / "people"
