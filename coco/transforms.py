"""Augmentation of an image (uint8) and its boxes, on torchvision's `transforms.v2`; torch's generator decides."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional

from coco.dataset import Transform

LONGEST_BEFORE_CROP = 16384
"""Longer side in pixels up to which an image is enlarged before a crop, which spares memory where one is more than 27
times as long as it is wide. The published code has no such limit."""


def scale_shorter_side(height: int, width: int, size: int, max_size: int | None) -> tuple[int, int]:
    """Returns the (height, width) of which the shorter is `size`, or less where the longer would exceed `max_size`.

    The rule of the published DETR pipelines: the shorter side is rounded to nearest when the cap applies, the longer
    one always rounded down.
    """
    shorter, longer = min(height, width), max(height, width)
    target = size
    if max_size is not None and longer / shorter * size > max_size:
        target = round(max_size * shorter / longer)
        if target == 0:  # thinner than a pixel
            return (1, max_size) if height <= width else (max_size, 1)
    if target == shorter:
        return height, width
    return (target, int(target * width / height)) if height <= width else (int(target * height / width), target)


class ResizeShorterSide(v2.Transform):
    """Resizes by bilinear interpolation with antialiasing to a shorter side drawn from `sizes`.

    Args:
        sizes: Lengths in pixels to choose from.
        max_size: Largest length in pixels of the longer side, None for no limit.
    """

    def __init__(self, *, sizes: Sequence[int], max_size: int | None) -> None:
        super().__init__()
        self.sizes = tuple(sizes)
        self.max_size = max_size

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        """Draws the size for one image and its boxes."""
        height, width = v2.query_size(flat_inputs)
        size = self.sizes[int(torch.randint(len(self.sizes), ()))]
        return {"size": list(scale_shorter_side(height, width, size, self.max_size))}

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        """Resizes an image or boxes."""
        return self._call_kernel(
            functional.resize, inpt, params["size"], interpolation=v2.InterpolationMode.BILINEAR, antialias=True
        )


class RandomSizeCrop(nn.Module):
    """Crops a random part; boxes are clipped to it, and those left without area are dropped with their labels.

    Args:
        min_size: Smallest height and width in pixels (smaller images keep theirs).
        max_size: Largest height and width in pixels.
    """

    def __init__(self, *, min_size: int, max_size: int) -> None:
        super().__init__()
        self.min_size = min_size
        self.max_size = max_size

    def forward(self, image: tv_tensors.Image, target: dict[str, Tensor]) -> tuple[tv_tensors.Image, dict[str, Tensor]]:
        """Crops the image and its target."""
        height, width = image.shape[-2:]
        crop_height, crop_width = self._draw_extent(height), self._draw_extent(width)
        top = int(torch.randint(height - crop_height + 1, ()))
        left = int(torch.randint(width - crop_width + 1, ()))
        boxes = functional.crop(target["boxes"], top, left, crop_height, crop_width)
        boxes = functional.clamp_bounding_boxes(boxes)
        keep = (boxes[:, 2:] > boxes[:, :2]).all(dim=1)
        kept = {"boxes": tv_tensors.wrap(boxes[keep], like=boxes), "labels": target["labels"][keep]}
        return functional.crop(image, top, left, crop_height, crop_width), kept

    def _draw_extent(self, available: int) -> int:
        """Draws a height or a width."""
        return int(torch.randint(min(self.min_size, available), min(self.max_size, available) + 1, ()))


def published_augmentation(
    *, scales: Sequence[int], max_size: int, crop_scales: Sequence[int], crop_min_size: int, crop_max_size: int
) -> Transform:
    """The augmentation of DETR and Deformable-DETR (arXiv 2010.04159): flip, then resize or resize - crop - resize.

    Args:
        scales: Shorter sides in pixels of the result.
        max_size: Largest longer side in pixels of the result.
        crop_scales: Shorter sides in pixels before the crop.
        crop_min_size: Smallest height and width in pixels of the crop.
        crop_max_size: Largest height and width in pixels of the crop.
    """
    resize = ResizeShorterSide(sizes=scales, max_size=max_size)
    crop = v2.Compose(
        [
            ResizeShorterSide(sizes=crop_scales, max_size=LONGEST_BEFORE_CROP),
            RandomSizeCrop(min_size=crop_min_size, max_size=crop_max_size),
            resize,
        ]
    )
    return v2.Compose([v2.RandomHorizontalFlip(p=0.5), v2.RandomChoice([resize, crop])])


def light_augmentation(*, sizes: Sequence[int], max_size: int, flip_probability: float) -> Transform:
    """Flip and resize.

    Args:
        sizes: Shorter sides in pixels to choose from.
        max_size: Largest longer side in pixels.
        flip_probability: Probability of a horizontal flip, 0..1.
    """
    return v2.Compose([v2.RandomHorizontalFlip(p=flip_probability), ResizeShorterSide(sizes=sizes, max_size=max_size)])


def evaluation_transform(*, size: int, max_size: int) -> Transform:
    """Resize alone.

    Args:
        size: Shorter side in pixels.
        max_size: Largest longer side in pixels.
    """
    return ResizeShorterSide(sizes=(size,), max_size=max_size)
