"""Examines a data set before any epoch: every known fault with its count, examples, and what training does about it."""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from coco.annotations import AnnotationTable, find_degenerate, make_table, read_lists, without_garbage_collection
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
from coco.errors import DataError, ImageSizeError
from coco.file_names import FileNames
from coco.findings import Findings
from coco.images import read_image_rgb, read_orientation

_MANY_BOXES = 300


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


def examine_annotations(json_path: Path) -> tuple[Findings, AnnotationTable | None]:
    """Examines an annotation file.

    Args:
        json_path: The annotation file.

    Returns:
        The faults, and the entries that are sound, None if no image or no category is.
    """
    findings = Findings()
    with without_garbage_collection():
        try:
            content = read_lists(json_path)
        except DataError as error:
            findings.add("unreadable annotation file", str(error))
            return findings, None
        complete = {kind: _keep_complete(content[kind], kind, findings) for kind in REQUIRED_KEYS}
        categories = _keep_sound_categories(complete["categories"], findings)
        images = _keep_sound_images(complete["images"], findings)
        listed = _find_ids(content["images"]), _find_ids(content["categories"])
        sound_ids = _find_ids(images), _find_ids(categories)
        sources = _keep_sound_annotations(complete["annotations"], listed, sound_ids, findings)
        for kind, kept in (("images", images), ("categories", categories)):
            if not kept:
                findings.add("no images or no categories", f"no {kind} that are sound")
        if not (images and categories):
            return findings, None
        sound = {"images": images, "categories": categories, "annotations": sources}
        table = make_table(sound, None, json_path)
        _examine_boxes(table, sources, findings)
    return findings, table


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


def compare_splits(
    train: AnnotationTable, train_images: Path, val: AnnotationTable, val_images: Path, findings: Findings
) -> None:
    """Compares the splits of a training.

    Args:
        train: Its images.
        train_images: Folder that their names are relative to.
        val: The images that it is evaluated on.
        val_images: Folder that their names are relative to.
        findings: Those of `val`, which take the faults.
    """
    for category in sorted(set(train.categories) ^ set(val.categories), key=lambda category: category.id):
        split = "training" if category in train.categories else "validation"
        example = f"category {category.id} ({category.name}) is in {split} alone"
        findings.add("categories that differ from training", example)
    trained = {train_images / train.file_names[place] for place in range(len(train.file_names))}
    names = (val.file_names[place] for place in range(len(val.file_names)))
    findings.add_all("file of training and validation", (name for name in names if val_images / name in trained))


def _keep_complete(entries: Sequence[Any], kind: str, findings: Findings) -> list[dict[str, Any]]:
    """Returns the entries that have what detection needs."""
    kept = []
    for place, entry in enumerate(entries):
        lack = describe_lack(entry, kind)
        if lack:
            findings.add("incomplete entry", f"entry {place} of {kind}: {lack}")
        else:
            kept.append(entry)
    return kept


def _keep_sound_categories(categories: Sequence[dict[str, Any]], findings: Findings) -> list[dict[str, Any]]:
    """Returns the categories with an id of their own and a name."""
    kept = []
    for category in _keep_distinct(categories, "category", findings):
        if is_name(category["name"]):
            kept.append(category)
        else:
            findings.add("category without a name", f"category {category['id']} has {category['name']!r}")
    names = Counter(category["name"] for category in kept)
    findings.add_all("name of several categories", (name for name, count in names.items() if count > 1))
    return kept


def _keep_sound_images(images: Sequence[dict[str, Any]], findings: Findings) -> list[dict[str, Any]]:
    """Returns the images with an id of their own, a file and a size."""
    kept = []
    for image in _keep_distinct(images, "image", findings):
        if not is_file_name(image["file_name"]):
            findings.add("image without a file name", f"image {image['id']} has {image['file_name']!r}")
        elif not has_size(image):
            size = f"height {image['height']!r} and width {image['width']!r}"
            findings.add("image without a size", f"image {image['id']} has {size}")
        else:
            kept.append(image)
    files = Counter(image["file_name"] for image in kept)
    findings.add_all("file of several images", (name for name, count in files.items() if count > 1))
    return kept


def _keep_distinct(entries: Sequence[dict[str, Any]], name: str, findings: Findings) -> list[dict[str, Any]]:
    """Returns the first entry of each id that is an integer."""
    kept: dict[int, dict[str, Any]] = {}
    repeated: dict[int, None] = {}
    for entry in entries:
        number = entry["id"]
        if not is_id(number):
            findings.add("id that is no integer", f"{name} {number!r}")
        elif number in kept:
            repeated[number] = None
        else:
            kept[number] = entry
    findings.add_all(f"repeated {name} id", (f"{name} {number}" for number in repeated))
    return list(kept.values())


def _find_ids(entries: Sequence[Any]) -> set[int]:
    """Returns the ids of entries, those that lack something else included."""
    return {entry["id"] for entry in entries if isinstance(entry, dict) and is_id(entry.get("id"))}


