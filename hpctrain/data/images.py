"""From JPEG bytes to uint8 pixels: decoding, random crop, resize, flip, brightness and contrast.

Every random choice is a pure function of (seed, epoch, sample id), so a sample has the same pixels on
any rank and in any worker. Pixels stay uint8; the device turns them into floats.

    C channels (RGB)   H, W height and width, pixels
"""

from __future__ import annotations

import io
import math
from dataclasses import dataclass

import numpy as np
import torch
import torchvision.io  # noqa: F401  registers torch.ops.image
from PIL import Image, UnidentifiedImageError
from torchvision.transforms.v2 import functional as F

from hpctrain.data.order import Stream, random_bits

Crop = tuple[int, int, int, int]  #: top, left, height, width, pixels

_MODE_RGB = 3  # torchvision.io.ImageReadMode.RGB
_PILLOW_ERRORS = (OSError, ValueError, SyntaxError, Image.DecompressionBombError)
_CROP_TRIES = 10
_MAX_ASPECT_CHANGE = 4 / 3  # as Inception's crop: Szegedy et al. 2015, §6


class DamagedImageError(Exception):
    """The bytes are no whole image. It stays inside the loader, which replaces the sample."""


@dataclass(frozen=True)
class Augmentation:
    """How training images are changed; the fields are those of ImageDataConfig."""

    min_scale: float  #: smallest area share of the random crop, in (0, 1]; 1 takes the whole image
    flip: bool  #: mirror half of the images
    color_jitter: float  #: brightness and contrast factors come from 1 ± this, in [0, 1]


@dataclass(frozen=True)
class _Choices:
    """What the random bits of one sample decided."""

    crop: Crop
    flip: bool
    brightness: float
    contrast: float


def load_image(
    data: bytes,
    image_size: tuple[int, int],
    augmentation: Augmentation | None,
    key: tuple[int, int, int],
    scaled_decode: bool = False,
) -> torch.Tensor:
    """Decodes an image and brings it to `image_size`; without augmentation the whole image is resized.

    Args:
        image_size: Height and width of the result.
        key: (seed, epoch, sample id): what the random choices are a function of.
        scaled_decode: Let the JPEG decoder leave out detail (by 1/2, 1/4, 1/8, in the DCT domain) where
            the crop is still at least as large as the result. Faster, and the pixels differ a little.

    Returns:
        uint8 tensor of shape [3, height, width].

    Raises:
        DamagedImageError: the bytes cannot be decoded.
    """
    if scaled_decode:
        image = _open(data)
        choices = _choose(augmentation, image.height, image.width, key)
        if _reduction(choices.crop, image_size) >= 2.0:  # below, nothing can be left out
            return _finish(_decode_scaled(image, choices.crop, image_size), choices)
    pixels_CHW = decode(data)
    choices = _choose(augmentation, pixels_CHW.shape[1], pixels_CHW.shape[2], key)
    top, left, height, width = choices.crop
    # Cropping a view first: only pixels that stay are resized.
    cropped_CHW = pixels_CHW[:, top : top + height, left : left + width]
    return _finish(F.resize(cropped_CHW, list(image_size), antialias=True), choices)


def decode(data: bytes) -> torch.Tensor:
    """Decodes a JPEG into a uint8 tensor of shape [3, H, W] (a view of H×W×3 pixels).

    Raises:
        DamagedImageError: the bytes cannot be decoded.
    """
    if not data:
        raise DamagedImageError("no bytes")
    try:
        # The operator itself: its wrapper torchvision.io.decode_jpeg warns of deprecation at each call.
        pixels_CHW: torch.Tensor = torch.ops.image.decode_jpeg(
            torch.frombuffer(bytearray(data), dtype=torch.uint8), _MODE_RGB, False
        )
    except RuntimeError as error:
        # The reason follows the function, file and line of the C++ source.
        raise DamagedImageError(str(error).splitlines()[0].rpartition(", ")[2]) from None
    return pixels_CHW


