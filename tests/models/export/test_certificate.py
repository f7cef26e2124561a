"""What a certificate sees."""

import pytest
import torch

from models.export.certificate import Tolerance, compare_detections, contrasting_inputs, measure

TOLERANCE = Tolerance(score=1e-3, box_px=0.1, min_score=0.0)
CPU = torch.device("cpu")


@pytest.fixture
def detections():
    scores = torch.tensor([[0.9, 0.8, 0.7, 0.2]])
    labels = torch.tensor([[1, 0, 1, 2]])
    boxes_xyxy = torch.tensor([[[0.0, 0, 10, 10], [5, 5, 9, 9], [20, 0, 30, 10], [1, 1, 2, 2]]])
    return scores, labels, boxes_xyxy


def test_equal_detections_are_equal(detections):
    found = compare_detections(detections, tuple(tensor.clone() for tensor in detections))
    assert (found.score, found.box_px, found.unpaired, found.bitwise_equal) == (0, 0, 0, True)


def test_another_order_is_no_difference(detections):
    order = torch.tensor([2, 0, 1, 3])
    found = compare_detections(detections, tuple(tensor[:, order] for tensor in detections))
    assert found.within(TOLERANCE)
    assert not found.bitwise_equal


@pytest.mark.parametrize(
    ("index", "place", "change"),
    [(0, (0, 1), 0.01), (1, (0, 1), 1), (2, (0, 0, 2), 0.5), (2, (0, 2, 1), float("nan"))],
    ids=["score", "label", "box", "nan"],
)
def test_a_change_is_seen(detections, index, place, change):
    changed = tuple(tensor.clone() for tensor in detections)
    changed[index][place] += change
    assert not compare_detections(detections, changed).within(TOLERANCE)


def test_the_last_place_may_go_to_another(detections):
    changed = tuple(tensor.clone() for tensor in detections)
    changed[0][0, 3], changed[1][0, 3], changed[2][0, 3] = 0.2004, 0, torch.tensor([50.0, 50, 60, 60])
    assert compare_detections(detections, changed).within(TOLERANCE)


def test_below_the_lowest_score_no_partner_is_needed(detections):
    changed = tuple(tensor.clone() for tensor in detections)
    changed[1][0, 2], changed[2][0, 2] = 2, torch.tensor([50.0, 50, 60, 60])
    assert compare_detections(detections, changed).unpaired == 1
    found = compare_detections(detections, changed, min_score=0.75)
    assert (found.unpaired, found.compared, found.within(TOLERANCE)) == (0, 2, True)
    changed[0][0, 3] = 0.3
    assert not compare_detections(detections, changed, min_score=0.75).within(TOLERANCE), "scores count by rank"


def test_other_shapes_are_refused(detections):
    with pytest.raises(ValueError, match="must have the shapes of the eager ones"):
        compare_detections(detections, tuple(tensor[:, :2] for tensor in detections))


def test_inputs_contrast():
    (noise, full, _), (slopes, inner, originals) = contrasting_inputs((64, 96), 2)
    assert noise.shape == slopes.shape == (2, 3, 64, 96)
    assert (full.tolist(), inner.tolist()) == ([[64, 96]] * 2, [[51, 76]] * 2)
    assert originals.tolist() == [[58, 79]] * 2
    assert slopes[:, :, 51:].sum() == 0 < slopes[:, :, :51].sum()


def test_a_program_that_ignores_its_input_is_seen(any_model, as_module):
    module = as_module(any_model)
    honest = measure(module, module, (64, 128), 1, CPU, 0.0)
    assert honest.difference.bitwise_equal
    assert honest.depends_on_input
    frozen = module(*contrasting_inputs((64, 128), 1)[0])
    stuck = measure(lambda *inputs: frozen, module, (64, 128), 1, CPU, 0.0)
    assert not stuck.depends_on_input
    assert not stuck.difference.within(TOLERANCE)
