"""Pictures of detections: over the image, and beside the ground truth."""

import colorsys
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from PIL import Image, ImageDraw, ImageFont

PANEL_SIZE = 360
MARGIN = 6
FONT_SIZE = 13
LINE_WIDTH = 2
COLUMNS = 2
LARGEST_SIZE = 65500
"""What a JPEG file can hold, in pixels of one side."""

_PIXELS_PER_LETTER = 45
_PIXELS_PER_LINE = 300
_ASPECTS = (0.5, 3.0)
"""Of the cells of a grid, width by height: one strange image stretches none."""


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

    Every image is scaled into a cell of the same size, small ones enlarged, so that lines and letters stay legible. The
    cells are `PANEL_SIZE` wide and have the median of the images' aspects.

    Args:
        comparisons: At least one.

    Returns:
        The grid, RGB.
    """
    heading = FONT_SIZE + MARGIN
    aspect = median(comparison.image.width / comparison.image.height for comparison in comparisons)
    cell_height = round(PANEL_SIZE / min(max(aspect, _ASPECTS[0]), _ASPECTS[1]))
    pair_width, pair_height = 2 * (PANEL_SIZE + MARGIN) + MARGIN, cell_height + heading + MARGIN
    rows = -(-len(comparisons) // COLUMNS)
    grid = Image.new("RGB", (COLUMNS * pair_width, rows * pair_height), "white")
    draw = ImageDraw.Draw(grid)
    font = ImageFont.load_default(FONT_SIZE)
    for number, comparison in enumerate(comparisons):
        left, top = number % COLUMNS * pair_width, number // COLUMNS * pair_height
        scale = min(PANEL_SIZE / comparison.image.width, cell_height / comparison.image.height)
        for title, boxes, offset in (
            ("ground truth", comparison.truth, MARGIN),
            ("detections", comparison.detections, PANEL_SIZE + 2 * MARGIN),
        ):
            draw.text((left + offset, top + MARGIN / 2), title, fill="black", font=font)
            grid.paste(_draw_scaled(comparison.image, boxes, scale), (left + offset, top + heading))
    return grid


def draw_boxes(image: Image.Image, boxes: Sequence[DrawnBox]) -> Image.Image:
    """Draws boxes onto a copy of the image, of its own size.

    An image whose longer side is below `PANEL_SIZE` pixels is enlarged to that, one of more than a JPEG file can hold
    reduced. Lines and letters grow with the image.
    """
    longer = max(image.size)
    return _draw_scaled(image, boxes, min(max(longer, PANEL_SIZE), LARGEST_SIZE) / longer)


def label_colour(label: int) -> tuple[int, int, int]:
    """A colour for each label; neighbouring labels have hues far apart (steps of the golden ratio)."""
    red, green, blue = colorsys.hsv_to_rgb(label * 0.618034 % 1, 0.85, 0.9)
    return round(255 * red), round(255 * green), round(255 * blue)


def _draw_scaled(image: Image.Image, boxes: Sequence[DrawnBox], scale: float) -> Image.Image:
    """Draws boxes onto a scaled copy of the image."""
    width, height = (max(1, round(extent * scale)) for extent in image.size)
    panel = image.resize((width, height), Image.Resampling.BICUBIC)
    draw = ImageDraw.Draw(panel)
    line_width = max(LINE_WIDTH, round(max(panel.size) / _PIXELS_PER_LINE))
    for box in boxes:
        x1, x2 = (min(max(value * scale, 0), width - 1) for value in box.box_xyxy[::2])
        y1, y2 = (min(max(value * scale, 0), height - 1) for value in box.box_xyxy[1::2])
        draw.rectangle((x1, y1, max(x1, x2), max(y1, y2)), outline=label_colour(box.label), width=line_width)
    font_size = max(FONT_SIZE, round(max(panel.size) / _PIXELS_PER_LETTER))
    for box in boxes:
        _draw_text(draw, panel.size, (box.box_xyxy[0] * scale, box.box_xyxy[1] * scale), box, font_size)
    return panel


def _draw_text(
    draw: ImageDraw.ImageDraw,
    panel_size: tuple[int, int],
    corner_xy: tuple[float, float],
    box: DrawnBox,
    font_size: int,
) -> None:
    """Writes a box's text on a strip above its corner, moved inside the panel."""
    font = ImageFont.load_default(font_size)
    space = font_size // 6
    text_width = draw.textlength(box.text, font=font) + 2 * space
    strip = font_size + font_size // 4
    left = min(max(corner_xy[0], 0), max(panel_size[0] - text_width, 0))
    top = min(max(corner_xy[1] - strip, 0), panel_size[1] - strip)
    draw.rectangle((left, top, left + text_width, top + strip), fill=label_colour(box.label))
    outline = font_size // FONT_SIZE
    draw.text((left + space, top), box.text, fill="white", font=font, stroke_width=outline, stroke_fill="black")
