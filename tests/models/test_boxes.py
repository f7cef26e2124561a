import pytest
import torch
import torchvision

from models.boxes import (
    box_iou,
    cxcywh_to_xyxy,
    generalized_box_iou,
    inverse_sigmoid,
    pairwise_box_iou,
    xyxy_to_cxcywh,
)


def random_boxes_xyxy(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    start, size = torch.rand(2, *shape, 2, generator=generator)
    return torch.cat((start, start + size + 0.01), dim=-1)


def test_formats_by_hand() -> None:
    assert cxcywh_to_xyxy(torch.tensor([0.5, 0.4, 0.2, 0.6])).tolist() == pytest.approx([0.4, 0.1, 0.6, 0.7])
    assert xyxy_to_cxcywh(torch.tensor([0.4, 0.1, 0.6, 0.7])).tolist() == pytest.approx([0.5, 0.4, 0.2, 0.6])


def test_formats_round_trip() -> None:
    boxes = random_boxes_xyxy(3, 7)
    torch.testing.assert_close(cxcywh_to_xyxy(xyxy_to_cxcywh(boxes)), boxes)


def test_iou_and_giou_by_hand() -> None:
    first, second = torch.tensor([0.0, 0.0, 2.0, 2.0]), torch.tensor([1.0, 1.0, 3.0, 2.0])
    assert box_iou(first, second).item() == pytest.approx(1 / 5)
    giou = generalized_box_iou(xyxy_to_cxcywh(first), xyxy_to_cxcywh(second))
    assert giou.item() == pytest.approx(1 / 5 - 1 / 6)


def test_giou_of_distant_boxes_is_negative() -> None:
    first, second = torch.tensor([0.0, 0.0, 1.0, 1.0]), torch.tensor([3.0, 0.0, 4.0, 1.0])
    assert box_iou(first, second).item() == 0
    assert generalized_box_iou(xyxy_to_cxcywh(first), xyxy_to_cxcywh(second)).item() == pytest.approx(-0.5)


def test_pairwise_is_elementwise_of_all_pairs() -> None:
    boxes, others = random_boxes_xyxy(2, 3, 5), random_boxes_xyxy(3, 4)
    result = pairwise_box_iou(boxes, others)
    assert result.shape == (2, 3, 5, 4)
    torch.testing.assert_close(result[1, 2, 3, 1], box_iou(boxes[1, 2, 3], others[2, 1]))


def test_giou_is_that_of_torchvision() -> None:
    boxes, others = random_boxes_xyxy(3, 5).double(), random_boxes_xyxy(3, 4).double()
    for some, more in zip(boxes, others, strict=True):
        expected = torchvision.ops.generalized_box_iou(some, more)
        actual = generalized_box_iou(xyxy_to_cxcywh(some).unsqueeze(1), xyxy_to_cxcywh(more))
        torch.testing.assert_close(actual, expected.float(), atol=1e-6, rtol=0)
        assert (expected < 0).any()
        assert (expected > 0).any()


def test_empty_boxes_give_finite_values_and_gradients() -> None:
    boxes = torch.full((2, 4), 0.5, requires_grad=True)
    giou = generalized_box_iou(boxes, boxes.detach())
    giou.sum().backward()
    assert giou.isfinite().all()
    assert boxes.grad is not None
    assert boxes.grad.isfinite().all()


def test_half_precision_inputs_are_computed_in_float32() -> None:
    boxes = (xyxy_to_cxcywh(random_boxes_xyxy(4)) * 1000).half()
    area = generalized_box_iou(boxes, boxes)
    assert area.dtype == torch.float32
    torch.testing.assert_close(area, torch.ones(4))


def test_inverse_sigmoid_inverts_and_is_bounded() -> None:
    logits = torch.linspace(-5, 5, 11)
    torch.testing.assert_close(inverse_sigmoid(logits.sigmoid(), 1e-5), logits, atol=1e-4, rtol=0)
    assert inverse_sigmoid(torch.tensor([-1.0, 2.0]), 1e-3).tolist() == pytest.approx([-6.9078, 6.9078], abs=1e-3)
