"""Samples of different sizes, padded into one batch."""

from collections.abc import Sequence
from typing import TypedDict

import torch
from torch import Tensor

from coco.dataset import Sample


class Batch(TypedDict):
    """What a training or validation step receives.

    Attributes:
        images: uint8 [B, 3, H, W], RGB, padded with 0 at the bottom and the right.
        padding_mask: bool [B, H, W], True = padding.
        labels: int64 [sum of T], contiguous class indices, image after image.
        boxes_cxcywh: float32 [sum of T, 4], normalised by each image's own unpadded size.
        num_targets: T of each image.
        sizes_hw: (height, width) of each image, unpadded, after augmentation.
        original_sizes_hw: int64 [B, 2], (height, width) of each image in pixels before augmentation.
        image_ids: The annotation file's ids.
    """

    images: Tensor
    padding_mask: Tensor
    labels: Tensor
    boxes_cxcywh: Tensor
    num_targets: tuple[int, ...]
    sizes_hw: tuple[tuple[int, int], ...]
    original_sizes_hw: Tensor
    image_ids: tuple[int, ...]


def collate(samples: Sequence[Sample], size_divisor: int) -> Batch:
    """Pads images to their common height and width.

    Args:
        samples: At least one.
        size_divisor: Height and width of the batch are rounded up to multiples of it; 1 pads no more than needed.

    Returns:
        The batch, on the CPU.
    """
    sizes_hw = tuple((sample.image.shape[1], sample.image.shape[2]) for sample in samples)
    height, width = (-(-max(extent) // size_divisor) * size_divisor for extent in zip(*sizes_hw, strict=True))
    images = torch.zeros((len(samples), 3, height, width), dtype=torch.uint8)
    padding_mask = torch.ones((len(samples), height, width), dtype=torch.bool)
    for row, (sample, (image_height, image_width)) in enumerate(zip(samples, sizes_hw, strict=True)):
        images[row, :, :image_height, :image_width] = sample.image
        padding_mask[row, :image_height, :image_width] = False
    return {
        "images": images,
        "padding_mask": padding_mask,
        "labels": torch.cat([sample.labels for sample in samples]),
        "boxes_cxcywh": torch.cat([sample.boxes_cxcywh for sample in samples]),
        "num_targets": tuple(len(sample.labels) for sample in samples),
        "sizes_hw": sizes_hw,
        "original_sizes_hw": torch.tensor([sample.original_size_hw for sample in samples], dtype=torch.int64),
        "image_ids": tuple(sample.image_id for sample in samples),
    }
