"""Reading COCO annotation files: any category ids, the known defects repaired or refused."""

import contextlib
import gc
import io
import itertools
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pycocotools.coco import COCO

from coco.entries import (
    REQUIRED_KEYS,
    describe_lack,
    has_size,
    is_area,
    is_box,
    is_crowd_flag,
    is_file_name,
    is_id,
    is_known,
    is_name,
)
from coco.errors import DataError
from coco.file_names import FileNames

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Category:
    """A category as the annotation file knows it; its place in a sorted tuple is its contiguous label."""

    id: int
    name: str


@dataclass(frozen=True)
class AnnotationTable:
    """The images and boxes of an annotation file in flat arrays, boxes in order of their images.

    Attributes:
        categories: In order of their ids: category i has the contiguous label i.
        image_ids: int64 [images], ascending.
        sizes_hw: int64 [images, 2], height and width in pixels.
        file_names: The images' files.
        first_box: int64 [images + 1]; image i has the boxes first_box[i] to first_box[i + 1].
        boxes_xywh: float64 [boxes, 4], left, top, width and height in pixels, as the file has them.
        areas: float64 [boxes], in square pixels.
        labels: int64 [boxes], contiguous.
        is_crowd: bool [boxes].
    """

    categories: tuple[Category, ...]
    image_ids: NDArray[np.int64]
    sizes_hw: NDArray[np.int64]
    file_names: FileNames
    first_box: NDArray[np.int64]
    boxes_xywh: NDArray[np.float64]
    areas: NDArray[np.float64]
    labels: NDArray[np.int64]
    is_crowd: NDArray[np.bool_]


def read_categories(json_path: Path) -> tuple[Category, ...]:
    """Reads the categories of an annotation file, in order of their ids: category i has the contiguous label i.

    Raises:
        DataError: The file is absent, no COCO annotation file, lists no category, or one without a name or with an id
            that is no integer.
    """
    return _parse_categories(read_json(json_path), json_path)


def read_table(json_path: Path, limit: int | None) -> AnnotationTable:
    """Reads an annotation file for detection.

    A missing `iscrowd` becomes 0; an `area` that is missing or no number of at least 0 becomes the area of the box.
    Boxes without width or height inside the image are dropped, and their number logged. Segmentations are dropped too:
    detection needs none.

    Args:
        json_path: The annotation file.
        limit: Keep only the first so many images in order of their ids; None keeps all.

    Raises:
        DataError: The limit is below 1, the file is absent or no COCO annotation file, an id is no integer, two images
            share one, there is no image, one has no file name or no size, a box is not four finite numbers, `iscrowd`
            is neither 0 nor 1, or an annotation refers to a category or an image that the file does not list.
    """
    if limit is not None and limit < 1:
        raise DataError(f"limit must be at least 1 image, got {limit}; use null for all images")
    with without_garbage_collection():
        content = read_json(json_path)
        return make_table(content, limit, json_path)


def read_annotations(json_path: Path, limit: int | None) -> COCO:
    """Reads an annotation file as `read_table` does, for evaluation."""
    return index_table(read_table(json_path, limit))


def index_table(table: AnnotationTable) -> COCO:
    """Builds the index of pycocotools.

    Annotations are numbered anew from 1: COCOeval takes a match with annotation 0 as no match.
    """
    image_of_box = np.repeat(table.image_ids, np.diff(table.first_box)).tolist()
    category_ids = [category.id for category in table.categories]
    columns = (
        image_of_box,
        table.labels.tolist(),
        table.boxes_xywh.tolist(),
        table.areas.tolist(),
        table.is_crowd.astype(int).tolist(),
    )
    annotations = [
        {
            "id": number,
            "image_id": image_id,
            "category_id": category_ids[label],
            "bbox": bbox,
            "area": area,
            "iscrowd": crowd,
        }
        for number, (image_id, label, bbox, area, crowd) in enumerate(zip(*columns, strict=True), start=1)
    ]
    images = [
        {"id": image_id, "file_name": table.file_names[place], "height": height, "width": width}
        for place, (image_id, (height, width)) in enumerate(
            zip(table.image_ids.tolist(), table.sizes_hw.tolist(), strict=True)
        )
    ]
    categories = [{"id": category.id, "name": category.name} for category in table.categories]
    return build_index(images, categories, annotations)


