"""A share of a data set that is the same on every machine, larger shares holding the smaller ones."""

import hashlib
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from coco.annotations import AnnotationTable
from coco.errors import DataError
from coco.file_names import FileNames


def is_in_fraction(image_ids: NDArray[np.int64], fraction: float) -> NDArray[np.bool_]:
    """Returns, bool [images], which images belong to a share: those whose hashed id is below it.

    The hash is that of the id's decimal digits (BLAKE2b, 64 bits, as a number from 0 to 1), so that the choice depends
    on neither the order nor the number of the images, and 1 % of a data set is part of its 10 %. The share is met on
    average: 1 % of 118287 images are 1183, give or take 34.

    Args:
        image_ids: int64 [images].
        fraction: Share, above 0 and at most 1.

    Raises:
        DataError: The share is not above 0 and at most 1.
    """
    if not 0 < fraction <= 1:
        raise DataError(f"fraction must be above 0 and at most 1, got {fraction}; use 1.0 for all images")
    digests = (hashlib.blake2b(str(image_id).encode(), digest_size=8).digest() for image_id in image_ids.tolist())
    hashes = np.fromiter((int.from_bytes(digest, "big") / 2**64 for digest in digests), np.float64, len(image_ids))
    return np.asarray(hashes < fraction) if fraction < 1 else np.ones(len(image_ids), dtype=np.bool_)


def take_fraction(table: AnnotationTable, fraction: float) -> AnnotationTable:
    """Returns the annotations of the images in a share.

    Args:
        table: All annotations.
        fraction: As in `is_in_fraction`.

    Returns:
        A table of the same categories; it may be without images.
    """
    if fraction == 1:
        return table
    is_kept = is_in_fraction(table.image_ids, fraction)
    counts = np.diff(table.first_box)
    is_box_kept = np.repeat(is_kept, counts)
    return replace(
        table,
        image_ids=table.image_ids[is_kept],
        sizes_hw=table.sizes_hw[is_kept],
        file_names=FileNames(table.file_names[int(place)] for place in np.flatnonzero(is_kept)),
        first_box=np.concatenate([[0], counts[is_kept].cumsum()]),
        boxes_xywh=table.boxes_xywh[is_box_kept],
        areas=table.areas[is_box_kept],
        labels=table.labels[is_box_kept],
        is_crowd=table.is_crowd[is_box_kept],
    )
