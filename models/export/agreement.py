"""How far two files of detections are from each other: an artefact's and the checkpoint's, on the same real images."""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from models.export.certificate import Difference, compare_detections, largest
from models.export.inference import Outputs

Row = Mapping[str, Any]
"""A detection in COCO's results format: image_id, category_id, bbox (x, y, width, height) in pixels, score."""

_KEYS = {"image_id", "category_id", "bbox", "score"}


def read_results(path: Path) -> list[Row]:
    """Reads detections in COCO's results format.

    Raises:
        ValueError: if the file is absent, or holds anything else.
    """
    if not path.is_file():
        raise ValueError(f"results must be a file of detections, got {str(path)!r}; no such file exists")
    try:
        rows = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"results must be JSON, got {str(path)!r} ({error}); write them again") from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) and row.keys() >= _KEYS for row in rows):
        raise ValueError(
            f"results must be a list of detections with {', '.join(sorted(_KEYS))}, got something else in "
            f"{str(path)!r}; give a detections.json"
        )
    return rows


def compare_results(expected: Sequence[Row], actual: Sequence[Row], min_score: float = 0.0) -> Difference:
    """Compares the detections of each image, see `models.export.certificate.compare_detections`.

    Args:
        expected: detections of the detector that is compared with.
        actual: others of the same images, as many of each.
        min_score: detections that score less on both sides need no partner.

    Returns:
        The largest differences of all images.

    Raises:
        ValueError: if there is no detection, or the images or the numbers of their detections differ.
    """
    theirs, ours = _by_image(expected), _by_image(actual)
    counts = [{image_id: len(rows) for image_id, rows in side.items()} for side in (theirs, ours)]
    if not theirs or counts[0] != counts[1]:
        differing = sorted(str(image_id) for image_id, _ in counts[0].items() ^ counts[1].items())
        raise ValueError(
            f"results must hold as many detections of the same images, got {len(theirs)} images and {len(ours)}, "
            f"others for the ids {', '.join(dict.fromkeys(differing[:3])) or 'none'}; detect in the same images"
        )
    return largest([compare_detections(_pack(theirs[each]), _pack(ours[each]), min_score) for each in theirs])


def describe_difference(found: Difference) -> str:
    """Returns a difference as one line."""
    words = "bitwise equal" if found.bitwise_equal else f"scores {found.score:.1e}, boxes {found.box_px:.1e} px"
    return f"largest differences: {words}; {found.compared} detections compared, at most {found.unpaired} unpaired"


def _by_image(rows: Sequence[Row]) -> dict[int, list[Row]]:
    found: dict[int, list[Row]] = defaultdict(list)
    for row in rows:
        found[row["image_id"]].append(row)
    return found


def _pack(rows: Sequence[Row]) -> Outputs:
    """Returns the detections of an image as a batch of one; float64, as JSON has them."""
    boxes_xywh = torch.tensor([[row["bbox"] for row in rows]], dtype=torch.float64)
    boxes_xyxy = torch.cat((boxes_xywh[..., :2], boxes_xywh[..., :2] + boxes_xywh[..., 2:]), dim=-1)
    scores = torch.tensor([[row["score"] for row in rows]], dtype=torch.float64)
    return scores, torch.tensor([[row["category_id"] for row in rows]]), boxes_xyxy
