import pytest
import torch

from models.postprocess import postprocess
from models.structures import DetectorOutput


def make_output() -> DetectorOutput:
    logits = torch.full((2, 2, 3, 2), -5.0)
    logits[1, 0, 2, 1], logits[1, 0, 0, 0] = 3.0, 1.0
    logits[1, 1, 1, 0], logits[1, 1, 1, 1] = 2.0, 0.0
    boxes = torch.zeros(2, 2, 3, 4)
    boxes[1] = torch.tensor([[0.5, 0.5, 0.2, 0.4], [0.25, 0.5, 0.5, 1.0], [0.1, 0.2, 0.2, 0.2]])
    return DetectorOutput(logits, boxes, None)


def test_takes_the_best_pairs_of_the_last_layer_in_pixels() -> None:
    detections = postprocess(make_output(), torch.tensor([[100, 200], [50, 40]]), 2)
    torch.testing.assert_close(detections.scores, torch.tensor([[3.0, 1.0], [2.0, 0.0]]).sigmoid())
    assert detections.labels.tolist() == [[1, 0], [0, 1]]
    expected = [[[0.0, 10, 40, 30], [80, 30, 120, 70]], [[0, 0, 20, 50], [0, 0, 20, 50]]]
    torch.testing.assert_close(detections.boxes_xyxy, torch.tensor(expected), atol=1e-4, rtol=0)


def test_never_returns_more_than_all_pairs() -> None:
    assert postprocess(make_output(), torch.tensor([[100, 200], [50, 40]]), 100).scores.shape == (2, 6)


def test_topk_must_be_positive() -> None:
    with pytest.raises(ValueError, match="topk must be at least 1, got 0"):
        postprocess(make_output(), torch.tensor([[100, 200], [50, 40]]), 0)
