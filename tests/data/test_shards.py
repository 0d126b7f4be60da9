from __future__ import annotations

import gc
import io
import json
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest

from hpctrain.data.shards import INDEX_DTYPE, ShardSet
from hpctrain.errors import DataError


def _members(folder: Path) -> dict[str, bytes]:
    found = {}
    for path in sorted(folder.glob("*.tar")):
        with tarfile.open(path) as tar:
            for member in tar:
                file = tar.extractfile(member)
                assert file is not None
                found[member.name] = file.read()
    return found


def test_random_access_gives_the_bytes_that_tar_gives(shards: ShardSet) -> None:
    expected = [data for name, data in _members(shards.folder).items() if name.endswith(".jpg")]
    ids = np.random.Generator(np.random.PCG64(0)).permutation(len(expected))
    assert len(expected) == shards.num_samples and len(shards.meta.shards) > 2
    assert shards.read(ids) == [expected[i] for i in ids]
    assert shards.read([3, 3, 1]) == [expected[3], expected[3], expected[1]]
    assert shards.read([]) == []


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # webdataset leaves closing to the collector
def test_webdataset_reads_the_shards(shards: ShardSet) -> None:
    wds = pytest.importorskip("webdataset", reason="webdataset is not installed (extra: bench)")
    urls = [str(shards.folder / shard.name) for shard in shards.meta.shards]
    samples = list(wds.WebDataset(urls, shardshuffle=False))
    gc.collect()
    assert [sample["jpg"] for sample in samples] == shards.read(range(shards.num_samples))
    identities = [json.loads(sample["json"])["identity"] for sample in samples]
    names = [*shards.meta.identities, None]
    assert identities == [names[number] for number in shards.index["identity"].tolist()]


def test_label_matrix_agrees_with_the_label_files(shards: ShardSet) -> None:
    labels = [json.loads(data) for name, data in _members(shards.folder).items() if name.endswith(".json")]
    expected = [[float(name in (each["behaviours"] or [])) for name in shards.behaviours] for each in labels]
    assert shards.behaviours == ["run", "smile"]
    assert shards.behaviour_matrix(shards.index[:]).tolist() == expected
    has_label = [each["behaviours"] is not None for each in labels]
    assert shards.index["has_behaviour"].astype(bool).tolist() == has_label
    assert any(has_label) and not all(has_label)
    assert any(has and not any(row) for has, row in zip(has_label, expected, strict=True))


def _big_split(folder: Path, num_samples: int, image_bytes: int) -> ShardSet:
    """A split of random payloads (nothing decodes them) big enough to see large reads."""
    folder.mkdir()
    payload = np.random.Generator(np.random.PCG64(0)).bytes(num_samples * image_bytes)
    records = []
    with tarfile.open(folder / "big.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
        for i in range(num_samples):
            info = tarfile.TarInfo(f"{i}.jpg")
            info.size = image_bytes
            records.append((0, tar.offset + 512, image_bytes, -1, 0, 0))
            tar.addfile(info, io.BytesIO(payload[i * image_bytes : (i + 1) * image_bytes]))
    np.save(folder / "index.npy", np.array(records, dtype=INDEX_DTYPE))
    size_bytes = (folder / "big.tar").stat().st_size
    shard = {"name": "big.tar", "size_bytes": size_bytes, "num_samples": num_samples}
    meta = {"format": 1, "num_samples": num_samples, "identities": [], "behaviours": [], "shards": [shard]}
    (folder / "meta.json").write_text(json.dumps(meta))
    return ShardSet(folder)


def test_neighbours_are_read_with_one_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    split = _big_split(tmp_path / "big", 256, 20_000)
    sizes: list[int] = []
    pread = os.pread

    def counted(fd: int, size: int, offset: int) -> bytes:
        sizes.append(size)
        return pread(fd, size, offset)

    monkeypatch.setattr(os, "pread", counted)
    images = split.read(range(256))
    assert len(sizes) == 1 and sizes[0] > 4 << 20
    assert len({len(image) for image in images}) == 1
    sizes.clear()
    split.read([0, 200])  # megabytes apart: only what is asked for
    assert sizes == [20_000, 20_000]


def test_prefetch_asks_for_whole_blocks_of_four_megabytes_and_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    split = _big_split(tmp_path / "big", 512, 20_000)
    asked: list[int] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, offset, size, advice: asked.append(size))
    split.prefetch([(256, 512), (0, 256)])
    assert len(asked) == 2 and min(asked) > 4 << 20


def test_a_folder_that_was_not_packed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"meta\.json"):
        ShardSet(tmp_path)


def test_a_missing_shard_is_named_when_the_split_is_opened(own_copy: Path) -> None:
    (own_copy / "train-000001.tar").unlink()
    with pytest.raises(DataError, match=r"train-000001\.tar is missing"):
        ShardSet(own_copy)


def test_a_truncated_shard_is_named_with_both_sizes_when_the_split_is_opened(own_copy: Path) -> None:
    path = own_copy / "train-000001.tar"
    size_bytes = path.stat().st_size
    os.truncate(path, size_bytes - 1000)
    with pytest.raises(DataError) as error:
        ShardSet(own_copy)
    for part in (path.name, str(size_bytes), str(size_bytes - 1000)):
        assert part in str(error.value)


def test_a_shard_truncated_after_opening_is_an_error_and_not_a_damaged_image(own_copy: Path) -> None:
    split = ShardSet(own_copy)
    os.truncate(own_copy / "train-000000.tar", 5000)
    with pytest.raises(DataError, match=r"train-000000\.tar ends early"):
        split.read([0, 1])
    split.close()


def test_a_truncated_or_foreign_index_is_refused(own_copy: Path) -> None:
    path = own_copy / "index.npy"
    whole = np.load(path)
    os.truncate(path, path.stat().st_size - 10)
    with pytest.raises(DataError, match=r"index\.npy"):
        ShardSet(own_copy)
    np.save(path, whole[:-1])
    with pytest.raises(DataError, match="should hold 90 samples"):
        ShardSet(own_copy)


def test_another_format_version_is_refused(own_copy: Path) -> None:
    path = own_copy / "meta.json"
    path.write_text(path.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(DataError, match="format 2"):
        ShardSet(own_copy)
