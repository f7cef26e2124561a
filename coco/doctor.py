"""Examines a data set before any epoch: every known fault with its count, examples, and what training does about it."""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import ExifTags, Image

from coco.annotations import AnnotationTable, find_degenerate, is_box, read_json, read_table, without_garbage_collection
from coco.errors import DataError
from coco.file_names import FileNames
from coco.images import read_image_rgb

REFUSED, DROPPED, REPAIRED, NOTED = "refused", "dropped", "repaired", "noted"

KINDS = {
    "unreadable annotation file": (REFUSED, "training does not start"),
    "id that is no integer": (REFUSED, "training does not start; number the entries with integers"),
    "repeated image id": (REFUSED, "training does not start; renumber the images"),
    "repeated category id": (REFUSED, "training does not start; renumber the categories"),
    "image without a size": (REFUSED, "training does not start; write height and width as integers above 0"),
    "unknown category": (REFUSED, "training does not start; list the category or remove the annotation"),
    "unknown image": (REFUSED, "training does not start; list the image or remove the annotation"),
    "malformed box": (REFUSED, "training does not start; a box is four finite numbers"),
    "missing image file": (REFUSED, "training does not start; restore the file or remove the image"),
    "unreadable image file": (REFUSED, "training stops where it meets it; replace the file or remove the image"),
    "box without area": (DROPPED, "the box is dropped, here and in evaluation"),
    "box beyond the image": (REPAIRED, "the box is clipped to the image in training"),
    "missing area": (REPAIRED, "the area of the box is used"),
    "missing iscrowd": (REPAIRED, "taken as 0"),
    "annotation id 0 or repeated": (REPAIRED, "annotations are numbered anew: COCOeval takes id 0 as no match"),
    "crowd": (NOTED, "no target in training, ignored in evaluation"),
    "image without boxes": (NOTED, "trains as background"),
    "category without boxes": (NOTED, "is never learnt, and has no AP"),
    "more than 300 boxes in an image": (NOTED, "a model of 300 queries cannot find them all; raise num_queries"),
    "image that is not RGB": (NOTED, "becomes RGB as a person would see it"),
    "image with an orientation tag": (NOTED, "is turned upright if the recorded size is that of the upright picture"),
}
"""What training does about each kind of fault."""

MAX_EXAMPLES = 5
_MANY_BOXES = 300


@dataclass
class Fault:
    """One kind of fault in one split.

    Attributes:
        kind: A key of `KINDS`.
        severity: "refused", "dropped", "repaired" or "noted".
        action: What training does.
        count: How often it occurs.
        examples: The first cases.
    """

    kind: str
    severity: str
    action: str
    count: int = 0
    examples: list[str] = field(default_factory=list)


class Findings:
    """The faults of a split, in the order in which their kinds were met."""

    def __init__(self) -> None:
        self.faults: dict[str, Fault] = {}

    def add(self, kind: str, example: str) -> None:
        """Counts a case."""
        if kind not in self.faults:
            self.faults[kind] = Fault(kind, *KINDS[kind])
        fault = self.faults[kind]
        fault.count += 1
        if len(fault.examples) < MAX_EXAMPLES:
            fault.examples.append(example)

    def add_all(self, kind: str, examples: Iterable[str]) -> None:
        """Counts several cases."""
        for example in examples:
            self.add(kind, example)

    @property
    def has_refused(self) -> bool:
        """Whether training will not take this data."""
        return any(fault.severity == REFUSED for fault in self.faults.values())

    def as_json(self) -> list[dict[str, Any]]:
        """Returns the faults as plain values, the worst first."""
        order = (REFUSED, DROPPED, REPAIRED, NOTED)
        return [asdict(fault) for fault in sorted(self.faults.values(), key=lambda fault: order.index(fault.severity))]


def require_files(file_names: FileNames, images_dir: Path) -> None:
    """Checks that all images of a data set exist, by listing their folders.

    Raises:
        DataError: Some do not; the message has their number and the first.
    """
    missing = _find_missing([file_names[place] for place in range(len(file_names))], images_dir)
    if missing:
        raise DataError(
            f"every image of the annotation file must exist, got no {missing[0]} ({len(missing)} of {len(file_names)} "
            f"are missing) in {images_dir}; restore them, or see python -m scripts.doctor"
        )


def examine_annotations(json_path: Path) -> Findings:
    """Examines an annotation file.

    Args:
        json_path: The annotation file.
    """
    findings = Findings()
    with without_garbage_collection():
        try:
            content = read_json(json_path)
        except DataError as error:
            findings.add("unreadable annotation file", str(error))
            return findings
        _examine_ids(content, findings)
        _examine_images(content["images"], findings)
        _examine_entries(content, findings)
    if not findings.has_refused:
        _examine_table(read_table(json_path, None), content, findings)
    return findings


def examine_files(
    table: AnnotationTable, images_dir: Path, findings: Findings, *, num_workers: int, progress: Callable[[int], None]
) -> None:
    """Reads every image as training does.

    Args:
        table: The images.
        images_dir: Folder that their names are relative to.
        findings: Takes the faults.
        num_workers: Processes that read; 0 reads here.
        progress: Told how many images have been read since it was last.
    """
    names = [table.file_names[place] for place in range(len(table.file_names))]
    missing = set(_find_missing(names, images_dir))
    findings.add_all("missing image file", (name for name in names if name in missing))
    jobs = [
        (str(images_dir / name), (height, width))
        for name, (height, width) in zip(names, table.sizes_hw.tolist(), strict=True)
        if name not in missing
    ]
    for cases in _map(_examine_image, jobs, num_workers):
        progress(1)
        for kind, example in cases:
            findings.add(kind, example)