def random_crop(height: int, width: int, min_scale: float, uniforms: list[float]) -> Crop:
    """Chooses a crop: an area share from [min_scale, 1], an aspect 3/4 … 4/3 times the image's own.

    The aspect is relative to the image because evaluation resizes the whole image: both distort alike.
    A draw that does not fit is repeated; when all tries fail, the whole image is taken.

    Args:
        uniforms: Numbers in [0, 1), two for each try and two for the place.
    """
    limit = math.log(_MAX_ASPECT_CHANGE)
    for attempt in range(_CROP_TRIES if min_scale < 1.0 else 0):
        u_area, u_aspect = uniforms[2 * attempt : 2 * attempt + 2]
        share = min_scale + (1.0 - min_scale) * u_area
        aspect = math.exp(limit * (2.0 * u_aspect - 1.0))
        crop_height = max(1, round(height * math.sqrt(share / aspect)))
        crop_width = max(1, round(width * math.sqrt(share * aspect)))
        if crop_height <= height and crop_width <= width:
            u_top, u_left = uniforms[-2:]
            top = int(u_top * (height - crop_height + 1))
            left = int(u_left * (width - crop_width + 1))
            return top, left, crop_height, crop_width
    return 0, 0, height, width


def _choose(
    augmentation: Augmentation | None, height: int, width: int, key: tuple[int, int, int]
) -> _Choices:
    if augmentation is None:
        return _Choices((0, 0, height, width), False, 1.0, 1.0)
    seed, epoch, sample_id = key
    bits = random_bits(seed, epoch, Stream.augment, sample_id, 2 * _CROP_TRIES + 5)
    uniforms = ((bits >> np.uint64(11)) * 2.0**-53).tolist()
    u_flip, u_brightness, u_contrast, *u_crop = uniforms
    strength = augmentation.color_jitter
    return _Choices(
        random_crop(height, width, augmentation.min_scale, u_crop),
        augmentation.flip and u_flip < 0.5,
        1.0 + strength * (2.0 * u_brightness - 1.0),
        1.0 + strength * (2.0 * u_contrast - 1.0),
    )


def _finish(pixels_CHW: torch.Tensor, choices: _Choices) -> torch.Tensor:
    if choices.flip:
        pixels_CHW = F.horizontal_flip(pixels_CHW)
    if choices.brightness != 1.0 or choices.contrast != 1.0:
        pixels_CHW = _adjust(pixels_CHW, choices.brightness, choices.contrast)
    return pixels_CHW


def _adjust(pixels_CHW: torch.Tensor, brightness: float, contrast: float) -> torch.Tensor:
    """Scales contrast around the image's mean and then brightness, with one rounding at the end."""
    floats_CHW = pixels_CHW.to(torch.float32)
    shift = brightness * (1.0 - contrast) * floats_CHW.mean().item()
    return floats_CHW.mul_(brightness * contrast).add_(shift + 0.5).clamp_(0.0, 255.0).to(torch.uint8)


def _open(data: bytes) -> Image.Image:
    try:
        return Image.open(io.BytesIO(data))
    except UnidentifiedImageError:
        raise DamagedImageError("not an image") from None  # Pillow's text names a buffer's address
    except _PILLOW_ERRORS as error:
        raise DamagedImageError(str(error)) from None


def _reduction(crop: Crop, image_size: tuple[int, int]) -> float:
    """Returns by how much both sides of the crop can shrink without falling below the result's."""
    return min(crop[2] / image_size[0], crop[3] / image_size[1])


def _decode_scaled(image: Image.Image, crop: Crop, image_size: tuple[int, int]) -> torch.Tensor:
    """Decodes at the smallest of the scales 1, 1/2, 1/4, 1/8 that keeps the crop as large as the result."""
    (height, width), (top, left, crop_height, crop_width) = image_size, crop
    full_height, full_width = image.height, image.width
    scale = _reduction(crop, image_size)
    # Pillow takes the largest reduction that leaves both sides at least this large.
    image.draft("RGB", (math.ceil(full_width / scale), math.ceil(full_height / scale)))
    across, down = image.width / full_width, image.height / full_height
    box = (left * across, top * down, (left + crop_width) * across, (top + crop_height) * down)
    try:
        resized = image.convert("RGB").resize((width, height), Image.Resampling.BILINEAR, box)
    except _PILLOW_ERRORS as error:
        raise DamagedImageError(str(error)) from None
    return torch.from_numpy(np.array(resized)).permute(2, 0, 1)
