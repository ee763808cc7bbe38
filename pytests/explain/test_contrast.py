"""Colours of a page of `lowbit explain`: text on all that it stands on, as WCAG 2.2 (1.4.3) asks for."""

from __future__ import annotations

import colorsys
import re
from pathlib import Path

import pytest

from lowbit.pylib.explain.figures import HUES

TEMPLATES = Path(__file__).resolve().parents[2] / "pylib/explain/templates"
LEAST = 4.5
TEXT = ("text", "quiet", "k", "v", "m", "s", "c")
Colour = tuple[float, ...]  # red, green, blue and opacity, each of 1


def schemes() -> dict[str, dict[str, Colour]]:
    """The variables of the light and of the dark scheme, in the order of the style sheet."""
    roots = re.findall(r":root\{(.*?)\}", (TEMPLATES / "page.css").read_text())
    found = [{name: read(digits) for name, digits in re.findall(r"--(\w+):#([0-9a-f]+)", root)} for root in roots]
    return dict(zip(("light", "dark"), found, strict=True))


def read(digits: str) -> Colour:
    pairs = [c * 2 for c in digits] if len(digits) < 6 else [digits[i : i + 2] for i in range(0, len(digits), 2)]
    red, green, blue, *opacity = (int(pair, 16) / 255 for pair in pairs)
    return red, green, blue, *(opacity or [1.0])


def over(front: Colour, back: Colour) -> Colour:
    return *(a * front[3] + b * (1 - front[3]) for a, b in zip(front[:3], back)), 1.0


def luminance(colour: Colour) -> float:
    parts = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour[:3])
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), parts))


def contrast(a: Colour, b: Colour) -> float:
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


def test_contrast_is_that_of_the_standard() -> None:
    assert contrast(read("000"), read("ffffff")) == pytest.approx(21)
    assert contrast(read("767676"), read("fff")) == pytest.approx(4.54, abs=0.01)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read(scheme: str) -> None:
    """On the page, on headings and lines under the pointer, on lines that are picked, and in cells of every hue."""
    colours = schemes()[scheme]
    opacity = float(re.findall(r"60% 55%/(\.\d+)\)", (TEMPLATES / "page.html").read_text())[0])
    back = colours["back"]
    for name in TEXT:
        for behind in ("back", "soft", "mark"):
            assert contrast(colours[name], over(colours[behind], back)) >= LEAST, (name, behind)
    for hue in range(HUES):
        cell = over((*colorsys.hls_to_rgb(hue / HUES, 0.55, 0.6), opacity), back)
        assert contrast(colours["text"], cell) >= LEAST, hue
