from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from hpctrain.data.images import Augmentation, DamagedImageError, decode, load_image, random_crop

PLAIN = Augmentation(min_scale=1.0, flip=False, color_jitter=0.0)


def _jpeg(height: int = 240, width: int = 320, quality: int = 92) -> bytes:
    """A smooth picture, as photographs are."""
    small = np.random.Generator(np.random.PCG64(0)).integers(0, 256, (12, 16, 3)).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC).save(
        buffer, "JPEG", quality=quality
    )
    return buffer.getvalue()


def _pillow(data: bytes) -> torch.Tensor:
    return torch.from_numpy(np.array(Image.open(io.BytesIO(data)).convert("RGB"))).permute(2, 0, 1)


def _largest_difference(first: torch.Tensor, second: torch.Tensor) -> int:
    return int((first.int() - second.int()).abs().max())


def test_pixels_are_those_of_pillow() -> None:
    data = _jpeg()
    # Both decoders are libjpeg-turbo; its versions may round the inverse DCT differently by one or two.
    assert _largest_difference(decode(data), _pillow(data)) <= 2


def test_without_augmentation_the_whole_image_is_resized() -> None:
    data = _jpeg()
    expected = v2.functional.resize(decode(data), [64, 56], antialias=True)
    for augmentation in (None, PLAIN):
        image = load_image(data, (64, 56), augmentation, (0, 0, 0))
        assert image.dtype == torch.uint8 and torch.equal(image, expected)


def test_grey_jpegs_become_rgb() -> None:
    buffer = io.BytesIO()
    Image.fromarray(np.arange(64 * 64, dtype=np.uint16).astype(np.uint8).reshape(64, 64)).save(buffer, "JPEG")
    image = decode(buffer.getvalue())
    assert image.shape == (3, 64, 64) and torch.equal(image[0], image[2])


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("keep", [0, 2, 100, 3000, -2])
def test_a_truncated_jpeg_is_damaged(keep: int, scaled: bool) -> None:
    with pytest.raises(DamagedImageError) as error:
        load_image(_jpeg()[:keep], (64, 56), None, (0, 0, 0), scaled)
    assert str(error.value) and "0x" not in str(error.value)


def test_pixels_are_a_function_of_seed_epoch_and_sample() -> None:
    data, how = _jpeg(), Augmentation(0.3, True, 0.2)
    first = load_image(data, (64, 56), how, (1, 2, 3))
    assert torch.equal(first, load_image(data, (64, 56), how, (1, 2, 3)))
    for key in ((0, 2, 3), (1, 0, 3), (1, 2, 4)):
        assert not torch.equal(first, load_image(data, (64, 56), how, key))


def test_half_of_the_images_are_mirrored() -> None:
    data = _jpeg(64, 56)
    plain = load_image(data, (64, 56), PLAIN, (0, 0, 0))
    how = Augmentation(1.0, True, 0.0)
    images = [load_image(data, (64, 56), how, (0, 0, sample)) for sample in range(400)]
    mirrored = [torch.equal(image, plain.flip(-1)) for image in images]
    assert all(
        torch.equal(image, plain) for image, is_flip in zip(images, mirrored, strict=True) if not is_flip
    )
    assert abs(sum(mirrored) - 200) < 40  # four standard deviations of a fair coin


def test_jitter_changes_brightness_and_contrast_within_their_range() -> None:
    data = _jpeg(64, 56)
    plain = load_image(data, (64, 56), PLAIN, (0, 0, 0)).double()
    how, spread = Augmentation(1.0, False, 0.2), []
    for sample in range(60):
        image = load_image(data, (64, 56), how, (0, 0, sample)).double()
        inside = (image > 0) & (image < 255)
        slope, offset = np.polyfit(plain[inside].numpy(), image[inside].numpy(), 1)
        brightness = (offset + slope * plain.mean().item()) / plain.mean().item()
        spread.append((brightness, slope / brightness))
    # Rounding moves the fitted line by less than 0.01.
    assert all(0.79 < brightness < 1.21 and 0.79 < contrast < 1.21 for brightness, contrast in spread)
    assert min(spread)[0] < 0.9 and max(spread)[0] > 1.1


def test_crops_lie_inside_and_have_the_asked_area_and_aspect() -> None:
    rng = np.random.Generator(np.random.PCG64(0))
    shares = []
    for _ in range(2000):
        top, left, height, width = random_crop(375, 500, 0.08, rng.random(22).tolist())
        assert top >= 0 and left >= 0 and top + height <= 375 and left + width <= 500
        assert 0.74 < (width / 500) / (height / 375) < 1.35
        shares.append(height * width / (375 * 500))
    assert min(shares) > 0.078 and max(shares) <= 1.0
    # torchvision's crop, with its aspects made relative to the image in the same way.
    reference = v2.RandomResizedCrop(224, scale=(0.08, 1.0), ratio=(1.0, 16 / 9))
    torch.manual_seed(0)
    params = [reference.make_params([torch.empty(3, 375, 500)]) for _ in range(2000)]
    expected = np.mean([each["height"] * each["width"] / (375 * 500) for each in params])
    assert abs(np.mean(shares) - expected) < 0.02  # three standard errors of each mean


@pytest.mark.parametrize(("height", "width"), [(1, 1), (1, 500), (500, 1), (3, 2)])
def test_tiny_images_can_be_cropped(height: int, width: int) -> None:
    rng = np.random.Generator(np.random.PCG64(0))
    for _ in range(200):
        top, left, high, wide = random_crop(height, width, 0.5, rng.random(22).tolist())
        assert 1 <= high <= height - top and 1 <= wide <= width - left


@pytest.mark.parametrize("key", [(0, 0, sample) for sample in range(8)])
def test_scaled_decoding_is_close_to_whole_decoding(key: tuple[int, int, int]) -> None:
    data, how = _jpeg(960, 1280), Augmentation(0.25, True, 0.1)
    whole = load_image(data, (96, 112), how, key)
    scaled = load_image(data, (96, 112), how, key, scaled_decode=True)
    # The same picture through another low-pass filter and a crop rounded to whole pixels.
    assert (whole.int() - scaled.int()).abs().float().mean() < 2.0


def test_scaled_decoding_never_enlarges() -> None:
    data = _jpeg(240, 320)
    assert (
        _largest_difference(
            load_image(data, (200, 300), None, (0, 0, 0), scaled_decode=True),
            load_image(data, (200, 300), None, (0, 0, 0)),
        )
        <= 2
    )  # no scale fits, so nothing is left out; decoders as above
