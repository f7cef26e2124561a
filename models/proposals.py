"""Proposals of a two-stage encoder: one box for every pixel of every level."""

import torch
from torch import Tensor

from models.position_encoding import FULL_TURN, sine_embedding
from models.structures import LevelGeometry

FINEST_SIZE = 0.05
VALID_RANGE = (0.01, 0.99)
TEMPERATURE = 10000.0


def pixel_proposals(levels: LevelGeometry) -> tuple[Tensor, Tensor]:
    """Places a box on every pixel, 0.05 * 2^level of the unpadded image in width and height (arXiv 2010.04159, A.4).

    Args:
        levels: padding, shapes and valid ratios of the levels.

    Returns:
        Logits of the boxes, float32 [B, S, 4] (cx, cy, w, h), infinite where invalid; and bool [B, S], True where the
        pixel is no padding and each of the four numbers lies inside (0.01, 0.99).
    """
    boxes = []
    for level, (height, width) in enumerate(levels.spatial_shapes):
        y = torch.arange(0.5, height, dtype=torch.float32, device=levels.valid_ratios.device)
        x = torch.arange(0.5, width, dtype=torch.float32, device=levels.valid_ratios.device)
        ratio_x, ratio_y = levels.valid_ratios[:, level, None].unbind(-1)
        columns = (x / (ratio_x * width).round()).unsqueeze(1).expand(-1, height, -1)
        rows = (y / (ratio_y * height).round()).unsqueeze(2).expand(-1, -1, width)
        centers = torch.stack((columns, rows), dim=-1).flatten(1, 2)
        boxes.append(torch.cat((centers, torch.full_like(centers, FINEST_SIZE * 2**level)), dim=-1))
    boxes_cxcywh = torch.cat(boxes, dim=1)
    low, high = VALID_RANGE
    valid = ((boxes_cxcywh > low) & (boxes_cxcywh < high)).all(-1) & ~levels.padding_mask
    logits = torch.log(boxes_cxcywh / (1 - boxes_cxcywh))
    return logits.masked_fill(~valid.unsqueeze(-1), torch.inf), valid


def embed_boxes(boxes_cxcywh: Tensor, channels: int) -> Tensor:
    """Encodes the four numbers of a box by sines.

    Args:
        boxes_cxcywh: float [..., 4], in 0..1.
        channels: channels of each number, even.

    Returns:
        float32 [..., 4 * channels].
    """
    return sine_embedding(boxes_cxcywh * FULL_TURN, channels, TEMPERATURE).flatten(-2)
