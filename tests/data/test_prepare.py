from __future__ import annotations

import csv
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from PIL import Image

from hpctrain.data import packing
from hpctrain.data.images import decode
from hpctrain.data.packing import ShardJob, write_shard
from hpctrain.data.prepare import main, pack_images
from hpctrain.data.shards import ShardSet
from hpctrain.errors import ConfigError, DataError
from tests.data.packed import contents, labels, pack

ORL = Path(__file__).parents[3] / "shared" / "data" / "orl_faces"


def test_folders_are_identities_numbered_in_natural_order_within_each_split(
    people: Path, tmp_path: Path
) -> None:
    report = pack(people, tmp_path / "out", val_fraction=0.25)
    train, val = ShardSet(tmp_path / "out" / "train"), ShardSet(tmp_path / "out" / "val")
    assert report.num_images == {"train": 36, "val": 12}
    assert report.num_identities == {"train": 9, "val": 3}
    assert sorted(train.meta.identities + val.meta.identities) == sorted(f"s{i}" for i in range(1, 13))
    assert train.meta.identities == sorted(train.meta.identities, key=lambda name: int(name[1:]))
    for split in (train, val):
        assert sorted(set(split.index["identity"].tolist())) == list(range(split.num_identities))
        numbers = [split.meta.identities.index(each["identity"]) for each in labels(split.folder)]
        assert numbers == split.index["identity"].tolist()


def test_neighbours_in_a_shard_are_of_different_people(people: Path, tmp_path: Path) -> None:
    pack(people, tmp_path / "out", val_fraction=0)
    identities = ShardSet(tmp_path / "out" / "train").index["identity"]
    # By chance 3 of 47 neighbours would agree; in the order of the folders 36 do.
    assert (identities[1:] == identities[:-1]).sum() < 12


@pytest.mark.parametrize("given", [["s9-s12", "s2"], ["s9", "s10", "s11", "s12", "s2"]])
def test_val_identities_are_those_named(people: Path, tmp_path: Path, given: list[str]) -> None:
    pack(people, tmp_path / "out", val_identities=given)
    assert ShardSet(tmp_path / "out" / "val").meta.identities == ["s2", "s9", "s10", "s11", "s12"]


def test_val_identities_can_stand_in_a_file(people: Path, tmp_path: Path) -> None:
    (tmp_path / "val.txt").write_text("s3\ns7\n")
    assert main([str(people), str(tmp_path / "out"), "--val-identities", str(tmp_path / "val.txt")]) == 0
    assert ShardSet(tmp_path / "out" / "val").meta.identities == ["s3", "s7"]


def test_an_unknown_val_identity_is_refused(people: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="s99"):
        pack(people, tmp_path / "out", val_identities=["s1", "s99"])


def test_by_image_a_person_may_be_in_both_splits(people: Path, tmp_path: Path) -> None:
    report = pack(people, tmp_path / "out", val_by="image", val_fraction=0.25)
    assert report.num_images == {"train": 36, "val": 12}
    names = [set(ShardSet(tmp_path / "out" / split).meta.identities) for split in ("train", "val")]
    assert names[0] & names[1]


def test_deeper_folders_are_read_only_when_asked(people: Path, tmp_path: Path) -> None:
    (people / "s1" / "deep").mkdir()
    shutil.copy(people / "s1" / "0.png", people / "s1" / "deep" / "9.png")
    assert pack(people, tmp_path / "flat", val_fraction=0).num_images["train"] == 48
    assert pack(people, tmp_path / "deep", val_fraction=0, walk=True).num_images["train"] == 49


def _write_csv(path: Path, rows: list[list[str]]) -> None:
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(rows)


def test_a_list_tells_no_label_from_labelled_with_none(people: Path, tmp_path: Path) -> None:
    rows = [
        ["path", "identity", "behaviours", "camera"],
        ["s1/0.png", "anna", "smile; chạy", "7"],
        ["s1/1.png", "anna", "-", "7"],
        ["s1/2.png", "", "smile|smile", "7"],
        ["s1/3.png", "007", "", "7"],
    ]
    _write_csv(tmp_path / "list.csv", rows)
    report = pack(people, tmp_path / "out", list_file=tmp_path / "list.csv", val_fraction=0)
    split = ShardSet(tmp_path / "out" / "train")
    assert report.behaviours == ["chạy", "smile"] and split.meta.identities == ["007", "anna"]
    records = {
        each["source"]: (int(row["identity"]), int(row["behaviours"]), int(row["has_behaviour"]))
        for each, row in zip(labels(split.folder), split.index, strict=True)
    }
    assert records == {
        "s1/0.png": (1, 0b11, 1),
        "s1/1.png": (1, 0, 1),
        "s1/2.png": (-1, 0b10, 1),
        "s1/3.png": (0, 0, 0),
    }


def test_parquet_says_the_same_as_csv(people: Path, tmp_path: Path) -> None:
    _write_csv(
        tmp_path / "list.csv",
        [
            ["path", "identity", "behaviours"],
            ["s1/0.png", "1", "a;b"],
            ["s1/1.png", "", "-"],
            ["s1/2.png", "2", ""],
        ],
    )
    behaviours = pa.array([["a", "b"], [], None], pa.list_(pa.string()))
    identities = pa.array([1, None, 2], pa.int64())
    table = pa.table(
        {
            "identity": identities,
            "path": ["s1/0.png", "s1/1.png", "s1/2.png"],
            "behaviours": behaviours,
        }
    )
    pa.parquet.write_table(table, tmp_path / "list.parquet")
    for name in ("csv", "parquet"):
        pack(people, tmp_path / name, list_file=tmp_path / f"list.{name}", val_fraction=0)
    assert contents(tmp_path / "csv") == contents(tmp_path / "parquet")


