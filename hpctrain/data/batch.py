"""A batch, and how it is made of sample ids: reading, decoding, replacing damaged images, labels.

B samples   C H W channels, height, width   K behaviours
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from hpctrain.data.images import Augmentation, DamagedImageError, load_image
from hpctrain.data.order import Int64Array
from hpctrain.data.shards import ShardSet
from hpctrain.errors import DataError

_MAX_DAMAGED_IN_A_ROW = 100


class TensorFields:
    """What a dataclass of tensors can do with all of them at once; its other fields stay."""

    def pin_memory(self) -> Self:
        """Returns the batch in page-locked memory, from which copies to the device are asynchronous."""
        return self._map(torch.Tensor.pin_memory)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        """Returns the batch on a device."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def _map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        values: dict[str, Any] = {each.name: getattr(self, each.name) for each in fields(self)}  # type: ignore[arg-type]
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                values[name] = function(value)
        return type(self)(**values)


@dataclass
class Batch(TensorFields):
    """One microbatch of one rank."""

    image_BCHW: torch.Tensor  #: uint8
    identity_B: torch.Tensor  #: int64; -1 for none
    behaviour_BK: torch.Tensor  #: float32, 0 or 1
    has_behaviour_B: torch.Tensor  #: float32; 0 where nobody labelled the behaviour
    weight_B: torch.Tensor  #: float32; 0 for padding and for damaged images
    sample_id_B: torch.Tensor  #: int64
    epoch: int
    step: int  #: step in the epoch, from 0
    #: Samples of the whole global batch (all ranks, all microbatches; without padding) that carry each
    #: kind of label: "identity", "behaviour". From the index alone, so a damaged image still counts.
    counts: dict[str, float]
    #: Samples whose image could not be decoded, with the reason. The pixels of the next readable sample
    #: in id order stand in for them, with weight 0.
    damaged: list[tuple[int, str]] = field(default_factory=list)


class ImageReader:
    """Reads and decodes samples, and replaces damaged ones."""

    def __init__(
        self,
        shards: ShardSet,
        image_size: tuple[int, int],
        augmentation: Augmentation | None,
        seed: int,
        epoch: int,
        scaled_decode: bool,
    ) -> None:
        self._shards, self._image_size, self._augmentation = shards, image_size, augmentation
        self._seed, self.epoch, self._scaled_decode = seed, epoch, scaled_decode

    def images(self, sample_ids: Int64Array) -> tuple[torch.Tensor, list[tuple[int, str]]]:
        """Returns the pixels, uint8 [B, 3, H, W], and the samples that were damaged, with the reason."""
        image_BCHW = torch.empty((len(sample_ids), 3, *self._image_size), dtype=torch.uint8)
        damaged = []
        for i, (sample_id, data) in enumerate(
            zip(sample_ids.tolist(), self._shards.read(sample_ids), strict=True)
        ):
            try:
                image_BCHW[i] = self._load(data, sample_id)
            except DamagedImageError as error:
                image_BCHW[i] = self._replacement(sample_id, str(error))
                damaged.append((sample_id, str(error)))
        return image_BCHW, damaged

    def _load(self, data: bytes, sample_id: int) -> torch.Tensor:
        key = (self._seed, self.epoch, sample_id)
        return load_image(data, self._image_size, self._augmentation, key, self._scaled_decode)

    def _replacement(self, sample_id: int, reason: str) -> torch.Tensor:
        """Returns the pixels of the next readable sample in id order."""
        for further in range(1, _MAX_DAMAGED_IN_A_ROW):
            next_id = (sample_id + further) % self._shards.num_samples
            try:
                return self._load(self._shards.read([next_id])[0], next_id)
            except DamagedImageError:
                continue
        raise DataError(
            f"{_MAX_DAMAGED_IN_A_ROW} samples in a row from {sample_id} on cannot be decoded",
            f"{self._shards.folder}: {reason}",
            "check the storage, copy the folder again, or pack the images again",
        )


def make_batch(
    shards: ShardSet,
    sample_ids: Int64Array,
    is_real: npt.NDArray[np.bool_],
    reader: ImageReader,
    step: int,
    counts: dict[str, float],
) -> Batch | DataError:
    """Makes a batch, or returns the error: raised in a worker, it would come out as a traceback."""
    try:
        image_BCHW, damaged = reader.images(sample_ids)
    except DataError as error:
        return error
    is_damaged = np.isin(sample_ids, [sample_id for sample_id, _ in damaged])
    records = shards.index[sample_ids]
    return Batch(
        image_BCHW=image_BCHW,
        identity_B=torch.from_numpy(records["identity"].astype(np.int64)),
        behaviour_BK=torch.from_numpy(shards.behaviour_matrix(records)),
        has_behaviour_B=torch.from_numpy(records["has_behaviour"].astype(np.float32)),
        weight_B=torch.from_numpy((is_real & ~is_damaged).astype(np.float32)),
        sample_id_B=torch.from_numpy(sample_ids),
        epoch=reader.epoch,
        step=step,
        counts=counts,
        damaged=damaged,
    )


def label_counts(shards: ShardSet, sample_ids: Int64Array) -> dict[str, float]:
    records = shards.index[sample_ids]
    return {
        "identity": float((records["identity"] >= 0).sum()),
        "behaviour": float((records["has_behaviour"] > 0).sum()),
    }
