"""From a detector's output to scored boxes in pixels."""

import torch
from torch import Tensor

from models.boxes import cxcywh_to_xyxy
from models.structures import Detections, DetectorOutput


@torch.no_grad()
def postprocess(output: DetectorOutput, original_sizes_hw: Tensor, topk: int) -> Detections:
    """Takes the best pairs of query and class of the last layer.

    Args:
        output: predictions of the decoder layers.
        original_sizes_hw: int64 [B, 2], sizes of the original images in pixels.
        topk: detections of an image, at least 1; fewer where the model has fewer pairs of query and class.

    Returns:
        min(topk, Q * num_classes) detections an image, best first. A query may appear with several classes.

    Raises:
        ValueError: if topk is below 1.
    """
    if topk < 1:
        raise ValueError(f"topk must be at least 1, got {topk}; give the number of detections of an image")
    probabilities = output.logits[-1].sigmoid()
    num_classes = probabilities.shape[-1]
    flat = probabilities.flatten(1)
    scores, pairs = flat.topk(min(topk, flat.shape[1]), dim=1)
    queries = pairs // num_classes
    boxes_xyxy = cxcywh_to_xyxy(output.boxes_cxcywh[-1]).gather(1, queries.unsqueeze(-1).expand(-1, -1, 4))
    sizes_xyxy = original_sizes_hw.flip(1).repeat(1, 2).unsqueeze(1)
    return Detections(scores, pairs % num_classes, boxes_xyxy * sizes_xyxy)
