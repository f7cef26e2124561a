"""Reading COCO annotation files: any category ids, the known defects repaired or refused."""

import contextlib
import io
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pycocotools.coco import COCO

REQUIRED_KEYS = {
    "images": ("id", "file_name", "height", "width"),
    "annotations": ("id", "image_id", "category_id", "bbox"),
    "categories": ("id", "name"),
}

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Category:
    """A category as the annotation file knows it; its place in a sorted tuple is its contiguous label."""

    id: int
    name: str


def read_categories(json_path: Path) -> tuple[Category, ...]:
    """Reads the categories of an annotation file, in order of their ids: category i has the contiguous label i.

    Raises:
        ValueError: The file is absent, no COCO annotation file, or has ids that are no integers.
    """
    return _parse_categories(_read_json(json_path), json_path)


def read_annotations(json_path: Path, limit: int | None) -> COCO:
    """Reads an annotation file for detection.

    Annotations are numbered anew from 1 (COCOeval takes a match with annotation 0 as no match). A missing `iscrowd`
    becomes 0, a missing `area` the area of the box. Boxes without width or height inside the image are dropped, and
    their number logged. Segmentations are dropped too: detection needs none, and COCO's fill gigabytes.

    Args:
        json_path: The annotation file.
        limit: Keep only the first so many images in order of their ids; None keeps all.

    Returns:
        The index of pycocotools over the repaired annotations.

    Raises:
        ValueError: The limit is below 1, the file is absent or no COCO annotation file, an id is no integer, an image
            has no size, or an annotation refers to a category or an image that the file does not list.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1 image, got {limit}; use null for all images")
    content = _read_json(json_path)
    categories = _parse_categories(content, json_path)
    images = sorted(content["images"], key=lambda image: _require_integer(image["id"], "image id", json_path))
    for image in images:
        if not (isinstance(image["height"], int) and isinstance(image["width"], int)):
            raise ValueError(
                f"image height and width must be integers, got {image['height']} and {image['width']} for image "
                f"{image['id']} of {json_path}; write every image's size into the file"
            )
    sizes_hw = {image["id"]: (image["height"], image["width"]) for image in images}
    kept_images = images if limit is None else images[:limit]
    kept_ids = {image["id"] for image in kept_images}
    category_ids = {category.id for category in categories}

    annotations: list[dict[str, Any]] = []
    num_degenerate = 0
    for source in content["annotations"]:
        _check_references(source, category_ids, sizes_hw, json_path)
        if source["image_id"] not in kept_ids:
            continue
        if _is_degenerate(source["bbox"], sizes_hw[source["image_id"]]):
            num_degenerate += 1
            continue
        annotations.append(_repair(source, annotation_id=len(annotations) + 1))
    if num_degenerate:
        logger.warning("%s: dropped %d boxes without width or height inside their image", json_path, num_degenerate)
    return build_index(
        kept_images,
        [{"id": category.id, "name": category.name} for category in categories],
        annotations,
    )


def build_index(
    images: Sequence[dict[str, Any]], categories: Sequence[dict[str, Any]], annotations: Sequence[dict[str, Any]]
) -> COCO:
    """Builds the index of pycocotools over lists in COCO's format, without its printing."""
    index = COCO()
    index.dataset = {"images": list(images), "categories": list(categories), "annotations": list(annotations)}
    with contextlib.redirect_stdout(io.StringIO()):
        index.createIndex()
    return index


def _read_json(json_path: Path) -> dict[str, Any]:
    """Reads the file and checks that it has COCO's three lists, and their entries what detection needs."""
    if not json_path.is_file():
        raise ValueError(f"annotation file must exist, got {json_path}; check the path")
    try:
        content = json.loads(json_path.read_bytes())
    except ValueError as error:
        raise ValueError(
            f"annotation file must be JSON, got {json_path} ({error}); write or download it again"
        ) from error
    missing = [kind for kind in REQUIRED_KEYS if kind not in content]
    if missing:
        raise ValueError(
            f"annotation file must hold images, annotations and categories, got {json_path} without "
            f"{', '.join(missing)}; convert it to COCO's instances format"
        )
    for kind, keys in REQUIRED_KEYS.items():
        for place, entry in enumerate(content[kind]):
            absent = [key for key in keys if key not in entry]
            if absent:
                raise ValueError(
                    f"every entry of {kind} must have {', '.join(keys)}, got no {', '.join(absent)} in entry "
                    f"{place} of {json_path}; complete the file"
                )
    return content


def _parse_categories(content: dict[str, Any], json_path: Path) -> tuple[Category, ...]:
    """Returns the categories in order of their ids."""
    categories = [
        Category(_require_integer(entry["id"], "category id", json_path), entry["name"])
        for entry in content["categories"]
    ]
    ids = [category.id for category in categories]
    if len(set(ids)) != len(ids) or not ids:
        raise ValueError(f"category ids must be distinct and at least one, got {ids} in {json_path}; renumber them")
    return tuple(sorted(categories, key=lambda category: category.id))


def _require_integer(value: object, name: str, json_path: Path) -> int:
    """Returns the value if it is an integer (COCOeval counts with ids)."""
    if not isinstance(value, int):
        raise ValueError(f"{name} must be an integer, got {value!r} in {json_path}; number the entries with integers")
    return value


def _check_references(
    annotation: dict[str, Any], category_ids: set[int], sizes_hw: dict[int, tuple[int, int]], json_path: Path
) -> None:
    """Checks an annotation's id and that its category and image exist."""
    annotation_id = _require_integer(annotation["id"], "annotation id", json_path)
    for key, known in (("category_id", category_ids), ("image_id", sizes_hw.keys())):
        if annotation[key] not in known:
            raise ValueError(
                f"{key} must be one that the file lists, got {annotation[key]!r} in annotation {annotation_id} of "
                f"{json_path}; add the entry or remove the annotation"
            )


def _is_degenerate(bbox_xywh: Sequence[float], size_hw: tuple[int, int]) -> bool:
    """Whether nothing is left of the box after clipping to the image."""
    x, y, width, height = bbox_xywh
    image_height, image_width = size_hw
    return min(x + width, image_width) <= max(x, 0) or min(y + height, image_height) <= max(y, 0)


def _repair(source: dict[str, Any], annotation_id: int) -> dict[str, Any]:
    """Returns what detection needs of an annotation, missing values filled in."""
    _, _, width, height = source["bbox"]
    return {
        "id": annotation_id,
        "image_id": source["image_id"],
        "category_id": source["category_id"],
        "bbox": source["bbox"],
        "area": source.get("area", width * height),
        "iscrowd": source.get("iscrowd", 0),
    }