def build_index(
    images: Sequence[dict[str, Any]], categories: Sequence[dict[str, Any]], annotations: Sequence[dict[str, Any]]
) -> COCO:
    """Builds the index of pycocotools over lists in COCO's format, without its printing."""
    index = COCO()
    index.dataset = {"images": list(images), "categories": list(categories), "annotations": list(annotations)}
    with contextlib.redirect_stdout(io.StringIO()):
        index.createIndex()
    return index


def read_json(json_path: Path) -> dict[str, Any]:
    """Reads the file and checks that it has COCO's three lists, and their entries what detection needs.

    Raises:
        DataError: The file is absent, no JSON, or incomplete.
    """
    content = read_lists(json_path)
    for kind, keys in REQUIRED_KEYS.items():
        required = frozenset(keys)
        for place, entry in enumerate(content[kind]):
            if not (isinstance(entry, dict) and required <= entry.keys()):
                raise DataError(
                    f"every entry of {kind} must have {', '.join(keys)}, got {describe_lack(entry, kind)} in entry "
                    f"{place} of {json_path}; complete the file"
                )
    return content


def read_lists(json_path: Path) -> dict[str, Any]:
    """Reads the file and checks that it has COCO's three lists, whatever is in them.

    Raises:
        DataError: The file is absent, no JSON, or without one of them.
    """
    if not json_path.is_file():
        raise DataError(f"annotation file must exist, got {json_path}; check the path")
    with without_garbage_collection():
        try:
            content = json.loads(json_path.read_bytes())
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"annotation file must be JSON, got {json_path} ({error}); write or download it again"
            ) from error
    missing = [
        kind for kind in REQUIRED_KEYS if not (isinstance(content, dict) and isinstance(content.get(kind), list))
    ]
    if missing:
        raise DataError(
            f"annotation file must hold lists of images, annotations and categories, got {json_path} without "
            f"{', '.join(missing)}; convert it to COCO's instances format"
        )
    return content


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Pauses the search for cycles: JSON has none, and looking for them takes most of the time of reading it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def find_degenerate(boxes_xywh: NDArray[np.float64], sizes_hw: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Returns, bool [boxes], whether nothing is left of a box in float32, as it is trained on, clipped to its image.

    Args:
        boxes_xywh: float64 [boxes, 4], in pixels.
        sizes_hw: int64 [boxes, 2], height and width of each box's image in pixels.
    """
    boxes = boxes_xywh.astype(np.float32)
    low = np.maximum(boxes[:, :2], 0)
    high = np.minimum(boxes[:, :2] + boxes[:, 2:], sizes_hw[:, ::-1].astype(np.float32))
    return np.any(high <= low, axis=1)


def make_table(content: dict[str, Any], limit: int | None, json_path: Path) -> AnnotationTable:
    """Checks and repairs the entries, and lays them out by image, see `read_table`.

    Args:
        content: What `read_json` returns.
        limit: As in `read_table`.
        json_path: The file that it was read from, for messages.

    Raises:
        DataError: As `read_table` does.
    """
    categories = _parse_categories(content, json_path)
    images = _parse_images(content["images"], json_path)
    image_ids = np.array([image["id"] for image in images], dtype=np.int64)
    sizes_hw = np.array([(image["height"], image["width"]) for image in images], dtype=np.int64).reshape(-1, 2)
    sources = content["annotations"]
    _require_integers(sources, "id", "annotation id", json_path)
    image_of_box = _find_places(sources, "image_id", image_ids, json_path)
    category_ids = np.array([category.id for category in categories], dtype=np.int64)
    labels = _find_places(sources, "category_id", category_ids, json_path)
    boxes_xywh = _parse_boxes(sources, json_path)
    is_crowd = _parse_crowds(sources, json_path)

    num_kept = len(images) if limit is None else min(limit, len(images))
    is_chosen = image_of_box < num_kept
    is_degenerate = find_degenerate(boxes_xywh, sizes_hw[image_of_box]) & is_chosen
    if is_degenerate.any():
        logger.warning(
            "%s: dropped %d boxes without width or height inside their image", json_path, is_degenerate.sum()
        )
    kept = np.flatnonzero(is_chosen & ~is_degenerate)
    order = kept[np.argsort(image_of_box[kept], kind="stable")]
    given = (source.get("area") for source in sources)
    areas = np.fromiter((area if is_area(area) else np.nan for area in given), np.float64, len(sources))
    return AnnotationTable(
        categories=categories,
        image_ids=image_ids[:num_kept],
        sizes_hw=sizes_hw[:num_kept],
        file_names=FileNames(image["file_name"] for image in images[:num_kept]),
        first_box=np.searchsorted(image_of_box[order], np.arange(num_kept + 1)),
        boxes_xywh=boxes_xywh[order],
        areas=np.where(np.isnan(areas), boxes_xywh[:, 2] * boxes_xywh[:, 3], areas)[order],
        labels=labels[order],
        is_crowd=is_crowd[order],
    )


def _parse_images(entries: list[dict[str, Any]], json_path: Path) -> list[dict[str, Any]]:
    """Returns the images, at least one, in order of their ids, each with an id of its own, a file name and a size."""
    if not entries:
        raise DataError(f"images must be at least one, got none in {json_path}; list the images in the file")
    _require_integers(entries, "id", "image id", json_path)
    images = sorted(entries, key=lambda image: image["id"])
    for image, following in itertools.pairwise(images):
        if image["id"] == following["id"]:
            raise DataError(
                f"image ids must be distinct, got {image['id']} for {image['file_name']} and "
                f"{following['file_name']} in {json_path}; renumber them"
            )
    for image in images:
        if not is_file_name(image["file_name"]):
            raise DataError(
                f"file_name must be the name of a file, got {image['file_name']!r} for image {image['id']} of "
                f"{json_path}; correct or remove the image"
            )
        if not has_size(image):
            raise DataError(
                f"image height and width must be integers above 0, got {image['height']!r} and {image['width']!r} for "
                f"image {image['id']} of {json_path}; write every image's size into the file"
            )
    return images


def _parse_categories(content: dict[str, Any], json_path: Path) -> tuple[Category, ...]:
    """Returns the categories, at least one, in order of their ids."""
    if not content["categories"]:
        raise DataError(f"categories must be at least one, got none in {json_path}; list the classes in the file")
    _require_integers(content["categories"], "id", "category id", json_path)
    unnamed = next((entry for entry in content["categories"] if not is_name(entry["name"])), None)
    if unnamed is not None:
        raise DataError(
            f"category name must be text, got {unnamed['name']!r} for category {unnamed['id']} of {json_path}; name it"
        )
    categories = [Category(entry["id"], entry["name"]) for entry in content["categories"]]
    ids = [category.id for category in categories]
    if len(set(ids)) != len(ids):
        raise DataError(f"category ids must be distinct, got {ids} in {json_path}; renumber them")
    return tuple(sorted(categories, key=lambda category: category.id))


def _require_integers(entries: list[dict[str, Any]], key: str, name: str, json_path: Path) -> None:
    """Checks that a value of every entry is an integer (COCOeval counts with ids)."""
    for entry in entries:
        if not is_id(entry[key]):
            raise DataError(
                f"{name} must be an integer, got {entry[key]!r} in {json_path}; number the entries with integers "
                "of 64 bits"
            )


def _find_places(
    sources: list[dict[str, Any]], key: str, known: NDArray[np.int64], json_path: Path
) -> NDArray[np.int64]:
    """Returns the place among the ascending known ids of each annotation's id."""
    places = {number: place for place, number in enumerate(known.tolist())}
    try:
        return np.fromiter((places[source[key]] for source in sources), dtype=np.int64, count=len(sources))
    except (KeyError, TypeError):
        wrong = next(source for source in sources if not is_known(source[key], places))
    raise DataError(
        f"{key} must be one that the file lists, got {wrong[key]!r} in annotation {wrong['id']} of "
        f"{json_path}; add the entry or remove the annotation"
    )


def _parse_boxes(sources: list[dict[str, Any]], json_path: Path) -> NDArray[np.float64]:
    """Returns the boxes, float64 [boxes, 4]."""
    boxes = [source["bbox"] for source in sources]
    wrong = next((place for place, bbox in enumerate(boxes) if not is_box(bbox)), None)
    if wrong is not None:
        raise DataError(
            f"bbox must be four finite numbers (left, top, width, height), got {boxes[wrong]} in annotation "
            f"{sources[wrong]['id']} of {json_path}; correct or remove the annotation"
        )
    return np.array(boxes, dtype=np.float64).reshape(-1, 4)


def _parse_crowds(sources: list[dict[str, Any]], json_path: Path) -> NDArray[np.bool_]:
    """Returns, bool [boxes], which annotations are crowds."""
    wrong = next((source for source in sources if not is_crowd_flag(source.get("iscrowd"))), None)
    if wrong is not None:
        raise DataError(
            f"iscrowd must be 0 or 1, got {wrong['iscrowd']!r} in annotation {wrong['id']} of {json_path}; correct it"
        )
    return np.fromiter((bool(source.get("iscrowd")) for source in sources), np.bool_, len(sources))