def test_a_stopped_run_goes_on_where_it_was(
    image_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"list_file": image_folder / "list.csv", "val_fraction": 0.2, "shard_mib": 1}
    undisturbed = pack(image_folder, tmp_path / "whole", **options)
    assert sum(undisturbed.num_shards.values()) > 2
    written: list[Path] = []

    def stops_after_two(job: ShardJob) -> int:
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(job.folder / job.name)
        return write_shard(job)

    monkeypatch.setattr(packing, "write_shard", stops_after_two)
    with pytest.raises(KeyboardInterrupt):
        pack(image_folder, tmp_path / "out", **options)
    with pytest.raises(DataError, match="did not finish"):
        ShardSet(tmp_path / "out" / "train")
    before = [path.stat().st_mtime_ns for path in written]
    monkeypatch.undo()
    report = pack(image_folder, tmp_path / "out", **options)
    assert report.shards_found == 2
    assert [path.stat().st_mtime_ns for path in written] == before
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    again = pack(image_folder, tmp_path / "out", **options)
    assert again.shards_found == sum(again.num_shards.values())
    assert again.num_images == undisturbed.num_images


def test_other_options_or_other_images_are_refused(people: Path, tmp_path: Path) -> None:
    pack(people, tmp_path / "out", quality=90)
    with pytest.raises(ConfigError, match="quality=90") as error:
        pack(people, tmp_path / "out", quality=80)
    assert error.value.exit_code == 2
    shutil.copy(people / "s1" / "0.png", people / "s1" / "new.png")
    with pytest.raises(ConfigError, match="other images"):
        pack(people, tmp_path / "out", quality=90)


def test_a_folder_with_something_else_is_not_packed_into(people: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("")
    with pytest.raises(ConfigError, match="something else"):
        pack(people, tmp_path / "out")


def test_wrong_sources_are_refused_with_what_to_change(people: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    _write_csv(tmp_path / "names.csv", [["file", "who"], ["s1/0.png", "s1"]])
    _write_csv(tmp_path / "none.csv", [["path", "identity"]])
    cases: list[tuple[Path, dict[str, Any], str]] = [
        (tmp_path / "nowhere", {}, "there is no folder"),
        (people / "s1" / "0.png", {}, "it is a file"),
        (tmp_path / "empty", {}, "found no images"),
        (people / "s1", {}, "found no images"),
        (people, {"list_file": tmp_path / "missing.csv"}, "no list file"),
        (people, {"list_file": tmp_path / "names.csv"}, "its columns are file, who"),
        (people, {"list_file": tmp_path / "none.csv"}, "lists no images"),
        (people, {"val_fraction": 1.0}, "out of range"),
        (people, {"max_side": 1}, "out of range"),
    ]
    for source, options, said in cases:
        with pytest.raises(ConfigError, match=said) as error:
            pack(source, tmp_path / "out", **options)
        assert error.value.change and error.value.exit_code == 2
    assert not (tmp_path / "out").exists()


def test_a_list_whose_paths_lead_nowhere_is_an_error_and_no_empty_split(people: Path, tmp_path: Path) -> None:
    _write_csv(tmp_path / "list.csv", [["path", "identity"], ["s77/0.png", "s77"]])
    with pytest.raises(DataError, match="No such file"):
        pack(people, tmp_path / "out", list_file=tmp_path / "list.csv", val_fraction=0)


def test_the_verb_reports_in_json_and_in_words(
    people: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(people), str(tmp_path / "out"), "--processes", "2"]
    assert main([*arguments, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["num_images"]["train"] + report["num_images"]["val"] == 48
    assert main(arguments) == 0
    captured = capsys.readouterr()
    assert "identities" in captured.out and "damaged: 0" in captured.out


def test_progress_is_plain_lines_without_a_terminal(
    people: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pack_images(people, tmp_path / "out")
    assert capsys.readouterr().err.splitlines()[-1].startswith("packing: 48 of 48 images")


@pytest.mark.skipif(not ORL.is_dir(), reason=f"the ORL faces are not at {ORL}")
def test_the_real_orl_faces_are_packed(tmp_path: Path) -> None:
    report = pack(ORL, tmp_path / "out", val_identities=["s31-s40"], num_processes=2)
    assert report.num_images == {"train": 300, "val": 100} and report.num_damaged == 0
    val = ShardSet(tmp_path / "out" / "val")
    assert val.meta.identities == [f"s{i}" for i in range(31, 41)]
    for label, image in zip(labels(val.folder), val.read(range(100)), strict=True):
        expected = np.asarray(Image.open(ORL / label["source"])).astype(int)
        assert np.abs(decode(image)[0].numpy() - expected).mean() < 4  # JPEG at quality 90


def test_packing_needs_no_torch() -> None:
    import subprocess

    code = "import sys, hpctrain.data.prepare, hpctrain.data.synthetic; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
