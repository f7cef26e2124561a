import math

import pytest
import torch

from models.losses import box_giou_loss, box_l1_loss, focal_matching_cost, sigmoid_focal_loss


def test_focal_loss_by_hand() -> None:
    logits, targets = torch.tensor([0.0, math.log(3)]), torch.tensor([1.0, 0.0])
    loss = sigmoid_focal_loss(logits, targets, alpha=0.25, gamma=2.0)
    expected = [0.25 * 0.25 * math.log(2), 0.75 * 0.75**2 * math.log(4)]
    assert loss.tolist() == pytest.approx(expected)


def test_focal_loss_without_focus_is_weighted_cross_entropy() -> None:
    logits, targets = torch.randn(7), torch.randint(2, (7,)).float()
    loss = sigmoid_focal_loss(logits, targets, alpha=0.5, gamma=0.0)
    expected = torch.nn.functional.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    torch.testing.assert_close(loss, 0.5 * expected)


def test_focal_loss_of_extreme_logits_is_finite() -> None:
    logits = torch.tensor([-200.0, 200.0], requires_grad=True)
    loss = sigmoid_focal_loss(logits, torch.tensor([1.0, 0.0]), alpha=0.25, gamma=2.0)
    loss.sum().backward()
    assert loss.tolist() == pytest.approx([50.0, 150.0])
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


def test_matching_cost_is_the_gain_of_turning_positive() -> None:
    logits = torch.linspace(-3, 3, 5)
    positive = sigmoid_focal_loss(logits, torch.ones(5), 0.25, 2.0)
    negative = sigmoid_focal_loss(logits, torch.zeros(5), 0.25, 2.0)
    torch.testing.assert_close(focal_matching_cost(logits, 0.25, 2.0), positive - negative, atol=1e-5, rtol=1e-5)


def test_box_losses_by_hand() -> None:
    boxes, targets = torch.tensor([[0.5, 0.5, 0.4, 0.2]]), torch.tensor([[0.5, 0.5, 0.2, 0.2]])
    assert box_l1_loss(boxes, targets).tolist() == pytest.approx([0.2])
    assert box_giou_loss(boxes, targets).tolist() == pytest.approx([0.5])
