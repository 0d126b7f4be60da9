"""Embeddings of many images, as Parquet. Threads decode the next batch while the model embeds this one.

Shapes: B images, C channels, H height, W width, D embedding.
"""

from __future__ import annotations

import json
import os
import tarfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Self

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from hpctrain.data.images import DamagedImageError, load_image
from hpctrain.data.listing import IMAGE_SUFFIXES
from hpctrain.data.packing import Encoding, encode
from hpctrain.data.shards import META_NAME, ShardSet
from hpctrain.errors import DataError
from hpctrain.export.trained import load_trained, refuse_existing
from hpctrain.models.vision import VisionModel

_BATCH_SIZE = 256
_ROW_GROUP_BATCHES = 16  # 4096 rows: a few MB, which Parquet readers like
_ENCODING = Encoding(max_side=None, quality=90)  # as `hpctrain data images` stores what is no JPEG

Source = tuple[str, bytes | Path]  #: path to report, and the image or where it is


@dataclass(frozen=True)
class EmbeddingsReport:
    """What `export_embeddings` wrote."""

    out: str
    step: int
    uses_ema: bool
    num_images: int
    damaged: list[tuple[str, str]]  #: images that were left out: path, reason


@dataclass(frozen=True)
class _Decoded:
    """A batch that is ready for the model."""

    paths: list[str]
    image_BCHW: Tensor  #: uint8
    damaged: list[tuple[str, str]]  #: path, reason


def export_embeddings(run_dir: Path, images: Path, out: Path, ema: bool | None = None) -> EmbeddingsReport:
    """Write a Parquet file with `path` and `embedding`, list<float32> of length 1, one row per image.

    Args:
        run_dir: Folder of the run.
        images: Folder of images, of any depth, or a packed split; `path` is relative to the folder, or to
            what the split was packed from. What is no upright JPEG is re-encoded as packing does it, so both
            give the same embeddings.
        out: The file to write.
        ema: As for `load_trained`.

    Raises:
        ConfigError: as `load_trained`, or `out` exists.
        DataError: there are no images, or a shard is missing or damaged. Single damaged images are reported.
    """
    refuse_existing(out)
    sources = _read_packed(images) if (images / META_NAME).is_file() else _read_folder(images)
    trained = load_trained(run_dir, ema)
    model = trained.model.to("cuda" if torch.cuda.is_available() else "cpu")
    height, width = trained.config.image_size
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.name}.{os.getpid()}")
    num_images, damaged = 0, []
    try:
        with _RowGroups(partial, trained.step) as rows:
            for batch in _decode(sources, (height, width)):
                rows.add(batch.paths, _embed(model, batch.image_BCHW))
                num_images += len(batch.paths)
                damaged += batch.damaged
        if num_images == 0:
            raise DataError(
                f"no image to embed in {images}",
                f"{len(damaged)} damaged images; files looked for: {', '.join(IMAGE_SUFFIXES)}",
                "name a folder of images, or a packed split such as DATA/val",
            )
        partial.rename(out)
    finally:
        partial.unlink(missing_ok=True)
    return EmbeddingsReport(str(out), trained.step, trained.uses_ema, num_images, damaged)


class _RowGroups:
    """A Parquet file that is written in row groups of a few thousand rows."""

    def __init__(self, path: Path, step: int) -> None:
        self._schema = pa.schema(
            [("path", pa.string()), ("embedding", pa.list_(pa.float32()))], {"hpctrain.step": str(step)}
        )
        self._writer = pq.ParquetWriter(path, self._schema)
        self._waiting: list[pa.RecordBatch] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._flush()
        self._writer.close()

    def add(self, paths: list[str], embedding_BD: Tensor) -> None:
        self._waiting.append(pa.record_batch([paths, list(embedding_BD.numpy())], self._schema))
        if len(self._waiting) == _ROW_GROUP_BATCHES:
            self._flush()

    def _flush(self) -> None:
        if self._waiting:
            self._writer.write_table(pa.Table.from_batches(self._waiting))
            self._waiting = []


def _read_folder(root: Path) -> Iterator[Source]:
    """Yield the images below a folder, in the order of their paths: relative path, absolute path."""
    if not root.is_dir():
        raise DataError(f"no folder {root}", change="name a folder of images, or a packed split")
    for folder, subfolders, files in os.walk(root):
        subfolders.sort()
        for name in sorted(files):
            if name.lower().endswith(IMAGE_SUFFIXES):
                path = Path(folder, name)
                yield path.relative_to(root).as_posix(), path


def _read_packed(root: Path) -> Iterator[Source]:
    """Yield the images of a packed split in packing order: path in the source, bytes."""
    for shard in ShardSet(root).meta.shards:  # opening it has found missing and shortened shards
        image = b""
        with tarfile.open(root / shard.name) as tar:
            for member in tar:
                file = tar.extractfile(member)
                content = file.read() if file is not None else b""
                if member.name.endswith(".json"):  # follows its image
                    yield json.loads(content)["source"], image
                image = content


def _decode(sources: Iterator[Source], image_size: tuple[int, int]) -> Iterator[_Decoded]:
    """Yield the images in order, decoded, resized and stacked."""

    def decode(path: str, source: bytes | Path) -> tuple[str, Tensor | str]:
        try:
            data = encode(source, _ENCODING) if isinstance(source, Path) else source
            return path, load_image(data, image_size, None, (0, 0, 0))
        except (DamagedImageError, OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            return path, str(error) or type(error).__name__

    def submit() -> list[Future[tuple[str, Tensor | str]]]:
        return [pool.submit(decode, *source) for source in islice(sources, _BATCH_SIZE)]

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        batch = submit()
        while batch:
            coming = submit()
            results = [future.result() for future in batch]
            images = [(path, value) for path, value in results if isinstance(value, Tensor)]
            damaged = [(path, value) for path, value in results if isinstance(value, str)]
            empty_BCHW = torch.empty((0, 3, *image_size), dtype=torch.uint8)
            image_BCHW = torch.stack([value for _, value in images]) if images else empty_BCHW
            yield _Decoded([path for path, _ in images], image_BCHW, damaged)
            batch = coming


@torch.inference_mode()
def _embed(model: VisionModel, image_BCHW: Tensor) -> Tensor:
    """Return embeddings of length 1, shape (B, D), fp32, on the CPU."""
    if len(image_BCHW) == 0:
        return torch.empty(0, model.embedding.norm.num_features)
    image_BCHW = image_BCHW.to(model.mean_C11.device)
    return F.normalize(model.embed(image_BCHW).float()).cpu()
