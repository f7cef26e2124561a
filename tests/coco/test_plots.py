"""The pictures of the last evaluation: which images are worst, and the curves behind the AP."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from coco.annotations import build_index
from coco.plots import EvaluationPlots, draw_precision_recall, precision_curves, weigh_mistakes

BOX = [10.0, 10.0, 20.0, 20.0]


def truth(*boxes):
    annotations = [
        {"id": number, "image_id": 1, "category_id": category, "bbox": bbox, "area": 400, "iscrowd": crowd}
        for number, (category, bbox, crowd) in enumerate(boxes, start=1)
    ]
    images = [{"id": 1, "file_name": "a.jpg", "height": 50, "width": 50}]
    return build_index(images, [{"id": 1, "name": "a"}, {"id": 2, "name": "b"}], annotations)


def found(*boxes):
    return [{"image_id": 1, "category_id": category, "bbox": bbox, "score": score} for category, bbox, score in boxes]


@pytest.mark.parametrize(
    ("boxes", "detections", "weight"),
    [
        ([(1, BOX, 0)], [(1, BOX, 0.9)], 0.0),
        ([(1, BOX, 0)], [], 1.0),
        ([(1, BOX, 0)], [(1, BOX, 0.2)], 1.0),
        ([(1, BOX, 0)], [(2, BOX, 0.9)], 1.9),
        ([(1, BOX, 0)], [(1, BOX, 0.9), (1, BOX, 0.5)], 0.5),
        ([(1, BOX, 0)], [(1, [22.0, 10.0, 20.0, 20.0], 0.6)], 1.6),
        ([(1, [0.0, 0.0, 50.0, 50.0], 1)], [(1, BOX, 0.9), (1, BOX, 0.8)], 0.0),
        ([], [(1, BOX, 0.7)], 0.7),
    ],
)
def test_mistakes_are_weighed(boxes, detections, weight):
    assert weigh_mistakes(truth(*boxes), found(*detections)) == {1: pytest.approx(weight)}


def test_precision_falls_where_a_wrong_detection_comes_first():
    index = truth((1, BOX, 0))
    np.testing.assert_allclose(precision_curves(index, found((1, BOX, 0.9))), np.ones((10, 101)))
    half = precision_curves(index, found((1, BOX, 0.5), (1, [40.0, 40.0, 5.0, 5.0], 0.9)))
    np.testing.assert_allclose(half, 0.5)
    assert np.isnan(precision_curves(truth(), found((1, BOX, 0.9)))).all()
    assert (precision_curves(index, []) == 0).all()


def test_a_finished_run_gets_its_pictures(data, tmp_path):
    data.limit_val = 2
    plots = EvaluationPlots(str(tmp_path))
    plots.on_train_end(SimpleNamespace(datamodule=data), SimpleNamespace())
    assert list(tmp_path.iterdir()) == [], "nothing was evaluated"
    category = data.categories[0].id
    result = {"image_id": 1, "category_id": category, "bbox": BOX, "score": 0.9}
    (tmp_path / "detections_val.json").write_text(json.dumps([result]))
    plots.on_train_end(SimpleNamespace(datamodule=data), SimpleNamespace())
    with Image.open(tmp_path / "plots" / "worst.jpg") as picture:
        assert picture.width > picture.height


def test_the_curves_become_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    index = truth((1, BOX, 0))
    draw_precision_recall(index, (), found((1, BOX, 0.9)), tmp_path / "curves.png")
    with Image.open(tmp_path / "curves.png") as picture:
        assert picture.size == (720, 480)
