import json
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler

from coco.annotations import read_annotations, read_categories
from coco.evaluator import METRIC_NAMES, CocoEvaluator


@dataclass(frozen=True)
class FakeDetections:
    scores: torch.Tensor
    labels: torch.Tensor
    boxes_xyxy: torch.Tensor


def detect(rows):
    """Turns rows (score, label, x1, y1, x2, y2) of one image into a batch of one."""
    table = torch.tensor(rows, dtype=torch.float32).reshape(1, -1, 6)
    return FakeDetections(table[..., 0], table[..., 1].long(), table[..., 2:])


@pytest.fixture
def evaluator(write_json, content):
    path = write_json(content)
    return CocoEvaluator(annotations=read_annotations(path, None), categories=read_categories(path))


CAT = (0.9, 2, 10, 5, 30, 15)
ANT = (0.8, 0, 50, 30, 70, 50)
BEE = (0.7, 1, -6, 2, 20, 12)
ON_CROWD = (0.95, 1, 5, 5, 25, 25)
NUM_IMAGES = (5, 6, 7, 23)
NOWHERE = (0.95, 1, 40, 2, 58, 20)


def test_perfect_detections_score_one_whatever_the_ids(evaluator):
    evaluator.update([7], detect([CAT, ANT]))
    evaluator.update([30], detect([BEE]))
    result = evaluator.evaluate()
    assert tuple(result.metrics) == METRIC_NAMES
    assert result.metrics["AP"] == pytest.approx(1)
    assert result.metrics["AR100"] == pytest.approx(1)
    assert np.isnan(result.metrics["APm"])
    assert [(c.category.name, c.ap, c.ap50, c.num_boxes) for c in result.categories] == [
        ("ant", pytest.approx(1), pytest.approx(1), 1),
        ("bee", pytest.approx(1), pytest.approx(1), 1),
        ("cat", pytest.approx(1), pytest.approx(1), 1),
    ]
    assert {entry["category_id"] for entry in evaluator.coco_results()} == {0, 4, 9}
    assert evaluator.coco_results()[0]["bbox"] == [10, 5, 20, 10]


def test_a_detection_on_a_crowd_is_ignored_and_one_on_nothing_counts(evaluator, write_json, content):
    evaluator.update([7], detect([CAT, ANT, ON_CROWD]))
    evaluator.update([30], detect([BEE]))
    assert evaluator.evaluate().metrics["AP"] == pytest.approx(1)

    path = write_json(content)
    control = CocoEvaluator(annotations=read_annotations(path, None), categories=read_categories(path))
    control.update([7], detect([CAT, ANT, NOWHERE]))
    control.update([30], detect([BEE]))
    assert control.evaluate().categories[1].ap == pytest.approx(0.5)


def test_a_shifted_box_lowers_ap75_but_not_ap50(evaluator):
    evaluator.update([7], detect([(0.9, 2, 13, 5, 33, 15)]))
    cat = evaluator.evaluate().categories[2]
    assert cat.ap50 == pytest.approx(1)
    assert cat.ap == pytest.approx(0.5)  # IoU 17/23 = 0.739 passes 5 of the 10 thresholds


def test_only_images_seen_are_evaluated(evaluator):
    evaluator.update([30], detect([BEE]))
    result = evaluator.evaluate()
    assert result.num_images == 1
    assert result.metrics["AP"] == pytest.approx(1)
    assert np.isnan(result.categories[0].ap)


def test_no_detections_score_zero(evaluator):
    evaluator.update([7], detect([]))
    assert evaluator.evaluate().metrics["AP"] == 0


def test_a_repeated_image_counts_once(evaluator):
    evaluator.update([7], detect([CAT]))
    expected = evaluator.coco_results()
    evaluator.update([7], detect([CAT]))
    assert evaluator.coco_results() == expected
    evaluator.gather(lambda own: [own, own])
    assert evaluator.coco_results() == expected


@pytest.mark.parametrize("column", [0, 3])
def test_detections_that_are_not_finite_are_refused(evaluator, column):
    row = list(CAT)
    row[column] = float("nan")
    with pytest.raises(ValueError, match="must be finite, got nan or inf in image 7"):
        evaluator.update([7], detect([row]))


def detect_roughly(annotations, labels, image_id):
    """Boxes of the image shifted at random, and two wrong ones; the same in every process."""
    generator = torch.Generator().manual_seed(image_id)
    rows = []
    for annotation in annotations.imgToAnns[image_id]:
        x, y, width, height = annotation["bbox"]
        dx, dy, score = (torch.rand(3, generator=generator) - torch.tensor([0.5, 0.5, 0])).tolist()
        corner = (x + 0.4 * dx * width, y + 0.4 * dy * height)
        rows.append((score, labels[annotation["category_id"]], *corner, corner[0] + width, corner[1] + height))
    for score, x, y in torch.rand((2, 3), generator=generator).tolist():
        rows.append((score, 0, 30 * x, 30 * y, 30 * x + 20, 30 * y + 20))
    return detect(rows)


def evaluate_split(json_path, num_images, num_processes, rank, all_gather_object):
    """Evaluates what a distributed sampler gives to one process."""
    annotations, categories = read_annotations(json_path, num_images), read_categories(json_path)
    labels = {category.id: label for label, category in enumerate(categories)}
    evaluator = CocoEvaluator(annotations=annotations, categories=categories)
    image_ids = sorted(annotations.imgs)
    for index in DistributedSampler(image_ids, num_replicas=num_processes, rank=rank, shuffle=False):
        evaluator.update([image_ids[index]], detect_roughly(annotations, labels, image_ids[index]))
    evaluator.gather(all_gather_object)
    result = evaluator.evaluate()
    assert result.num_images == num_images
    return result.metrics


def gather_with_gloo(num_processes, own):
    gathered = [None] * num_processes
    dist.all_gather_object(gathered, own)
    return gathered


def run_process(rank, num_processes, json_path, folder):
    gather = partial(gather_with_gloo, num_processes)
    metrics = [evaluate_split(json_path, count, num_processes, rank, gather) for count in NUM_IMAGES]
    (folder / f"{rank}.json").write_text(json.dumps(metrics))


@pytest.mark.parametrize("num_processes", [2, 3])
def test_processes_agree_with_one(run_group, synthetic_folder, tmp_path, num_processes):
    json_path = synthetic_folder / "annotations" / "instances_train.json"
    expected = [evaluate_split(json_path, count, 1, 0, lambda own: [own]) for count in NUM_IMAGES]
    assert 0.05 < expected[0]["AP"] < 0.95
    run_group(num_processes, run_process, num_processes, json_path, tmp_path)
    for rank in range(num_processes):
        np.testing.assert_equal(json.loads((tmp_path / f"{rank}.json").read_text()), expected)


def test_without_the_exchange_processes_disagree(synthetic_folder):
    json_path = synthetic_folder / "annotations" / "instances_val.json"
    with pytest.raises(AssertionError):
        evaluate_split(json_path, 7, 2, 0, lambda own: [own])
