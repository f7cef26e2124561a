import numpy as np
import pytest
from PIL import Image

from coco.drawing import (
    LARGEST_SIZE,
    PANEL_SIZE,
    Comparison,
    DrawnBox,
    draw_boxes,
    draw_comparisons,
    label_colour,
)


def test_small_images_are_enlarged_and_boxes_with_them():
    image = Image.new("RGB", (40, 20), "black")
    panel = np.asarray(draw_boxes(image, [DrawnBox((20, 10, 30, 19), 3, "x")]))
    assert panel.shape == (PANEL_SIZE // 2, PANEL_SIZE, 3)
    scale = PANEL_SIZE / 40
    assert tuple(panel[int(15 * scale), int(20 * scale)]) == label_colour(3)
    assert tuple(panel[int(15 * scale), int(25 * scale)]) == (0, 0, 0)
    assert np.asarray(image).max() == 0


@pytest.mark.parametrize("size", [(640, 480), (360, 500), (1201, 400)])
def test_larger_images_keep_their_pixels(size):
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), np.uint8))
    assert np.array_equal(draw_boxes(image, []), image)
    panel = np.asarray(draw_boxes(image, [DrawnBox((100, 100, 200, 200), 3, "x")]))
    assert panel.shape == (size[1], size[0], 3)
    assert tuple(panel[150, 100]) == label_colour(3)
    assert np.array_equal(panel[300:], np.asarray(image)[300:])


def test_lines_and_letters_grow_with_the_image():
    def measure(size):
        panel = np.asarray(draw_boxes(Image.new("RGB", size), [DrawnBox((0, size[1] / 2, size[0], size[1]), 3, "")]))
        drawn = (panel == label_colour(3)).all(-1)
        strip = drawn[: size[1] // 2, 0].sum()
        return drawn[size[1] // 2 + 1 :, size[0] // 2].sum(), strip

    (line, strip), (thick, tall) = measure((600, 400)), measure((2400, 1600))
    assert thick == pytest.approx(4 * line, abs=4)
    assert tall == pytest.approx(4 * strip, rel=0.05)


def test_an_image_that_no_jpeg_can_hold_is_reduced(tmp_path):
    picture = draw_boxes(Image.new("L", (70_000, 2)).convert("RGB"), [])
    assert picture.size == (LARGEST_SIZE, 2)
    picture.save(tmp_path / "long.jpg")


@pytest.mark.parametrize(
    ("sizes", "height"),
    [
        ([(640, 480)], 270),
        ([(640, 480), (640, 480), (480, 640)], 270),
        ([(480, 640)], 480),
        ([(30, 30)], PANEL_SIZE),
        ([(10, 1000)], 2 * PANEL_SIZE),
        ([(1000, 10)], PANEL_SIZE / 3),
    ],
)
def test_cells_have_the_median_aspect_and_leave_no_band(sizes, height):
    comparisons = [Comparison(Image.new("RGB", size, "blue"), [], []) for size in sizes]
    grid = np.asarray(draw_comparisons(comparisons))
    rows = -(-len(sizes) // 2)
    assert len(grid) == rows * (height + 25)
    blue = (grid == (0, 0, 255)).all(-1)
    first = sizes[0][0] / sizes[0][1]
    assert blue[: len(grid) // rows, 6].sum() == pytest.approx(min(height, 360 / first), abs=1)
    assert not blue[-6:].any()


def test_boxes_outside_or_without_area_are_drawn_without_error():
    boxes = [
        DrawnBox((-50, -50, 200, 200), 0, "large"),
        DrawnBox((5, 5, 2, 2), 1, "inverted"),
        DrawnBox((99, 99, 99, 99), 2, "far"),
    ]
    assert draw_boxes(Image.new("RGB", (30, 30)), boxes).size == (PANEL_SIZE, PANEL_SIZE)


def test_detections_stand_to_the_right_of_the_ground_truth():
    image = Image.new("RGB", (30, 30), "white")
    box = DrawnBox((5, 5, 25, 25), 0, "thing 0.90")

    def count(grid, left, right):
        return int((np.asarray(grid)[:, left:right] == label_colour(0)).all(-1).sum())

    half = PANEL_SIZE + 9
    truth_only = draw_comparisons([Comparison(image, [box], [])])
    assert count(truth_only, 0, half) > 500
    assert count(truth_only, half, truth_only.width) == 0
    detection_only = draw_comparisons([Comparison(image, [], [box])])
    assert count(detection_only, 0, half) == 0
    assert count(detection_only, half, detection_only.width) > 500


def test_three_comparisons_take_two_rows():
    comparison = Comparison(Image.new("RGB", (30, 30)), [], [])
    assert draw_comparisons([comparison] * 3).height == 2 * draw_comparisons([comparison]).height


def test_neighbouring_labels_have_different_colours():
    colours = np.array([label_colour(label) for label in range(80)])
    assert np.abs(np.diff(colours, axis=0)).max(axis=1).min() > 60
