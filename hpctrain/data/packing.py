"""Writing shards: images read, checked, shrunk or re-encoded where needed, and put into a tar.

A shard is a pure function of its job, so any process may write it, and one that is written is not
written again. Beside it a part file keeps its index records and damaged images until the split is done.
"""

from __future__ import annotations

import io
import json
import os
import tarfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps, UnidentifiedImageError

from hpctrain.data.restartable import run_jobs, write_atomically
from hpctrain.data.shards import INDEX_DTYPE

TAR_OVERHEAD_BYTES = 2 * 512 + 512 + 512  #: two headers, the label file, padding: about this a sample

PARTS_NAME = ".parts"
#: What Pillow raises for files that are no whole image.
DAMAGE = (OSError, ValueError, SyntaxError, Image.DecompressionBombError)

_EXIF_ORIENTATION = 0x0112


@dataclass(frozen=True)
class Encoding:
    """How images are stored."""

    max_side: int | None  #: longer side is shrunk to this, pixels; None leaves the size
    quality: int  #: JPEG quality of what is re-encoded


@dataclass(frozen=True)
class Sample:
    """One image to pack."""

    path: str  #: relative to the source
    identity: str | None
    identity_number: int  #: -1 for none
    behaviours: list[str] | None  #: None where nobody labelled them
    behaviour_bits: int


@dataclass(frozen=True)
class ShardJob:
    """What one shard shall hold."""

    source: Path
    folder: Path  #: of the split
    number: int  #: of the shard in the split
    first_key: int
    samples: list[Sample]
    encoding: Encoding

    @property
    def name(self) -> str:
        """Name of the tar file."""
        return shard_name(self.folder, self.number)


@dataclass(frozen=True)
class ShardPart:
    """What a part file says about its shard."""

    index: npt.NDArray[Any]  #: records of INDEX_DTYPE
    damaged: list[tuple[str, str]]  #: path, reason
    size_bytes: int

    @classmethod
    def read(cls, path: Path) -> ShardPart:
        with np.load(path) as part:
            damaged = [(name, reason) for name, reason in json.loads(str(part["damaged"]))]
            return cls(part["index"], damaged, int(part["size_bytes"]))


def shard_name(folder: Path, number: int) -> str:
    """Returns the name of a split's shard."""
    return f"{folder.name}-{number:06d}.tar"


def part_path(folder: Path, number: int) -> Path:
    """Returns the file that says that a split's shard is written."""
    return folder / PARTS_NAME / f"{number:06d}.npz"


def encode(path: Path, encoding: Encoding) -> bytes:
    """Returns the JPEG bytes to store. An upright JPEG that needs no shrinking is kept byte for byte.

    Raises:
        one of DAMAGE: the file cannot be read or is no whole image.
    """
    data = path.read_bytes()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of metadata that Pillow finds odd; pixels are what counts
        image: Image.Image = Image.open(io.BytesIO(data))
        keeps_size = encoding.max_side is None or max(image.size) <= encoding.max_side
        upright = image.getexif().get(_EXIF_ORIENTATION, 1) == 1
        if image.format == "JPEG" and image.mode in ("RGB", "L") and keeps_size and upright:
            image.load()  # finds damage
            return data
        if not keeps_size:
            assert encoding.max_side is not None
            image.thumbnail((encoding.max_side, encoding.max_side), Image.Resampling.LANCZOS, 2.0)
        image = ImageOps.exif_transpose(image)
        image.info.pop("comment", None)  # Pillow would write it; other metadata it leaves out
        buffer = io.BytesIO()
        _as_8_bit(image).save(buffer, "JPEG", quality=encoding.quality)
    return buffer.getvalue()


def write_shard(job: ShardJob) -> int:
    """Writes a shard and then its part file; returns how many samples it dealt with.

    Both appear under their names only when they are whole and on the disk.
    """
    records, damaged = [], []
    partial = job.folder / PARTS_NAME / f"{job.name}.{os.getpid()}"
    with (
        open(partial, "wb") as file,
        tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar,
    ):
        for key, sample in enumerate(job.samples, start=job.first_key):
            try:
                image = encode(job.source / sample.path, job.encoding)
            except DAMAGE as error:
                damaged.append((sample.path, _reason(error)))
                continue
            offset = _add(tar, f"{key:010d}.jpg", image)
            _add(tar, f"{key:010d}.json", _label_file(sample))
            has_behaviour = sample.behaviours is not None
            number, bits = sample.identity_number, sample.behaviour_bits
            records.append((job.number, offset, len(image), number, bits, has_behaviour))
        tar.close()
        _to_disk(file)
        size_bytes = file.tell()
    os.replace(partial, job.folder / job.name)
    _write_part(part_path(job.folder, job.number), np.array(records, dtype=INDEX_DTYPE), damaged, size_bytes)
    return len(job.samples)


def write_shards(jobs: Iterator[ShardJob], num_samples: int, num_processes: int, show: bool) -> None:
    """Writes shards with several processes, one whole shard each, and shows how far they are.

    Raises:
        DataError: a process was killed.
    """
    run_jobs(write_shard, jobs, num_samples, "images", num_processes, show)


def _write_part(path: Path, index: npt.NDArray[Any], damaged: list[tuple[str, str]], size_bytes: int) -> None:
    buffer = io.BytesIO()
    np.savez(buffer, index=index, damaged=json.dumps(damaged), size_bytes=size_bytes)
    write_atomically(path, buffer.getvalue())


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> int:
    """Adds a member and returns the offset of its bytes in the archive."""
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(content), 0o644
    offset = int(tar.offset) + tarfile.BLOCKSIZE  # a short USTAR name has one block of header
    tar.addfile(info, io.BytesIO(content))
    return offset


def _label_file(sample: Sample) -> bytes:
    label = {"identity": sample.identity, "behaviours": sample.behaviours, "source": sample.path}
    return json.dumps(label, ensure_ascii=False).encode()


def _as_8_bit(image: Image.Image) -> Image.Image:
    """Returns an RGB or grey image; 16-bit grey is scaled, because Pillow's conversion would clip it."""
    if image.mode.startswith("I"):
        wide = np.asarray(image, dtype=np.float64)
        return Image.fromarray(np.clip(wide / 257.0, 0, 255).round().astype(np.uint8))
    return image if image.mode in ("RGB", "L") else image.convert("RGB")


def _reason(error: Exception) -> str:
    if isinstance(error, UnidentifiedImageError):
        return "not an image"  # Pillow's text names a buffer's address
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__


def _to_disk(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())