def _keep_sound_annotations(
    annotations: Sequence[dict[str, Any]],
    listed: tuple[set[int], set[int]],
    sound: tuple[set[int], set[int]],
    findings: Findings,
) -> list[dict[str, Any]]:
    """Returns the annotations with a box, of sound images and categories.

    Args:
        annotations: Those that have what detection needs.
        listed: Ids of all images and categories of the file.
        sound: Ids of those that are sound.
        findings: Takes the faults.
    """
    numbers = Counter(entry["id"] for entry in annotations if is_id(entry["id"]))
    repeated = (number for number, count in numbers.items() if count > 1 or number == 0)
    findings.add_all("annotation id 0 or repeated", (f"annotation {number}" for number in repeated))
    kept = []
    for entry in annotations:
        faults = list(_find_refused(entry, *listed))
        for kind, example in faults:
            findings.add(kind, example)
        _note_repaired(entry, findings)
        if not faults and entry["image_id"] in sound[0] and entry["category_id"] in sound[1]:
            kept.append(entry)
    return kept


def _find_refused(entry: dict[str, Any], images: set[int], categories: set[int]) -> Iterator[tuple[str, str]]:
    """The (kind, example) pairs for which an annotation is refused."""
    name = f"annotation {entry['id']!r}"
    if not is_id(entry["id"]):
        yield "id that is no integer", name
    if not is_known(entry["image_id"], images):
        yield "unknown image", f"{name} of image {entry['image_id']!r}"
    if not is_known(entry["category_id"], categories):
        yield "unknown category", f"{name} of category {entry['category_id']!r}"
    if not is_box(entry["bbox"]):
        yield "malformed box", f"{name} has {entry['bbox']!r}"
    if not is_crowd_flag(entry.get("iscrowd")):
        yield "malformed iscrowd", f"{name} has {entry['iscrowd']!r}"


def _note_repaired(entry: dict[str, Any], findings: Findings) -> None:
    """Counts what is missing in an annotation, and crowds."""
    area, flag = entry.get("area"), entry.get("iscrowd")
    if area is None:
        findings.add("missing area", f"annotation {entry['id']!r}")
    elif not is_area(area):
        findings.add("malformed area", f"annotation {entry['id']!r} has {area!r}")
    if flag is None:
        findings.add("missing iscrowd", f"annotation {entry['id']!r}")
    elif is_crowd_flag(flag) and flag:
        findings.add("crowd", f"annotation {entry['id']!r}")


def _examine_boxes(table: AnnotationTable, sources: Sequence[dict[str, Any]], findings: Findings) -> None:
    """Examines boxes against their images and each other.

    Args:
        table: What is trained on.
        sources: The annotations that it was made of, all sound.
        findings: Takes the faults.
    """
    places = {image_id: place for place, image_id in enumerate(table.image_ids.tolist())}
    image_of_box = np.array([places[entry["image_id"]] for entry in sources], dtype=np.int64)
    labels = np.array([entry["category_id"] for entry in sources], dtype=np.int64)
    boxes_xywh = np.array([entry["bbox"] for entry in sources], dtype=np.float64).reshape(-1, 4)
    sizes_hw = table.sizes_hw[image_of_box]
    is_degenerate = find_degenerate(boxes_xywh, sizes_hw)
    # COCO's own boxes reach beyond their images by the rounding of their coordinates to hundredths
    beyond = np.maximum(-boxes_xywh[:, :2], boxes_xywh[:, :2] + boxes_xywh[:, 2:] - sizes_hw[:, ::-1]).max(axis=1)
    for kind, cases in (
        ("box without area", is_degenerate),
        ("box beyond the image", ~is_degenerate & (beyond > 0.5)),
        ("box given twice", ~is_degenerate & _find_repeated(np.column_stack([image_of_box, labels, boxes_xywh]))),
    ):
        for place in np.flatnonzero(cases).tolist():
            entry = sources[place]
            findings.add(kind, f"annotation {entry['id']} of image {entry['image_id']} has {entry['bbox']}")
    if findings.has_refused:  # what is without boxes is known once every annotation is sound
        return
    counts = np.diff(table.first_box)
    for kind, chosen in (
        ("image without boxes", counts == 0),
        ("more than 300 boxes in an image", counts > _MANY_BOXES),
    ):
        findings.add_all(kind, (f"image {number}" for number in table.image_ids[chosen].tolist()))
    labelled = np.bincount(table.labels, minlength=len(table.categories))
    unused = (category for category, count in zip(table.categories, labelled.tolist(), strict=True) if count == 0)
    findings.add_all("category without boxes", (f"category {category.id} ({category.name})" for category in unused))


def _find_repeated(rows: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Returns, bool [rows], whether an earlier row is the same."""
    order = np.lexsort(rows.T)  # stable: of equal rows the first stays first
    is_repeated = np.zeros(len(rows), dtype=np.bool_)
    is_repeated[order[1:]] = np.all(rows[order[1:]] == rows[order[:-1]], axis=1)
    return is_repeated


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
    except ImageSizeError as error:
        return [("image of another size", str(error))]
    except DataError as error:
        return [("unreadable image file", str(error))]
    with Image.open(path) as image:
        cases = [] if image.mode == "RGB" else [("image that is not RGB", f"{path} is {image.mode}")]
        orientation = read_orientation(image)
        return cases if orientation == 1 else [*cases, ("image with an orientation tag", f"{path} has {orientation}")]


def _map(function: Callable[[Any], Any], jobs: Sequence[Any], num_workers: int) -> Iterator[Any]:
    """Maps in order, in this process or in others."""
    if num_workers == 0:
        yield from map(function, jobs)
        return
    with ProcessPoolExecutor(num_workers) as pool:
        yield from pool.map(function, jobs, chunksize=32)
