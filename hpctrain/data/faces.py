"""Cartoon faces: what makes a person, and how one is drawn.

Lengths are in units of half the face's height; the origin is the middle of the face, y points down.
Behaviours are drawn large enough to be seen on a face of 20 pixels' half height.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw

DRAWING_VERSION = 2  #: raise it with every change to what is drawn
BEHAVIOURS = ("eyes_closed", "glasses", "hand_raised", "smiling")

_SKINS = ((244, 208, 177), (231, 178, 139), (198, 134, 90), (141, 85, 50), (94, 57, 36))
_HAIRS = ((24, 20, 18), (74, 48, 28), (140, 92, 48), (200, 164, 92), (150, 60, 34), (150, 150, 152))
_IRISES = ((60, 36, 20), (110, 72, 36), (64, 96, 120), (70, 104, 70))
_CANVAS = (1.7, 1.9)  #: half width and half height of the drawing

Color = tuple[int, int, int]
Point = tuple[float, float]


@dataclass(frozen=True)
class Person:
    """What all pictures of an identity share."""

    skin: Color
    hair: Color
    iris: Color
    face_width: float
    jaw: float  #: 0 round … 1 square
    hair_style: int
    hair_line: float
    eye_distance: float
    eye_height: float
    eye_size: float
    eye_aspect: float
    brow_tilt: float
    brow_weight: float
    brow_gap: float
    nose_length: float
    nose_width: float
    mouth_height: float
    mouth_width: float
    lip_weight: float
    ear_size: float
    beard: int  #: 0 none, 1 chin, 2 moustache
    moles: tuple[Point, ...]


def make_person(rng: np.random.Generator) -> Person:
    """Draws an identity at random."""

    def color(palette: tuple[Color, ...]) -> Color:
        first, second = (np.array(palette[i]) for i in rng.integers(0, len(palette), 2))
        mixed = first + rng.uniform(0, 0.6) * (second - first)
        return int(mixed[0]), int(mixed[1]), int(mixed[2])

    return Person(
        skin=color(_SKINS),
        hair=color(_HAIRS),
        iris=color(_IRISES),
        face_width=rng.uniform(0.62, 0.92),
        jaw=rng.uniform(0, 1),
        hair_style=int(rng.integers(0, 5)),
        hair_line=rng.uniform(-0.75, -0.45),
        eye_distance=rng.uniform(0.28, 0.42),
        eye_height=rng.uniform(-0.22, 0.0),
        eye_size=rng.uniform(0.14, 0.20),
        eye_aspect=rng.uniform(0.65, 0.95),
        brow_tilt=rng.uniform(-0.07, 0.09),
        brow_weight=rng.uniform(0.03, 0.09),
        brow_gap=rng.uniform(0.18, 0.28),
        nose_length=rng.uniform(0.22, 0.42),
        nose_width=rng.uniform(0.06, 0.17),
        mouth_height=rng.uniform(0.50, 0.62),
        mouth_width=rng.uniform(0.18, 0.34),
        lip_weight=rng.uniform(0.03, 0.09),
        ear_size=rng.uniform(0.10, 0.2),
        beard=int(rng.choice([0, 0, 0, 1, 2])),
        moles=tuple((rng.uniform(-0.5, 0.5), rng.uniform(-0.1, 0.75)) for _ in range(rng.integers(0, 4))),
    )


def draw_face(person: Person, shown: frozenset[str], unit: float, rng: np.random.Generator) -> Image.Image:
    """Draws a face upright, from the front, on a transparent ground.

    Args:
        shown: Which BEHAVIOURS are seen.
        unit: Half the face's height, pixels.
        rng: Decides clothes, glasses and hand, which no identity owns.
    """
    face = _Drawing(person, unit)
    face.body(_random_color(rng))
    face.head()
    face.eyes("eyes_closed" in shown)
    face.nose()
    face.mouth("smiling" in shown)
    face.hair()
    if "glasses" in shown:
        face.glasses(_random_color(rng, 10, 120), rng.uniform(0.22, 0.27), is_round=bool(rng.random() < 0.5))
    if "hand_raised" in shown:
        face.hand(1 if rng.random() < 0.5 else -1, rng.uniform(-0.3, 0.3))
    return face.image


class _Drawing:
    def __init__(self, person: Person, unit: float) -> None:
        self._person, self._unit = person, unit
        self.image = Image.new("RGBA", (round(2 * _CANVAS[0] * unit), round(2 * _CANVAS[1] * unit)))
        self._draw = ImageDraw.Draw(self.image)
        self._shade = _scaled(person.skin, 0.72)

    def body(self, clothes: Color) -> None:
        self._ellipse((0, 1.75), 1.3, 0.75, clothes)
        self._box((-0.28, 0.6), (0.28, 1.3), self._shade)

    def head(self) -> None:
        person = self._person
        if person.hair_style >= 3:  # long hair, behind the head
            self._ellipse(
                (0, 0.1), person.face_width + 0.26, 1.05 + 0.1 * (person.hair_style == 4), person.hair
            )
        for side in (-1, 1):
            self._ellipse(
                (side * person.face_width, 0.05), person.ear_size * 0.7, person.ear_size, self._shade
            )
        self._ellipse((0, 0), person.face_width, 1.0, person.skin)
        jaw = person.face_width * (0.55 + 0.35 * person.jaw)
        self._draw.rounded_rectangle(
            (*self._at(-jaw, 0.0), *self._at(jaw, 0.78 + 0.17 * person.jaw)), self._unit * 0.3, person.skin
        )
        if person.beard == 1:
            self._ellipse((0, 0.88), jaw * 0.6, 0.16, person.hair)
        for mole in person.moles:
            self._ellipse(mole, 0.03, 0.03, _scaled(person.skin, 0.4))

    def eyes(self, closed: bool) -> None:
        person = self._person
        for side in (-1, 1):
            x, y = side * person.eye_distance, person.eye_height
            wide, high = person.eye_size, person.eye_size * person.eye_aspect
            if closed:
                self._ellipse((x, y), wide, high, self._shade)
                self._line([(x - wide, y + 0.02), (x, y + 0.07), (x + wide, y + 0.02)], 0.07, (30, 22, 20))
            else:
                self._ellipse((x, y), wide, high, (245, 243, 240))
                self._ellipse((x, y), high * 0.85, high * 0.85, person.iris)
                self._ellipse((x, y), high * 0.4, high * 0.4, (12, 10, 10))
            brow, tilt = y - person.brow_gap, side * person.brow_tilt
            ends = [(x - 1.2 * wide, brow - tilt), (x + 1.2 * wide, brow + tilt)]
            self._line(ends, person.brow_weight, _scaled(person.hair, 0.8))

    def nose(self) -> None:
        person = self._person
        top, tip = person.eye_height + 0.06, person.eye_height + 0.06 + person.nose_length
        self._line([(0.02, top), (0.045, tip - 0.05)], 0.035, self._shade)
        self._ellipse((0, tip), person.nose_width, 0.06, self._shade)

    def mouth(self, smiling: bool) -> None:
        person = self._person
        y, wide, red = person.mouth_height, person.mouth_width, _mixed(person.skin, (150, 40, 50), 0.6)
        if person.beard == 2:
            self._ellipse((0, y - 0.09), wide * 1.05, 0.055, person.hair)
        if smiling:
            left, top = self._at(-wide - 0.14, y - 0.26)
            right, bottom = self._at(wide + 0.14, y + 0.24)
            self._draw.chord(
                (left, top, right, bottom), 0, 180, (250, 248, 244), red, max(1, round(self._unit * 0.04))
            )
        else:
            self._ellipse((0, y), wide, person.lip_weight, red)
            self._line([(-wide, y), (wide, y)], 0.02, _scaled(red, 0.5))

    def hair(self) -> None:
        person = self._person
        wide = person.face_width + 0.07
        if person.hair_style == 0:  # shaved: a shadow
            self._chord(wide - 0.05, person.hair_line - 0.15, _mixed(person.skin, person.hair, 0.4))
            return
        self._chord(wide, person.hair_line, person.hair)
        if person.hair_style in (2, 4):  # a fringe to one side
            tips = [(-wide * 0.9, -0.55), (wide * 0.8, -0.75), (-wide * 0.75, person.eye_height - 0.2)]
            self._draw.polygon([self._at(*tip) for tip in tips], person.hair)

    def glasses(self, color: Color, size: float, is_round: bool) -> None:
        person, weight = self._person, 0.08
        for side in (-1, 1):
            x, y = side * person.eye_distance, person.eye_height
            corners = (*self._at(x - size, y - 0.85 * size), *self._at(x + size, y + 0.85 * size))
            width = max(1, round(weight * self._unit))
            shape = self._draw.ellipse if is_round else self._draw.rectangle
            shape(corners, outline=color, width=width)
            self._line(
                [(side * (person.eye_distance + size), y), (side * person.face_width, y - 0.05)],
                weight,
                color,
            )
        bridge = person.eye_distance - size
        self._line([(-bridge, person.eye_height), (bridge, person.eye_height)], weight, color)

    def hand(self, side: int, height: float) -> None:
        """Draws a hand beside the face, near enough that crops keep it."""
        x, skin = side * 0.95, self._person.skin
        self._box((x - 0.17, height + 0.3), (x + 0.17, 1.9), self._shade)
        self._ellipse((x, height + 0.15), 0.3, 0.28, skin)
        for finger in range(4):
            at = x - 0.225 + 0.15 * finger
            self._line([(at, height + 0.1), (at, height - 0.38)], 0.12, skin)
            self._line([(at + 0.075, height), (at + 0.075, height - 0.36)], 0.03, self._shade)

    def _chord(self, wide: float, line: float, color: Color) -> None:
        """Fills the top of an ellipse around the head, above a height."""
        angle = float(np.rad2deg(np.arcsin(np.clip(-line / 1.06, 0, 1))))
        box = (*self._at(-wide, -1.06), *self._at(wide, 1.06))
        self._draw.chord(box, 180 + angle * 0.7, 360 - angle * 0.7, color)

    def _ellipse(self, center: Point, wide: float, high: float, color: Color) -> None:
        x, y = center
        self._draw.ellipse((*self._at(x - wide, y - high), *self._at(x + wide, y + high)), color)

    def _box(self, first: Point, second: Point, color: Color) -> None:
        self._draw.rectangle((*self._at(*first), *self._at(*second)), color)

    def _line(self, points: list[Point], weight: float, color: Color) -> None:
        self._draw.line([self._at(*point) for point in points], color, max(1, round(weight * self._unit)))

    def _at(self, x: float, y: float) -> Point:
        return (_CANVAS[0] + x) * self._unit, (_CANVAS[1] + y) * self._unit


def _scaled(color: Color, factor: float) -> Color:
    return _mixed((0, 0, 0), color, factor)


def _mixed(first: Color, second: Color, share: float) -> Color:
    red, green, blue = (round(a + share * (b - a)) for a, b in zip(first, second, strict=True))
    return red, green, blue


def _random_color(rng: np.random.Generator, low: int = 20, high: int = 230) -> Color:
    red, green, blue = rng.integers(low, high, 3).tolist()
    return red, green, blue