def report_json(splits: dict[str, Findings]) -> str:
    """Returns the findings of all splits as JSON."""
    return json.dumps({name: findings.as_json() for name, findings in splits.items()}, indent=1) + "\n"


def _examine_ids(content: dict[str, Any], findings: Findings) -> None:
    for kind, name in (("categories", "category"), ("images", "image"), ("annotations", "annotation")):
        ids = [entry["id"] for entry in content[kind]]
        wrong = [number for number in ids if type(number) is not int]
        findings.add_all("id that is no integer", (f"{name} {number!r}" for number in wrong))
        if kind == "annotations":
            repeated = [number for number, count in Counter(map(str, ids)).items() if count > 1 or number == "0"]
            findings.add_all("annotation id 0 or repeated", (f"annotation {number}" for number in repeated))
        else:
            repeated = [number for number, count in Counter(map(str, ids)).items() if count > 1]
            findings.add_all(f"repeated {name} id", (f"{name} {number}" for number in repeated))
    if not content["categories"]:
        findings.add("unreadable annotation file", "no category")


def _examine_images(images: Sequence[dict[str, Any]], findings: Findings) -> None:
    for image in images:
        if not all(type(image[side]) is int and image[side] > 0 for side in ("height", "width")):
            size = f"height {image['height']!r} and width {image['width']!r}"
            findings.add("image without a size", f"image {image['id']} has {size}")


def _examine_entries(content: dict[str, Any], findings: Findings) -> None:
    """Examines annotations one by one."""
    known_images = {image["id"] for image in content["images"]}
    known_categories = {category["id"] for category in content["categories"]}
    for entry in content["annotations"]:
        name = f"annotation {entry['id']}"
        if not _is_known(entry["image_id"], known_images):
            findings.add("unknown image", f"{name} of image {entry['image_id']!r}")
        if not _is_known(entry["category_id"], known_categories):
            findings.add("unknown category", f"{name} of category {entry['category_id']!r}")
        if not is_box(entry["bbox"]):
            findings.add("malformed box", f"{name} has {entry['bbox']!r}")
        if entry.get("area") is None:
            findings.add("missing area", name)
        if entry.get("iscrowd") is None:
            findings.add("missing iscrowd", name)
        elif entry["iscrowd"]:
            findings.add("crowd", name)


def _is_known(number: object, known: set[int]) -> bool:
    return isinstance(number, int) and number in known


def _examine_table(table: AnnotationTable, content: dict[str, Any], findings: Findings) -> None:
    """Examines boxes against their images; the file is sound enough to have been read."""
    places = {image_id: place for place, image_id in enumerate(table.image_ids.tolist())}
    image_of_box = np.array([places[entry["image_id"]] for entry in content["annotations"]], dtype=np.int64)
    boxes_xywh = np.array([entry["bbox"] for entry in content["annotations"]], dtype=np.float64).reshape(-1, 4)
    sizes_hw = table.sizes_hw[image_of_box]
    is_degenerate = find_degenerate(boxes_xywh, sizes_hw)
    # COCO's own boxes reach beyond their images by the rounding of their coordinates to hundredths
    beyond = np.maximum(-boxes_xywh[:, :2], boxes_xywh[:, :2] + boxes_xywh[:, 2:] - sizes_hw[:, ::-1]).max(axis=1)
    for kind, cases in (("box without area", is_degenerate), ("box beyond the image", ~is_degenerate & (beyond > 0.5))):
        for place in np.flatnonzero(cases).tolist():
            entry = content["annotations"][place]
            findings.add(kind, f"annotation {entry['id']} of image {entry['image_id']} has {entry['bbox']}")
    counts = np.diff(table.first_box)
    for kind, chosen in (
        ("image without boxes", counts == 0),
        ("more than 300 boxes in an image", counts > _MANY_BOXES),
    ):
        findings.add_all(kind, (f"image {number}" for number in table.image_ids[chosen].tolist()))
    labelled = np.bincount(table.labels, minlength=len(table.categories))
    unused = (category for category, count in zip(table.categories, labelled.tolist(), strict=True) if count == 0)
    findings.add_all("category without boxes", (f"category {category.id} ({category.name})" for category in unused))


def _find_missing(names: Sequence[str], images_dir: Path) -> list[str]:
    """Returns the names without a file, by listing each folder once."""
    present: dict[str, set[str]] = {}
    missing = []
    for name in names:
        folder, file_name = os.path.split(name)
        if folder not in present:
            path = images_dir / folder
            present[folder] = set(os.listdir(path)) if path.is_dir() else set()
        if file_name not in present[folder]:
            missing.append(name)
    return missing


def _examine_image(job: tuple[str, tuple[int, int]]) -> list[tuple[str, str]]:
    """Returns the (kind, example) pairs of one image."""
    path, size_hw = job
    try:
        read_image_rgb(Path(path), size_hw)
    except DataError as error:
        return [("unreadable image file", str(error))]
    with Image.open(path) as image:
        cases = [] if image.mode == "RGB" else [("image that is not RGB", f"{path} is {image.mode}")]
        orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
        return cases if orientation == 1 else [*cases, ("image with an orientation tag", f"{path} has {orientation}")]


def _map(function: Callable[[Any], Any], jobs: Sequence[Any], num_workers: int) -> Iterator[Any]:
    """Maps in order, in this process or in others."""
    if num_workers == 0:
        yield from map(function, jobs)
        return
    with ProcessPoolExecutor(num_workers) as pool:
        yield from pool.map(function, jobs, chunksize=32)
