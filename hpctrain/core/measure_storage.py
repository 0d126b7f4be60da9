"""Disk and decoding: reads from the data's folder, writes to the run's, and JPEG into pixels."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
from PIL import Image

from hpctrain.core.measure import Bench
from hpctrain.data.images import Augmentation, load_image

MIB = 1024**2
READ_MIB, WRITE_MIB = 128, 32  # of a node, of a rank
CHUNK = 4 * MIB  # what storage sees of a run that shuffles blocks
IMAGES = ((240, 320), (720, 960), (1080, 1440))  # heights and widths, pixels
OUT = (224, 224)
AS_TRAINED = Augmentation(min_scale=0.8, flip=True, color_jitter=0.1)

Chunk = tuple[Path, int]  # a file and an offset in it


def measure_storage(bench: Bench, run_folder: Path, data_root: Path) -> None:
    """Writes of all ranks to the run directory; reads from the data, of one node and of all.

    Where the data are not there or smaller than what a node reads, that is what the next node has just
    written. This host's page cache is emptied of what is read; a file server's own cache cannot be.
    """
    mesh, per_node, nodes = bench.mesh, bench.config.cluster.ranks_per_node, bench.config.cluster.num_nodes
    folder, node = run_folder / "calibration", mesh.rank // per_node
    folder.mkdir(exist_ok=True)
    payload = os.urandom(WRITE_MIB * MIB)
    total = len(payload) * mesh.world_size
    write = _writer(folder / str(mesh.rank), payload)
    bench.add("write", total, write, ranks=mesh.world_size, repeats=3)
    chunks = _chunks(sorted((data_root / "train").glob("*")), nodes)
    where = "data.root"
    if len(chunks) * CHUNK < READ_MIB * MIB:
        writers = [(rank + per_node) % mesh.world_size for rank in range(mesh.world_size)]
        chunks, where = _chunks([folder / str(rank) for rank in writers], nodes), "run"
    each = len(chunks) // nodes
    own = chunks[node * each : (node + 1) * each][mesh.rank % per_node :: per_node]
    read = _reader(own)
    bench.add("read", each * CHUNK, None if node else read, group=where, ranks=per_node, repeats=3)
    if nodes > 1:
        bench.add("read_by_all", nodes * each * CHUNK, read, group=where, ranks=mesh.world_size, repeats=3)
    (folder / str(mesh.rank)).unlink()
    with suppress(OSError):  # the last rank finds it empty
        folder.rmdir()


def _writer(path: Path, payload: bytes) -> Callable[[], None]:
    def write() -> None:
        with path.open("wb", buffering=0) as handle:
            handle.write(payload)
            os.fsync(handle.fileno())

    return write


def _chunks(files: list[Path], nodes: int) -> list[Chunk]:
    """Whole chunks of these files, as many as the nodes read."""
    most, found = nodes * READ_MIB * MIB // CHUNK, list[Chunk]()
    for path in files:
        if len(found) >= most:
            break
        found += [(path, number * CHUNK) for number in range(path.stat().st_size // CHUNK)]
    return found[:most]


def _reader(chunks: list[Chunk]) -> Callable[[], None]:
    def read() -> None:
        for path, offset in chunks:
            handle = os.open(path, os.O_RDONLY)
            os.posix_fadvise(handle, offset, CHUNK, os.POSIX_FADV_DONTNEED)
            os.pread(handle, CHUNK, offset)
            os.close(handle)

    return read


def measure_decoding(bench: Bench) -> None:
    """Decoding and augmentation of images of several sizes, on one core of each rank."""
    for height, width in IMAGES:
        data = make_jpeg(height, width)
        megapixels = height * width / 1e6
        bench.add("decode", megapixels, lambda data=data: load_image(data, OUT, AS_TRAINED, (0, 0, 0)))  # type: ignore[misc]


def make_jpeg(height: int, width: int) -> bytes:
    """A smooth picture with some grain: about 0.15 bytes a pixel, as cameras write."""
    random = np.random.default_rng(0)
    coarse = random.integers(0, 255, (height // 40, width // 40, 3), dtype=np.uint8)
    smooth = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC), np.float32)
    grain = random.normal(0.0, 3.0, (height, width, 1)).astype(np.float32)
    out = io.BytesIO()
    Image.fromarray((smooth + grain).clip(0, 255).astype(np.uint8)).save(out, "JPEG", quality=85)
    return out.getvalue()
