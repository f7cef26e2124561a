"""Box formats, IoU and generalised IoU; box arithmetic is float32 whatever the caller's precision."""

import torch
from torch import Tensor

# Below the area of a hundredth of a pixel in a 1333-pixel image: keeps 0/0 out without touching real boxes.
MIN_AREA = 1e-9


def cxcywh_to_xyxy(boxes_cxcywh: Tensor) -> Tensor:
    """Converts centre and size to two corners.

    Args:
        boxes_cxcywh: float [..., 4].

    Returns:
        float32 [..., 4], (x0, y0, x1, y1).
    """
    center, size = boxes_cxcywh.float().split(2, dim=-1)
    return torch.cat((center - 0.5 * size, center + 0.5 * size), dim=-1)


def xyxy_to_cxcywh(boxes_xyxy: Tensor) -> Tensor:
    """Converts two corners to centre and size.

    Args:
        boxes_xyxy: float [..., 4].

    Returns:
        float32 [..., 4], (cx, cy, w, h).
    """
    first, second = boxes_xyxy.float().split(2, dim=-1)
    return torch.cat(((first + second) / 2, second - first), dim=-1)


def box_iou(boxes_xyxy: Tensor, others_xyxy: Tensor) -> Tensor:
    """Intersection over union of corresponding boxes; the leading dimensions broadcast.

    Args:
        boxes_xyxy: float [..., 4].
        others_xyxy: float [..., 4].

    Returns:
        float32 [...], in 0..1; 0 where both boxes are empty.
    """
    intersection, union = _intersection_and_union(boxes_xyxy.float(), others_xyxy.float())
    return intersection / union


def generalized_box_iou(boxes_cxcywh: Tensor, others_cxcywh: Tensor) -> Tensor:
    """Generalised IoU of corresponding boxes; the leading dimensions broadcast.

    giou = iou - (area(hull) - union) / area(hull), hull = the smallest box around both (arXiv 1902.09630, algorithm 1).

    Args:
        boxes_cxcywh: float [..., 4].
        others_cxcywh: float [..., 4].

    Returns:
        float32 [...], in -1..1.

    Notes:
        On each axis the overlap is min(s, s', (s + s') / 2 - |c - c'|) for centres c and sizes s, and the hull measures
        s + s' - overlap, where a gap between the boxes is a negative overlap: half the kernels of corners. Boxes with
        negative size are not checked, since a check would synchronise with the device.
    """
    center, size = boxes_cxcywh.float().split(2, dim=-1)
    other_center, other_size = others_cxcywh.float().split(2, dim=-1)
    total = size + other_size
    overlap = torch.minimum(total / 2 - (center - other_center).abs(), torch.minimum(size, other_size))
    intersection = _area(overlap.clamp(min=0))
    union = (_area(size) + _area(other_size) - intersection).clamp(min=MIN_AREA)
    hull = _area(total - overlap).clamp(min=MIN_AREA)
    return intersection / union - (hull - union) / hull


def pairwise_box_iou(boxes_xyxy: Tensor, others_xyxy: Tensor) -> Tensor:
    """IoU of every box with every other box, [..., Q, 4] x [..., T, 4] -> float32 [..., Q, T]."""
    return box_iou(boxes_xyxy.unsqueeze(-2), others_xyxy.unsqueeze(-3))


def inverse_sigmoid(probability: Tensor, eps: float) -> Tensor:
    """Logit of a probability, with both sides of the fraction kept above eps.

    Args:
        probability: float, any shape; clamped to 0..1.
        eps: lower bound of p and of 1 - p.

    Returns:
        float32, log(max(p, eps) / max(1 - p, eps)).
    """
    probability = probability.float().clamp(min=0, max=1)
    return torch.log(probability.clamp(min=eps) / (1 - probability).clamp(min=eps))


def _intersection_and_union(boxes_xyxy: Tensor, others_xyxy: Tensor) -> tuple[Tensor, Tensor]:
    start = torch.maximum(boxes_xyxy[..., :2], others_xyxy[..., :2])
    end = torch.minimum(boxes_xyxy[..., 2:], others_xyxy[..., 2:])
    intersection = _area((end - start).clamp(min=0))
    areas = _area(boxes_xyxy[..., 2:] - boxes_xyxy[..., :2]) + _area(others_xyxy[..., 2:] - others_xyxy[..., :2])
    return intersection, (areas - intersection).clamp(min=MIN_AREA)


def _area(sizes: Tensor) -> Tensor:
    width, height = sizes.unbind(-1)
    return width * height
