"""Sizes that programs are built for: which one an image goes to, and how it is put there."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

Size = tuple[int, int]
"""(height, width) in pixels."""


def round_up(size_hw: Size, divisor: int) -> Size:
    """Returns the size whose height and width are the next multiples of the divisor."""
    height, width = (-(-extent // divisor) * divisor for extent in size_hw)
    return height, width


def buckets_for(size: int, max_size: int, divisor: int) -> tuple[Size, ...]:
    """Returns the buckets, landscape and portrait, that hold what a resize makes.

    Args:
        size: shorter side in pixels after the resize.
        max_size: largest longer side in pixels after the resize.
        divisor: height and width are rounded up to multiples of it.
    """
    landscape = round_up((size, max_size), divisor)
    return tuple(dict.fromkeys((landscape, landscape[::-1])))


def check_buckets(buckets: Any, divisor: int) -> tuple[Size, ...]:
    """Reads buckets that a user gives, rounds them up and puts them in order of their area.

    Args:
        buckets: what stands in the user's words, which should be a list of pairs.
        divisor: heights and widths are rounded up to multiples of it.

    Raises:
        ValueError: if there is none, or one is no pair of positive whole numbers.
    """
    given = list(buckets) if _is_list(buckets) else [buckets]
    wrong = [bucket for bucket in given if not _is_size(bucket)]
    if not given or wrong:
        raise ValueError(
            f"buckets must be pairs of height and width in pixels, got {wrong or 'none'}; "
            "give for example buckets=[[800,1333],[1333,800]]"
        )
    rounded = {round_up((height, width), divisor) for height, width in given}
    return tuple(sorted(rounded, key=lambda bucket: (bucket[0] * bucket[1], bucket)))


def choose_bucket(size_hw: Size, buckets: Iterable[Size]) -> Size | None:
    """Returns the smallest bucket that holds an image, or None where none does."""
    height, width = size_hw
    fitting = [bucket for bucket in buckets if bucket[0] >= height and bucket[1] >= width]
    return min(fitting, key=lambda bucket: bucket[0] * bucket[1], default=None)


def pad_images(images: Sequence[Tensor], size_hw: Size, batch_size: int) -> tuple[Tensor, Tensor]:
    """Puts images into a batch, each in the upper left corner.

    Args:
        images: uint8 [3, H, W] each, none larger than the size and at most batch_size of them.
        size_hw: height and width of the batch.
        batch_size: B; rows without an image repeat the first one.

    Returns:
        The batch, uint8 [B, 3, *size_hw], zero in the padding; and the images' sizes, int64 [B, 2] (height, width).
    """
    batch = torch.zeros((batch_size, 3, *size_hw), dtype=torch.uint8)
    filled = [*images, *(images[0] for _ in range(batch_size - len(images)))]
    for row, image in enumerate(filled):
        batch[row, :, : image.shape[1], : image.shape[2]] = image
    return batch, torch.tensor([image.shape[-2:] for image in filled], dtype=torch.int64)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _is_size(value: Any) -> bool:
    return _is_list(value) and len(value) == 2 and all(isinstance(extent, int) and extent >= 1 for extent in value)
