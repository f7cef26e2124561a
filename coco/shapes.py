"""Synthetic scenes: textured shapes over a textured background, with the visible mask of every object.

One scene is a function of its random generator alone. A category is a shape with its own kind of texture and a hue that
varies a little; the texture's second colour, size, place and angle are random.
"""

import colorsys
from collections.abc import Callable
from dataclasses import dataclass
from math import pi
from typing import Any

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.floating[Any]]
BoolArray = NDArray[np.bool_]
Field = Callable[[FloatArray, FloatArray], FloatArray]

EMPTY_PROBABILITY = 0.04
CROWD_PROBABILITY = 0.08
COUNT_PROBABILITIES = (0.34, 0.28, 0.18, 0.10, 0.06, 0.04)
"""Probabilities of 1, 2, ... shapes in an image, crowds and empty images aside."""

SIZE_RANGES = ((0.12, 0.25), (0.3, 0.7), (0.75, 1.0))
SIZE_PROBABILITIES = (0.15, 0.75, 0.1)
"""Small, middle and large shapes: diameter as a share of the image's shorter side, and how often."""

HUE_DEVIATION = 0.03
"""Standard deviation of a shape's hue from that of its category; the categories share the circle of 1 evenly."""

MIN_VISIBLE_FRACTION = 0.4
MIN_VISIBLE_PIXELS = 16


@dataclass(frozen=True)
class SceneObject:
    """One annotated object: its class index, the mask of its visible part (bool [H, W]) and whether it is a crowd."""

    label: int
    visible: BoolArray
    is_crowd: bool


@dataclass(frozen=True)
class Shape:
    """A category: `outline` is negative inside the shape, `texture` is positive where the second colour goes.

    Both are functions of the shape's own coordinates, in which it just fits into the unit circle.
    """

    name: str
    outline: Field
    texture: Field


def _disc(u: FloatArray, v: FloatArray) -> FloatArray:
    return np.hypot(u, v) - 1


def _square(u: FloatArray, v: FloatArray) -> FloatArray:
    return np.maximum(np.abs(u), np.abs(v)) - 0.71


def _triangle(u: FloatArray, v: FloatArray) -> FloatArray:
    return np.maximum(-v, np.abs(u) * np.float32(0.866) + v / 2) - np.float32(0.5)


def _star(u: FloatArray, v: FloatArray) -> FloatArray:
    angle_from_tip = np.abs((np.arctan2(v, u) + pi / 5) % (2 * pi / 5) - pi / 5)
    inner_x, inner_y = 0.42 * np.cos(pi / 5), 0.42 * np.sin(pi / 5)
    radius = np.hypot(u, v)
    side = inner_y * (radius * np.cos(angle_from_tip) - 1) + (1 - inner_x) * radius * np.sin(angle_from_tip)
    return side / np.hypot(inner_y, 1 - inner_x)


def _cross(u: FloatArray, v: FloatArray) -> FloatArray:
    long_side, short_side = np.maximum(np.abs(u), np.abs(v)), np.minimum(np.abs(u), np.abs(v))
    return np.maximum(long_side - np.float32(0.95), short_side - np.float32(0.3))


def _ring(u: FloatArray, v: FloatArray) -> FloatArray:
    return np.abs(np.hypot(u, v) - np.float32(0.76)) - np.float32(0.24)


def _stripes(u: FloatArray, v: FloatArray) -> FloatArray:
    return np.sin(11 * u)


def _checks(u: FloatArray, v: FloatArray) -> FloatArray:
    return np.sin(9 * u) * np.sin(9 * v)


def _dots(u: FloatArray, v: FloatArray) -> FloatArray:
    return np.cos(14 * u) + np.cos(14 * v) - np.float32(0.9)


def _target(u: FloatArray, v: FloatArray) -> FloatArray:
    return np.sin(13 * np.hypot(u, v))


def _frame(u: FloatArray, v: FloatArray) -> FloatArray:
    return _cross(u, v) + np.float32(0.12)


def _sectors(u: FloatArray, v: FloatArray) -> FloatArray:
    return np.sin(8 * np.arctan2(v, u))


SHAPES = (
    Shape("disc", _disc, _stripes),
    Shape("square", _square, _checks),
    Shape("triangle", _triangle, _dots),
    Shape("star", _star, _target),
    Shape("cross", _cross, _frame),
    Shape("ring", _ring, _sectors),
)


