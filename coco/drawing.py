"""Pictures of detections beside the ground truth."""

import colorsys
from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image, ImageDraw, ImageFont

PANEL_SIZE = 360
MARGIN = 6
FONT_SIZE = 13
COLUMNS = 2


@dataclass(frozen=True)
class DrawnBox:
    """A box (x1, y1, x2, y2) in pixels of its image, the label that decides its colour, and what is written on it."""

    box_xyxy: tuple[float, float, float, float]
    label: int
    text: str


@dataclass(frozen=True)
class Comparison:
    """One image with its ground truth and its detections."""

    image: Image.Image
    truth: Sequence[DrawnBox]
    detections: Sequence[DrawnBox]


def draw_comparisons(comparisons: Sequence[Comparison]) -> Image.Image:
    """Draws a grid: two pairs a row, ground truth on the left of each pair and detections on the right.

    Every image is scaled to the same panel, small ones enlarged, so that lines and letters stay legible.

    Args:
        comparisons: At least one.

    Returns:
        The grid, RGB.
    """
    heading = FONT_SIZE + MARGIN
    pair_width, pair_height = 2 * (PANEL_SIZE + MARGIN) + MARGIN, PANEL_SIZE + heading + MARGIN
    rows = -(-len(comparisons) // COLUMNS)
    grid = Image.new("RGB", (COLUMNS * pair_width, rows * pair_height), "white")
    draw = ImageDraw.Draw(grid)
    font = ImageFont.load_default(FONT_SIZE)
    for number, comparison in enumerate(comparisons):
        left, top = number % COLUMNS * pair_width, number // COLUMNS * pair_height
        for title, boxes, offset in (
            ("ground truth", comparison.truth, MARGIN),
            ("detections", comparison.detections, PANEL_SIZE + 2 * MARGIN),
        ):
            draw.text((left + offset, top + MARGIN / 2), title, fill="black", font=font)
            grid.paste(draw_boxes(comparison.image, boxes), (left + offset, top + heading))
    return grid


def draw_boxes(image: Image.Image, boxes: Sequence[DrawnBox]) -> Image.Image:
    """Draws boxes onto a copy of the image, scaled so that its longer side is `PANEL_SIZE` pixels."""
    scale = PANEL_SIZE / max(image.size)
    width, height = (max(1, round(extent * scale)) for extent in image.size)
    panel = image.resize((width, height), Image.Resampling.BICUBIC)
    draw = ImageDraw.Draw(panel)
    for box in boxes:
        x1, y1, x2, y2 = (min(max(value * scale, 0), PANEL_SIZE) for value in box.box_xyxy)
        draw.rectangle((x1, y1, max(x1, x2), max(y1, y2)), outline=label_colour(box.label), width=2)
    for box in boxes:
        _draw_text(draw, panel.size, (box.box_xyxy[0] * scale, box.box_xyxy[1] * scale), box)
    return panel


def label_colour(label: int) -> tuple[int, int, int]:
    """A colour for each label; neighbouring labels have hues far apart (steps of the golden ratio)."""
    red, green, blue = colorsys.hsv_to_rgb(label * 0.618034 % 1, 0.85, 0.9)
    return round(255 * red), round(255 * green), round(255 * blue)


def _draw_text(
    draw: ImageDraw.ImageDraw, panel_size: tuple[int, int], corner_xy: tuple[float, float], box: DrawnBox
) -> None:
    """Writes a box's text on a strip above its corner, moved inside the panel."""
    font = ImageFont.load_default(FONT_SIZE)
    text_width = draw.textlength(box.text, font=font) + 4
    left = min(max(corner_xy[0], 0), max(panel_size[0] - text_width, 0))
    top = min(max(corner_xy[1] - FONT_SIZE - 3, 0), panel_size[1] - FONT_SIZE - 3)
    draw.rectangle((left, top, left + text_width, top + FONT_SIZE + 3), fill=label_colour(box.label))
    draw.text((left + 2, top), box.text, fill="white", font=font, stroke_width=1, stroke_fill="black")
