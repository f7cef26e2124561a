"""Loss functions, summed over nothing: reductions belong to the criterion."""

import torch
from torch import Tensor
from torch.nn.functional import softplus

from models.boxes import generalized_box_iou


def sigmoid_focal_loss(logits: Tensor, targets: Tensor, alpha: float, gamma: float) -> Tensor:
    """Focal loss of independent classes.

    FL = -alpha_t (1 - p_t)^gamma log(p_t), p_t = p for targets of 1 and 1 - p for 0 (arXiv 1708.02002, eq. 5). With z
    the logit that speaks against the target, 1 - p_t = sigmoid(z) and -log(p_t) = softplus(z).

    Args:
        logits: float32, any shape.
        targets: float32 of the same shape, 0 or 1.
        alpha: weight of the positives, in 0..1; negatives weigh 1 - alpha.
        gamma: focusing exponent, at least 0.

    Returns:
        float32 of the same shape.
    """
    against = logits * torch.rsub(targets, 1, alpha=2)
    alpha_t = targets * (2 * alpha - 1) + (1 - alpha)
    return alpha_t * (against.sigmoid() ** gamma * softplus(against))


def box_l1_loss(boxes_cxcywh: Tensor, targets_cxcywh: Tensor) -> Tensor:
    """Sum of the absolute differences of corresponding boxes, float32 [..., 4] x [..., 4] -> [...]."""
    return (boxes_cxcywh - targets_cxcywh).abs().sum(-1)


def box_giou_loss(boxes_cxcywh: Tensor, targets_cxcywh: Tensor) -> Tensor:
    """1 - GIoU of corresponding boxes, float32 [..., 4] x [..., 4] -> [...], in 0..2 (arXiv 1902.09630)."""
    return 1 - generalized_box_iou(boxes_cxcywh, targets_cxcywh)


def focal_matching_cost(logits: Tensor, alpha: float, gamma: float) -> Tensor:
    """Focal loss of a class as a positive, less its loss as a negative: what matching a query to it would cost.

    Args:
        logits: float32, any shape.
        alpha: as in `sigmoid_focal_loss`.
        gamma: as in `sigmoid_focal_loss`.

    Returns:
        float32 of the same shape.
    """
    eps = 1e-8
    probability = logits.sigmoid()
    positive = alpha * (1 - probability) ** gamma * -torch.log(probability + eps)
    negative = (1 - alpha) * probability**gamma * -torch.log(1 - probability + eps)
    return positive - negative
