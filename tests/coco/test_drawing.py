import numpy as np
from PIL import Image

from coco.drawing import PANEL_SIZE, Comparison, DrawnBox, draw_boxes, draw_comparisons, label_colour


def test_small_images_are_enlarged_and_boxes_with_them():
    image = Image.new("RGB", (40, 20), "black")
    panel = np.asarray(draw_boxes(image, [DrawnBox((20, 10, 30, 19), 3, "x")]))
    assert panel.shape == (PANEL_SIZE // 2, PANEL_SIZE, 3)
    scale = PANEL_SIZE / 40
    assert tuple(panel[int(15 * scale), int(20 * scale)]) == label_colour(3)
    assert tuple(panel[int(15 * scale), int(25 * scale)]) == (0, 0, 0)
    assert np.asarray(image).max() == 0


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
