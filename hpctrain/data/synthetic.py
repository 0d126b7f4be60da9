"""Cartoon faces, for machines without data: people that differ as people do, seen as cameras see them.

An identity decides shapes and colours; each image has its own pose, scale, light, background, noise, JPEG
quality and behaviours. Distributions come from numpy's `Generator`, whose stream may change between numpy
versions: a data set is drawn once and then read.
"""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFilter

from hpctrain.data.faces import BEHAVIOURS, DRAWING_VERSION, Person, draw_face, make_person
from hpctrain.data.prepare import pack_images
from hpctrain.data.restartable import make_once
from hpctrain.errors import ConfigError

_SIZE = (112, 96)
_FACE_SHARE = 0.31  #: half the face's height, as a share of the image's height, before zoom
_WITHOUT_IDENTITY = 0.06  #: share of images
_WITHOUT_BEHAVIOUR = 0.15
_VAL_FRACTION = 0.2
_DRAWING_NAME = "drawing.json"  #: says by which version faces were drawn

Floats = npt.NDArray[np.float32]


def make_faces(
    out: Path,
    *,
    num_identities: int = 64,
    images_per_identity: int = 24,
    seed: int = 0,
    size: tuple[int, int] = _SIZE,
) -> None:
    """Draws faces and packs them into `out/train` and `out/val`; people of val are not in train.

    Does nothing where `out` already holds faces of this version. `out` appears whole or not at all, also
    when several processes try at once.

    Args:
        size: Height and width of the images, pixels.

    Raises:
        ConfigError: `out` holds something else, or faces of another version, or there are fewer than two
            identities.
    """

    def make(work: Path) -> None:
        if num_identities < 2 or images_per_identity < 1:
            raise ConfigError(
                f"cannot draw {images_per_identity} faces each of {num_identities} people",
                "train and val need different people",
                "set data.synthetic_identities to 2 or more",
            )
        _draw_all(work / "drawn", num_identities, images_per_identity, seed, size)
        pack_images(
            work / "drawn",
            work / "packed",
            list_file=work / "drawn" / "list.csv",
            val_fraction=_VAL_FRACTION,
            seed=seed,
            show=False,
        )

    make_once(out, _DRAWING_NAME, DRAWING_VERSION, "data.synthetic_identities", make)


def _draw_all(folder: Path, num_identities: int, per_identity: int, seed: int, size: tuple[int, int]) -> None:
    folder.mkdir(parents=True)
    with open(folder / "list.csv", "w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["path", "identity", "behaviours"])
        for number in range(num_identities):
            person = make_person(_generator(seed, number, 0))
            for view in range(per_identity):
                rng = _generator(seed, number, view + 1)
                shown = [name for name in BEHAVIOURS if rng.random() < 0.35]
                name = f"p{number:04d}_{view:04d}.jpg"
                image = _photograph(person, frozenset(shown), rng, size)
                image.save(folder / name, quality=int(rng.integers(55, 93)))
                identity = "" if rng.random() < _WITHOUT_IDENTITY else f"p{number:04d}"
                labels = "" if rng.random() < _WITHOUT_BEHAVIOUR else ";".join(shown) or "-"
                rows.writerow([name, identity, labels])


def _generator(seed: int, person: int, view: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64([seed, person, view]))


def _photograph(
    person: Person, shown: frozenset[str], rng: np.random.Generator, size: tuple[int, int]
) -> Image.Image:
    """Draws a face upright and then looks at it with a camera: pose, background, light, blur, noise."""
    height, width = size
    unit = 0.4 * height
    face = draw_face(person, shown, unit, rng)
    angle, shear = np.deg2rad(rng.uniform(-14, 14)), rng.uniform(-0.10, 0.10)
    zoom = rng.uniform(0.86, 1.14) * _FACE_SHARE * height / unit
    shift = rng.uniform(-0.06, 0.06, 2) * height
    turn = np.array([[np.cos(angle), -np.sin(angle) + shear], [np.sin(angle), np.cos(angle)]])
    inverse = turn / zoom  # from the photograph to the drawing
    center = np.array([face.width, face.height]) / 2 - inverse @ (np.array([width, height]) / 2 + shift)
    matrix = (*inverse[0], center[0], *inverse[1], center[1])
    seen = face.transform((width, height), Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR)
    scene = _background(rng, size)
    scene.paste(seen, (0, 0), seen)
    if rng.random() < 0.4:
        scene = scene.filter(ImageFilter.GaussianBlur(rng.uniform(0.3, 1.3)))
    return _expose(scene, rng)


def _background(rng: np.random.Generator, size: tuple[int, int]) -> Image.Image:
    corners = rng.integers(20, 236, (2, 2, 3)).astype(np.uint8)
    scene = Image.fromarray(corners).resize((size[1], size[0]), Image.Resampling.BICUBIC)
    draw = ImageDraw.Draw(scene)
    for _ in range(rng.integers(2, 7)):
        x, y = rng.uniform(-0.2, 1.0, 2) * (size[1], size[0])
        wide, high = rng.uniform(0.1, 0.6, 2) * (size[1], size[0])
        color = tuple(rng.integers(20, 236, 3).tolist())
        (draw.rectangle if rng.random() < 0.6 else draw.ellipse)((x, y, x + wide, y + high), fill=color)
    return scene


def _expose(scene: Image.Image, rng: np.random.Generator) -> Image.Image:
    """Light from one side, a colour cast, exposure, contrast and sensor noise."""
    height, width = scene.height, scene.width
    across = np.linspace(-1, 1, width, dtype=np.float32)[None, :]
    down = np.linspace(-1, 1, height, dtype=np.float32)[:, None]
    direction = rng.uniform(0, 2 * np.pi)
    light = 1.0 + rng.uniform(0, 0.45) * (np.cos(direction) * across + np.sin(direction) * down)
    cast = rng.uniform(0.86, 1.14, 3).astype(np.float32) * rng.uniform(0.65, 1.3)
    curve = (np.linspace(0, 1, 1024) ** rng.uniform(0.75, 1.35)).astype(np.float32)
    pixels: Floats = np.asarray(scene, dtype=np.float32) * light[:, :, None] * (cast * (1023 / 255))
    pixels = curve[np.clip(pixels, 0, 1023).astype(np.int16)]
    pixels += rng.uniform(0.005, 0.045) * rng.standard_normal(pixels.shape, dtype=np.float32)
    return Image.fromarray((np.clip(pixels, 0, 1) * 255).astype(np.uint8))
