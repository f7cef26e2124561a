"""YOLO and PASCAL VOC folders as one annotation file in COCO's format."""

import math
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from coco.errors import DataError
from coco.images import TRANSPOSING_ORIENTATIONS, UNREADABLE, read_orientation

IMAGE_SUFFIXES = (".bmp", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")

Box = tuple[int, tuple[float, float, float, float], bool]
"""A contiguous label, (left, top, width, height) in pixels, and whether it is to be ignored."""


def convert_yolo(images_dir: Path, labels_dir: Path, names: Sequence[str]) -> dict[str, Any]:
    """Reads a text file beside every image: lines of `class cx cy w h`, the four as shares of width and height.

    An image without a text file has no objects. Sizes are those of the upright picture, as YOLO's tools take them.

    Args:
        images_dir: Folder of the images; folders in it are searched too.
        labels_dir: Folder of the text files, in the same folders and of the same names.
        names: Names of the classes, class 0 first.

    Returns:
        Images, annotations and categories in COCO's format; category ids begin with 1.

    Raises:
        DataError: There are no images or no folder of text files, or a line is none of the five finite numbers;
            polygons of segmentation are refused.
    """
    if not labels_dir.is_dir():
        raise DataError(f"label folder must exist, got {labels_dir}; check the path")
    entries = []
    for path in _find_images(images_dir):
        relative = path.relative_to(images_dir)
        height, width = upright_size_hw(path)
        entries.append(
            (
                str(relative),
                (height, width),
                list(_yolo_boxes(labels_dir / relative.with_suffix(".txt"), names, (height, width))),
            )
        )
    return _as_coco(entries, names)


def convert_voc(
    xml_dir: Path, images_dir: Path, stems: Sequence[str] | None, names: Sequence[str] | None
) -> dict[str, Any]:
    """Reads PASCAL VOC's XML files, one an image.

    Their corners are pixels counted from 1, both inside the box: left = xmin - 1, width = xmax - xmin + 1. Objects
    marked difficult become crowds, which are no targets and are ignored in evaluation, as VOC ignores them.

    Args:
        xml_dir: Folder of the XML files.
        images_dir: Folder of the images.
        stems: Names without suffix to convert, as a file of ImageSets/Main lists them; None for all.
        names: Names of the classes in order of their ids; None takes those that occur, sorted. Pass the same names for
            every split.

    Returns:
        As `convert_yolo`.

    Raises:
        DataError: There are no XML files, one lacks an entry, or a name is not among `names`.
    """
    paths = sorted(xml_dir.glob("*.xml")) if stems is None else [xml_dir / f"{stem}.xml" for stem in stems]
    if not paths:
        raise DataError(f"annotation folder must hold XML files, got none in {xml_dir}; check the path")
    roots = [(path, _parse_xml(path)) for path in paths]
    if names is None:
        names = sorted({_text(item, "name", path) for path, root in roots for item in root.iter("object")})
    entries = []
    for path, root in roots:
        file_name = _text(root, "filename", path)
        size_hw = upright_size_hw(images_dir / file_name)
        entries.append((file_name, size_hw, list(_voc_boxes(root, path, names))))
    return _as_coco(entries, names)


def upright_size_hw(path: Path) -> tuple[int, int]:
    """Returns height and width in pixels of an image as a person sees it.

    Raises:
        DataError: The file is missing or no image.
    """
    try:
        with Image.open(path) as image:
            turned = read_orientation(image) in TRANSPOSING_ORIENTATIONS
            return (image.width, image.height) if turned else (image.height, image.width)
    except UNREADABLE as error:
        raise DataError(f"image file must be readable, got {path} ({error}); replace or remove it") from error


def read_text(path: Path) -> str:
    """Returns the text of a file, without the mark that some editors begin it with.

    Raises:
        DataError: The file is missing or not in UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"file must be text in UTF-8, got {path} ({error}); check the path or save it anew") from error


def _find_images(folder: Path) -> list[Path]:
    """All images below a folder, in order of their paths."""
    found = sorted(path for path in folder.rglob("*") if path.suffix.lower() in IMAGE_SUFFIXES)
    if not found:
        raise DataError(f"image folder must hold images, got none in {folder}; check the path")
    return found


def _yolo_boxes(path: Path, names: Sequence[str], size_hw: tuple[int, int]) -> Iterator[Box]:
    """Boxes of a text file."""
    height, width = size_hw
    lines = read_text(path).splitlines() if path.is_file() else []
    for number, line in enumerate(lines, start=1):
        words = line.split()
        if not words:
            continue
        try:
            label = int(words[0])
            center_x, center_y, box_width, box_height = map(_parse_finite, words[1:])
        except ValueError as error:
            raise DataError(
                f"line must be: class cx cy w h, got {line!r} in line {number} of {path}; correct it, or convert "
                "polygons to boxes first"
            ) from error
        _require_label(0 <= label < len(names), words[0], names, path)
        left, top = (center_x - box_width / 2) * width, (center_y - box_height / 2) * height
        yield label, (left, top, box_width * width, box_height * height), False


def _voc_boxes(root: ElementTree.Element, path: Path, names: Sequence[str]) -> Iterator[Box]:
    """Boxes of an XML file."""
    for item in root.iter("object"):
        name = _text(item, "name", path)
        _require_label(name in names, name, names, path)
        try:
            low_x, low_y, high_x, high_y = (
                _parse_finite(_text(item, f"bndbox/{corner}", path)) for corner in ("xmin", "ymin", "xmax", "ymax")
            )
        except ValueError as error:
            raise DataError(f"bndbox must hold four numbers, got {error} in {path}; correct the file") from error
        box = (low_x - 1, low_y - 1, high_x - low_x + 1, high_y - low_y + 1)
        yield names.index(name), box, item.findtext("difficult", "0").strip() == "1"


def _parse_finite(word: str) -> float:
    """Returns a number that is finite, as in a box."""
    number = float(word)
    if not math.isfinite(number):
        raise ValueError(f"{word} is not finite")
    return number


def _parse_xml(path: Path) -> ElementTree.Element:
    """The root of an XML file."""
    try:
        return ElementTree.parse(path).getroot()
    except (OSError, ElementTree.ParseError) as error:
        raise DataError(f"annotation file must be XML, got {path} ({error}); correct or remove it") from error


def _text(element: ElementTree.Element, key: str, path: Path) -> str:
    """The text of an entry that has to be there."""
    text = element.findtext(key)
    if text is None:
        raise DataError(f"{element.tag} must hold {key}, got none in {path}; complete the file")
    return text.strip()


def _require_label(known: bool, found: str, names: Sequence[str], path: Path) -> None:
    """Refuses a class that nobody named."""
    if not known:
        raise DataError(
            f"class must be one of the {len(names)} names {', '.join(names)}, got {found} in {path}; name it"
        )


def _as_coco(entries: Iterable[tuple[str, tuple[int, int], list[Box]]], names: Sequence[str]) -> dict[str, Any]:
    """Numbers images, boxes and categories from 1."""
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for file_name, (height, width), boxes in entries:
        images.append({"id": len(images) + 1, "file_name": file_name, "height": height, "width": width})
        for label, box, is_ignored in boxes:
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": len(images),
                    "category_id": label + 1,
                    "bbox": [round(value, 3) for value in box],
                    "area": round(box[2] * box[3], 3),
                    "iscrowd": int(is_ignored),
                }
            )
    categories = [{"id": label + 1, "name": name} for label, name in enumerate(names)]
    return {"images": images, "annotations": annotations, "categories": categories}
