"""Small packed image folders: real JPEGs of noise, in several shards."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hpctrain.data.prepare import pack_images
from hpctrain.data.prepare_tokens import pack_tokens
from hpctrain.data.shards import ShardSet
from tests.data.tokenized import SENTENCES, call, make_tokenizer, write_lines

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


@pytest.fixture(scope="session")
def token_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """120 calls and texts, some longer than 64 tokens, in several shards of train; not to be changed."""
    folder = tmp_path_factory.mktemp("tokens")
    rng = np.random.Generator(np.random.PCG64(0))
    records: list[dict[str, object]] = []
    for i in range(120):
        words = [SENTENCES[int(n)] for n in rng.integers(0, len(SENTENCES), rng.integers(1, 7))]
        records.append({"text": " ".join(words)} if i % 4 == 0 else call(f"cuộc gọi {i}", *words))
    write_lines(folder / "calls.jsonl", records)
    pack_tokens(
        folder / "calls.jsonl",
        folder / "out",
        tokenizer=make_tokenizer(folder / "tokenizer", vocab_size=400),
        val_fraction=0,
        piece_bytes=8000,
        show=False,
    )
    return folder / "out"
