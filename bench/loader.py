"""How many images a second: our loader against torchvision's ImageFolder + DataLoader and WebDataset.

All read the same JPEG photographs of about 500×375 with the same workers, and give normalised float
batches of random resized crops of 224×224, half of them mirrored. Repetitions are interleaved.

    python bench/loader.py [--images 1000] [--workers 2] [--repetitions 7]
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import skimage.data
import torch
import torchvision
import webdataset as wds
from PIL import Image
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from hpctrain.config.schema import ImageDataConfig
from hpctrain.data.images import Augmentation, load_image
from hpctrain.data.loader import build_train_loader
from hpctrain.data.prepare import pack_images
from hpctrain.data.shards import ShardSet

SIZE = 224
BATCH = 50
MIN_SCALE = 0.08
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# All photographs are 4:3, so this is 3/4 … 4/3 times the image's own aspect, as our crop has it.
RATIO = (1.0, 16 / 9)
FAMILIES = 20  # folders of the image tree

SMALL = ("astronaut", "chelsea", "coffee", "rocket", "cat")  # cut to about 500×375
LARGE_MIN_SCALE = 0.8  # what the config crops by default
LARGE = ("retina",)  # cut to about 1920×1440, where scaled decoding has something to leave out

Run = Callable[[], int]


def make_photos(folder: Path, count: int, names: Sequence[str], widths: tuple[int, int]) -> None:
    """Cuts 4:3 photographs out of scikit-image's real ones, at random places and widths."""
    sources = [Image.fromarray(getattr(skimage.data, name)()) for name in names]
    rng = np.random.Generator(np.random.PCG64(0))
    for i in range(count):
        source = sources[i % len(sources)]
        high = rng.uniform(0.6, 1.0) * min(source.height, source.width * 3 / 4)
        left, top = rng.uniform(0, source.width - high * 4 / 3), rng.uniform(0, source.height - high)
        width = 4 * int(rng.integers(widths[0] // 4, widths[1] // 4 + 1))
        box = (left, top, left + high * 4 / 3, top + high)
        photo = source.resize((width, width * 3 // 4), Image.Resampling.LANCZOS, box)
        place = folder / f"{i % FAMILIES:03d}"
        place.mkdir(parents=True, exist_ok=True)
        photo.convert("RGB").save(place / f"{i:05d}.jpg", quality=90)


def pack(photos: Path, out: Path) -> ShardSet:
    """Packs photographs into shards of 8 MiB, all in one split."""
    pack_images(photos, out, val_fraction=0, shard_mib=8, show=False)
    return ShardSet(out / "train")


def theirs() -> v2.Compose:
    """torchvision's own recipe for Pillow images."""
    return v2.Compose(
        [
            v2.RandomResizedCrop(SIZE, scale=(MIN_SCALE, 1.0), ratio=RATIO, antialias=True),
            v2.RandomHorizontalFlip(),
            v2.PILToTensor(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(MEAN, STD),
        ]
    )


def count_images(batches: Iterator[torch.Tensor]) -> int:
    """Takes every batch and looks at it, as a trainer would."""
    total = 0
    for image_BCHW in batches:
        assert image_BCHW.dtype == torch.float32 and image_BCHW.shape[1:] == (3, SIZE, SIZE)
        total += len(image_BCHW)
    return total


def run_ours(split: ShardSet, workers: int, min_scale: float, scaled: bool) -> Run:
    mean = 255 * torch.tensor(MEAN).view(1, 3, 1, 1)
    inverse_std = 1 / (255 * torch.tensor(STD).view(1, 3, 1, 1))
    data = ImageDataConfig(
        num_workers=workers,
        random_crop_min_scale=min_scale,
        flip=True,
        color_jitter=0.0,
        scaled_decode=scaled,
    )

    def batches() -> Iterator[torch.Tensor]:
        loader = build_train_loader(
            split,
            image_size=[SIZE, SIZE],
            data=data,
            seed=0,
            global_batch_size=BATCH,
            rank=0,
            world=1,
            samples_consumed=0,
            num_epochs=1,
        )
        for [batch] in loader:
            yield batch.image_BCHW.float().sub_(mean).mul_(inverse_std)

    return lambda: count_images(batches())


def run_image_folder(folder: Path, workers: int) -> Run:
    loader = DataLoader(ImageFolder(folder, theirs()), batch_size=BATCH, shuffle=True, num_workers=workers)
    return lambda: count_images(images for images, _ in loader)


def run_webdataset(split: ShardSet, workers: int) -> Run:
    urls = [str(split.folder / shard.name) for shard in split.meta.shards]
    dataset = (
        wds.WebDataset(urls, shardshuffle=len(urls))
        .shuffle(500)
        .decode("pil")
        .to_tuple("jpg", "json")
        .map_tuple(theirs(), lambda label: label["identity"])
        .batched(BATCH)
    )
    loader = wds.WebLoader(dataset, batch_size=None, num_workers=workers)
    return lambda: count_images(images for images, _ in loader)


def run_decode_only(split: ShardSet) -> Run:
    """The ceiling of one core: decoding and nothing else."""
    from hpctrain.data.images import decode

    images = split.read(range(min(split.num_samples, 200)))

    def run() -> int:
        for image in images:
            decode(image)
        return len(images)

    return run


def pixel_error(split: ShardSet) -> float:
    """Mean absolute difference between scaled and whole decoding, of 255."""
    how = Augmentation(LARGE_MIN_SCALE, True, 0.0)
    errors = []
    for i, data in enumerate(split.read(range(min(split.num_samples, 100)))):
        whole, scaled = (
            load_image(data, (SIZE, SIZE), how, (0, 0, i), flag).float() for flag in (False, True)
        )
        errors.append((whole - scaled).abs().mean().item())
    return statistics.mean(errors)


def machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "?")
    versions = (
        f"torch {torch.__version__}, torchvision {torchvision.__version__}, webdataset {wds.__version__}"
    )
    return f"{model}, {len(os.sched_getaffinity(0))} cores, Python {platform.python_version()}, {versions}"


def measure(runs: dict[str, Run], repetitions: int) -> dict[str, list[float]]:
    """Returns images/s of every repetition; each round runs all, in turn, after one to warm up."""
    rates: dict[str, list[float]] = {name: [] for name in runs}
    for repetition in range(repetitions + 1):
        for name, run in runs.items():
            started_s = time.perf_counter()
            count = run()
            if repetition:
                rates[name].append(count / (time.perf_counter() - started_s))
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=7)
    options = parser.parse_args()
    warnings.filterwarnings("ignore", category=ResourceWarning)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder, workers = Path(name), options.workers
        make_photos(folder / "photos", options.images, SMALL, (460, 540))
        make_photos(folder / "large", options.images // 10, LARGE, (1900, 1940))
        split, large = (
            pack(folder / "photos", folder / "packed"),
            pack(folder / "large", folder / "packed_large"),
        )
        runs = {
            "hpctrain": run_ours(split, workers, MIN_SCALE, scaled=False),
            "ImageFolder + DataLoader": run_image_folder(folder / "photos", workers),
            "WebDataset": run_webdataset(split, workers),
            "decoding alone, one core": run_decode_only(split),
            "hpctrain, 1920×1440": run_ours(large, workers, LARGE_MIN_SCALE, scaled=False),
            "hpctrain, 1920×1440, scaled decode": run_ours(large, workers, LARGE_MIN_SCALE, scaled=True),
        }
        rates = measure(runs, options.repetitions)
        error = pixel_error(large)
        mean_kib = sum(len(data) for data in split.read(range(split.num_samples))) / split.num_samples / 1024
    print(machine())
    print(
        f"{options.images} photographs of about 500×375 ({mean_kib:.0f} KiB), {options.workers} workers, "
        f"crop to {SIZE}, medians of {options.repetitions} interleaved repetitions\n"
    )
    print("| loader | images/s | lowest … highest |\n|---|---|---|")
    medians = {name: statistics.median(values) for name, values in rates.items()}
    for name, values in rates.items():
        print(f"| {name} | {medians[name]:.0f} | {min(values):.0f} … {max(values):.0f} |")
    print(f"\nscaled decode of 1920×1440: mean pixel error {error:.2f} of 255")
    for name, other in (
        ("hpctrain, 1920×1440, scaled decode", "hpctrain, 1920×1440"),
        ("hpctrain", "ImageFolder + DataLoader"),
        ("hpctrain", "WebDataset"),
    ):
        ratio = statistics.median(a / b for a, b in zip(rates[name], rates[other], strict=True))
        print(f"{name} / {other}: {ratio:.2f}")


if __name__ == "__main__":
    main()