def draw_scene(rng: np.random.Generator, height: int, width: int) -> tuple[NDArray[np.uint8], list[SceneObject]]:
    """Draws one scene.

    Objects are painted one over the other. An object that would leave less than 40 % of an earlier one visible is not
    painted, so everything to be seen is annotated.

    Args:
        rng: The only source of randomness.
        height: Height of the image in pixels.
        width: Width of the image in pixels.

    Returns:
        The picture, uint8 [height, width, 3] RGB, and its objects from back to front, none of them fully hidden.
    """
    is_dark = bool(rng.random() < 0.6)
    canvas = _draw_background(rng, height, width, is_dark)
    if rng.random() < EMPTY_PROBABILITY:
        return _quantise(canvas), []

    objects: list[SceneObject] = []
    if rng.random() < CROWD_PROBABILITY:
        objects.append(_draw_crowd(rng, canvas, is_dark))
    full_areas = [int(item.visible.sum()) for item in objects]
    for _ in range(1 + int(rng.choice(len(COUNT_PROBABILITIES), p=COUNT_PROBABILITIES))):
        label = int(rng.integers(len(SHAPES)))
        relative_size = rng.uniform(*SIZE_RANGES[rng.choice(len(SIZE_RANGES), p=SIZE_PROBABILITIES)])
        centre_yx = (rng.uniform(0.08, 0.92) * height, rng.uniform(0.08, 0.92) * width)
        coverage, colours = _render(rng, label, relative_size * min(height, width) / 2, centre_yx, canvas, is_dark)
        mask = coverage >= 0.5
        remaining = [item.visible & ~mask for item in objects]
        hides_too_much = any(
            left.sum() < max(MIN_VISIBLE_FRACTION * area, MIN_VISIBLE_PIXELS)
            for left, area in zip(remaining, full_areas, strict=True)
        )
        if hides_too_much or mask.sum() < MIN_VISIBLE_PIXELS:
            continue
        objects = [SceneObject(item.label, left, item.is_crowd) for item, left in zip(objects, remaining, strict=True)]
        objects.append(SceneObject(label, mask, False))
        full_areas.append(int(mask.sum()))
        _blend(canvas, coverage, colours)
    return _quantise(canvas), objects


def _draw_background(rng: np.random.Generator, height: int, width: int, is_dark: bool) -> FloatArray:
    """Smooth waves between two dull colours, plus grain; float32 [height, width, 3] in 0..1."""
    rows, columns = np.mgrid[0:height, 0:width].astype(np.float32) / max(height, width)
    waves = np.zeros((height, width), np.float32)
    for frequency in (1.5, 3.0, 6.0, 12.0):
        angle, phase = rng.uniform(0, 2 * pi, size=2)
        waves += np.sin(2 * pi * frequency * (rows * np.sin(angle) + columns * np.cos(angle)) + phase) / 8
    brightness = (0.08, 0.35) if is_dark else (0.7, 0.95)
    first, second = (_draw_colour(rng, rng.random(), (0.1, 0.4), brightness) for _ in range(2))
    mix = (waves + np.float32(0.5))[..., None]
    grain = rng.normal(0, 0.03, size=(height, width, 1)).astype(np.float32)
    return first * (1 - mix) + second * mix + grain


def _draw_crowd(rng: np.random.Generator, canvas: FloatArray, is_dark: bool) -> SceneObject:
    """Paints a heap of small shapes of one category and returns it as one crowd object."""
    height, width = canvas.shape[:2]
    label = int(rng.integers(len(SHAPES)))
    centre_yx = rng.uniform(0.25, 0.75, size=2) * (height, width)
    radius = 0.06 * min(height, width)
    heap = np.zeros((height, width), bool)
    for offset_yx in rng.normal(0, 2.5 * radius, size=(int(rng.integers(10, 20)), 2)):
        place_yx = np.clip(centre_yx + offset_yx, 0, (height - 1, width - 1))
        coverage, colours = _render(rng, label, radius, (place_yx[0], place_yx[1]), canvas, is_dark)
        heap |= coverage >= 0.5
        _blend(canvas, coverage, colours)
    return SceneObject(label, heap, True)


def _render(
    rng: np.random.Generator,
    label: int,
    radius: float,
    centre_yx: tuple[float, float],
    canvas: FloatArray,
    is_dark: bool,
) -> tuple[FloatArray, FloatArray]:
    """Returns coverage (float32 [H, W], 0..1, one pixel of antialiasing) and colours (float32 [H, W, 3]) of a shape."""
    height, width = canvas.shape[:2]
    angle = rng.uniform(0, 2 * pi)
    rows, columns = np.mgrid[0:height, 0:width].astype(np.float32)
    y, x = (rows + 0.5 - centre_yx[0]) / radius, (columns + 0.5 - centre_yx[1]) / radius
    u, v = x * np.cos(angle) + y * np.sin(angle), y * np.cos(angle) - x * np.sin(angle)
    shape = SHAPES[label]
    coverage = np.clip(0.5 - shape.outline(u, v) * radius, 0, 1).astype(np.float32)
    bright, deep = ((0.75, 1.0), (0.45, 0.65)) if is_dark else ((0.4, 0.55), (0.1, 0.3))
    hue = label / len(SHAPES) + rng.normal(0, HUE_DEVIATION)
    first = _draw_colour(rng, hue, (0.6, 1.0), bright)
    second = _draw_colour(rng, rng.random(), (0.6, 1.0), deep)
    return coverage, np.where(shape.texture(u, v)[..., None] > 0, second, first)


def _draw_colour(
    rng: np.random.Generator, hue: float, saturation: tuple[float, float], brightness: tuple[float, float]
) -> FloatArray:
    """A colour of the hue (circle of 1) within the given ranges; float32 [3] in 0..1."""
    return np.array(colorsys.hsv_to_rgb(hue % 1, rng.uniform(*saturation), rng.uniform(*brightness)), np.float32)


def _blend(canvas: FloatArray, coverage: FloatArray, colours: FloatArray) -> None:
    """Paints the colours onto the canvas, in place."""
    canvas += coverage[..., None] * (colours - canvas)


def _quantise(canvas: FloatArray) -> NDArray[np.uint8]:
    """Rounds a canvas in 0..1 to bytes."""
    return np.clip(canvas * 255 + 0.5, 0, 255).astype(np.uint8)
