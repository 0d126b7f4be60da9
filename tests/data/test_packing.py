from __future__ import annotations

import io
import os
import signal
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hpctrain.data import packing
from hpctrain.data.images import decode
from hpctrain.data.packing import ShardJob
from hpctrain.data.shards import ShardSet
from hpctrain.errors import DataError
from tests.data.packed import contents, labels, pack


def test_images_keep_their_pixels_within_jpeg_quality(people: Path, tmp_path: Path) -> None:
    source = tmp_path / "smooth" / "a"
    source.mkdir(parents=True)
    ramp = np.add.outer(np.arange(64), np.arange(48)).astype(np.uint8)
    Image.fromarray(ramp).save(source / "1.pgm")
    pack(source.parent, tmp_path / "out", val_fraction=0, quality=95)
    image = decode(ShardSet(tmp_path / "out" / "train").read([0])[0])
    assert image.shape == (3, 64, 48)
    assert np.abs(image[0].numpy().astype(int) - ramp).max() <= 4  # JPEG at quality 95 on a ramp


def test_sixteen_bit_grey_is_scaled_and_not_clipped(tmp_path: Path) -> None:
    source = tmp_path / "wide" / "a"
    source.mkdir(parents=True)
    Image.fromarray(np.full((16, 16), 32896, dtype=np.uint16)).save(source / "1.png")
    pack(source.parent, tmp_path / "out", val_fraction=0)
    image = decode(ShardSet(tmp_path / "out" / "train").read([0])[0])
    assert abs(int(image[0, 8, 8]) - 128) <= 2  # 32896 / 257


def test_upright_jpegs_are_copied_byte_for_byte(image_folder: Path, packed: Path) -> None:
    split = ShardSet(packed)
    for label, image in zip(labels(packed), split.read(range(split.num_samples)), strict=True):
        assert image == (image_folder / label["source"]).read_bytes()


def test_a_sideways_jpeg_is_turned_upright(tmp_path: Path) -> None:
    source = tmp_path / "turned" / "a"
    source.mkdir(parents=True)
    exif = Image.Exif()
    exif[0x0112] = 6  # EXIF 2.3, Orientation: the viewer has to turn it by 90 degrees
    Image.new("RGB", (40, 20)).save(source / "1.jpg", exif=exif)
    pack(source.parent, tmp_path / "out", val_fraction=0)
    assert decode(ShardSet(tmp_path / "out" / "train").read([0])[0]).shape == (3, 40, 20)


def test_the_longer_side_is_shrunk_and_small_images_are_left(tmp_path: Path) -> None:
    source = tmp_path / "sizes" / "a"
    source.mkdir(parents=True)
    for name, size in (("wide", (400, 200)), ("high", (100, 300)), ("small", (50, 40))):
        Image.new("RGB", size, (90, 60, 30)).save(source / f"{name}.jpg")
    pack(source.parent, tmp_path / "out", val_fraction=0, max_side=150)
    split = ShardSet(tmp_path / "out" / "train")
    shapes = {Path(each["source"]).stem: i for i, each in enumerate(labels(split.folder))}
    images = split.read(range(3))
    assert decode(images[shapes["wide"]]).shape == (3, 75, 150)
    assert decode(images[shapes["high"]]).shape == (3, 150, 50)
    assert images[shapes["small"]] == (source / "small.jpg").read_bytes()


def test_damaged_images_are_counted_listed_and_left_out(people: Path, tmp_path: Path) -> None:
    whole = io.BytesIO()
    Image.new("RGB", (64, 64), (1, 2, 3)).save(whole, "JPEG")
    (people / "s1" / "5.jpg").write_bytes(whole.getvalue()[:400])
    (people / "s2" / "6.jpg").write_bytes(b"no image")
    (people / "s3" / "7.jpg").write_bytes(b"")
    report = pack(people, tmp_path / "out", val_fraction=0)
    assert report.num_images == {"train": 48} and report.num_damaged == 3
    lines = (tmp_path / "out" / "damaged.txt").read_text().splitlines()
    assert sorted(line.split("\t")[0] for line in lines) == ["s1/5.jpg", "s2/6.jpg", "s3/7.jpg"]
    assert all(line.split("\t")[1] and "0x" not in line for line in lines)
    assert ShardSet(tmp_path / "out" / "train").num_samples == 48


def test_several_processes_write_the_same_bytes_as_one(image_folder: Path, tmp_path: Path) -> None:
    options = {"list_file": image_folder / "list.csv", "val_fraction": 0.2, "shard_mib": 1}
    for num_processes in (1, 3):
        pack(image_folder, tmp_path / str(num_processes), num_processes=num_processes, **options)
    assert contents(tmp_path / "1") == contents(tmp_path / "3")


def test_a_killed_packing_process_is_an_error_that_says_how_to_go_on(
    image_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "write_shard", _dies)
    with pytest.raises(DataError, match="was killed"):
        pack(image_folder, tmp_path / "out", list_file=image_folder / "list.csv", num_processes=2)


def _dies(job: ShardJob) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return 0
