"""HTML and SVG as trees, so that text is escaped and tags are closed by construction.

A picture is drawn twice, for a wide and for a narrow page; the style sheet shows one of them, so that text
has its own size on both.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from xml.etree import ElementTree as ET

Child = ET.Element | str | None
Drawing = tuple[float, list[ET.Element]]  # height in px, and what is drawn

UNKNOWN = "–"
WIDTHS = {"wide": 880.0, "narrow": 350.0}  # px
CHARACTER_PX = 7.0  # of a wide sans-serif at that size, on average
# What XML cannot hold, even escaped.
FORBIDDEN = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def tag(name: str, *children: Child, **attributes: str | float | None) -> ET.Element:
    """An element. `class_` is written `class`, `stroke_width` `stroke-width`; None is left out."""
    element = ET.Element(name)
    for key, value in attributes.items():
        if value is not None:
            element.set(key.rstrip("_").replace("_", "-"), _clean(_number(value)))
    for child in children:
        if isinstance(child, ET.Element):
            element.append(child)
        elif child is not None:
            _add_text(element, _clean(child))
    return element


def _clean(text: str) -> str:
    return FORBIDDEN.sub("\ufffd", text)


def _number(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:.2f}".rstrip("0").rstrip(".")


def _add_text(element: ET.Element, text: str) -> None:
    if len(element):
        element[-1].tail = (element[-1].tail or "") + text
    else:
        element.text = (element.text or "") + text


def to_page(title: str, body: ET.Element) -> str:
    """A whole page. It loads nothing: the style is inside."""
    style = Path(__file__).with_name("page.css").read_text()
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{html.escape(_clean(title))}</title>\n<style>\n{style}</style>\n</head>\n"
        f"{ET.tostring(body, encoding='unicode', short_empty_elements=False)}\n</html>\n"
    )


def text_px(text: str) -> float:
    """About how wide a text is."""
    return CHARACTER_PX * len(text)


def label(x: float, y: float, text: str, anchor: str = "start", class_: str | None = None) -> ET.Element:
    """A text in a picture; `y` is its base line."""
    return tag("text", text, x=x, y=y, text_anchor=anchor, class_=class_)


def rectangle(x: float, y: float, width: float, height: float, class_: str, **more: float) -> ET.Element:
    return tag("rect", x=x, y=y, width=max(0.0, width), height=height, class_=class_, **more)


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> ET.Element:
    return tag("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=class_)


def picture(name: str, title: str, description: str, draw: Callable[[float], Drawing]) -> ET.Element:
    """A drawing at each width, with what a reader who does not see it is told.

    Args:
        name: unique on the page.
        draw: takes a width in px.
    """
    versions = []
    for kind, width in WIDTHS.items():
        height, shapes = draw(width)
        known = f"{name}-{kind}"
        versions.append(
            tag(
                "svg",
                tag("title", title, id=f"{known}-title"),
                tag("desc", description, id=f"{known}-desc"),
                *shapes,
                class_=kind,
                role="img",
                aria_labelledby=f"{known}-title {known}-desc",
                viewBox=f"0 0 {width:.0f} {height:.0f}",
                xmlns="http://www.w3.org/2000/svg",
            )
        )
    return tag("div", *versions, class_="picture", id=name)


def legend(entries: Iterable[tuple[str, str]]) -> ET.Element:
    """What the colours mean.

    Args:
        entries: class and meaning.
    """
    return tag(
        "ul",
        *(tag("li", tag("span", class_=f"swatch {class_}"), text) for class_, text in entries),
        class_="legend",
    )


def section(title: str, *children: Child) -> ET.Element:
    """A part of the page under its heading."""
    return tag("section", tag("h2", title), *children)


def table(caption: str, columns: Sequence[str], rows: Iterable[Sequence[Child]], *numbers: int) -> ET.Element:
    """A table, the first cell of each row its heading; on a narrow page a card for each row.

    Roles are spelled out, because cards would take them away.

    Args:
        numbers: columns that are set to the right.
    """
    right = ["number" if index in numbers else None for index in range(len(columns))]
    head = tag(
        "tr",
        *(
            tag("th", text, scope="col", role="columnheader", class_=side)
            for text, side in zip(columns, right, strict=True)
        ),
        role="row",
    )
    lines = []
    for row in rows:
        first, *others = (
            tag(
                "td" if index else "th",
                cell,
                role="cell" if index else "rowheader",
                scope=None if index else "row",
                class_=right[index],
                data_label=columns[index],
            )
            for index, cell in enumerate(row)
        )
        lines.append(tag("tr", first, *others, role="row"))
    return tag(
        "table",
        tag("caption", caption),
        tag("thead", head, role="rowgroup"),
        tag("tbody", *lines, role="rowgroup"),
        role="table",
    )


def ticks(low: float, high: float, at_most: int) -> list[float]:
    """Round numbers from low to high, 1, 2 or 5 times a power of ten apart."""
    if not high > low:
        return [low]
    least = (high - low) / max(1, at_most)
    power = 10.0 ** math.floor(math.log10(least))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [index * step for index in range(first, math.floor(high / step + 1e-9) + 1)]
