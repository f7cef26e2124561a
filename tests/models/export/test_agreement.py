"""Two files of detections beside each other."""

import copy
import json

import pytest

from models.export.agreement import compare_results, read_results
from models.export.certificate import Tolerance

TOLERANCE = Tolerance(score=1e-3, box_px=0.1, min_score=0.0)
ROWS = [
    {"image_id": image_id, "category_id": category_id, "bbox": [x, 5.0, 10.0, 20.0], "score": score}
    for image_id in (4, 9)
    for x, category_id, score in ((1.0, 3, 0.9), (40.0, 7, 0.5), (80.0, 3, 0.2))
]


def test_equal_detections_agree_in_any_order():
    found = compare_results(ROWS, ROWS[::-1])
    assert (found.score, found.box_px, found.unpaired, found.compared) == (0, 0, 0, 4), "the last ones need no partner"
    assert compare_results(ROWS, copy.deepcopy(ROWS)).bitwise_equal


@pytest.mark.parametrize(
    ("place", "key", "value"),
    [(0, "score", 0.91), (3, "bbox", [1.0, 5.0, 10.2, 20.0]), (1, "category_id", 3)],
)
def test_a_difference_in_any_image_is_seen(place, key, value):
    changed = copy.deepcopy(ROWS)
    changed[place][key] = value
    assert not compare_results(ROWS, changed).within(TOLERANCE)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (ROWS[:3], "got 2 images and 1, others for the ids 9"),
        (ROWS[:5], "got 2 images and 2, others for the ids 9"),
        ([{**row, "image_id": row["image_id"] + 1} for row in ROWS], "others for the ids 10, 4, 5"),
    ],
)
def test_other_images_are_refused(rows, message):
    with pytest.raises(ValueError, match=message):
        compare_results(ROWS, rows)


def test_no_detections_compare_nothing():
    with pytest.raises(ValueError, match="got 0 images and 0"):
        compare_results([], [])


def test_a_file_is_read_or_refused_in_words(tmp_path):
    path = tmp_path / "detections.json"
    with pytest.raises(ValueError, match="no such file exists"):
        read_results(path)
    path.write_text(json.dumps(ROWS))
    assert read_results(path) == ROWS
    for content, message in (("{", "must be JSON"), ("{}", "must be a list of detections"), ("[1]", "must be a list")):
        path.write_text(content)
        with pytest.raises(ValueError, match=message):
            read_results(path)
