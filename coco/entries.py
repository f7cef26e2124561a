"""What the entries of a COCO annotation file must hold: one rule each, for the training and for the doctor."""

from collections.abc import Container
from typing import Any

REQUIRED_KEYS = {
    "images": ("id", "file_name", "height", "width"),
    "annotations": ("id", "image_id", "category_id", "bbox"),
    "categories": ("id", "name"),
}


def describe_lack(entry: Any, kind: str) -> str:
    """Returns what an entry of a kind of `REQUIRED_KEYS` lacks, in words that follow "got"; "" if it is complete."""
    if not isinstance(entry, dict):
        return f"{type(entry).__name__} in place of an object"
    absent = ", ".join(key for key in REQUIRED_KEYS[kind] if key not in entry)
    return f"no {absent}" if absent else ""


def is_id(number: Any) -> bool:
    """Whether it is an integer of 64 bits."""
    return type(number) is int and -(2**63) <= number < 2**63


def is_known(number: Any, known: Container[int]) -> bool:
    """Whether it is one of the ids; 1.0, as tables write it, is 1."""
    return isinstance(number, int | float) and number in known


def is_name(name: Any) -> bool:
    """Whether it is text that a file can hold: not empty, without halves of surrogate pairs."""
    return isinstance(name, str) and name != "" and not any("\ud800" <= letter <= "\udfff" for letter in name)


def is_file_name(name: Any) -> bool:
    """Whether it is text that can name a file."""
    return is_name(name) and "\0" not in name


def has_size(image: dict[str, Any]) -> bool:
    """Whether height and width of an entry of images are integers above 0, of 32 bits."""
    return all(type(image[side]) is int and 0 < image[side] < 2**31 for side in ("height", "width"))


def is_area(area: Any) -> bool:
    """Whether it is a number of at least 0; COCOeval ignores boxes of any other area in silence."""
    return isinstance(area, int | float) and 0 <= area < 1e10


def is_crowd_flag(flag: Any) -> bool:
    """Whether it is 0 or 1, or missing; the text "0" would count as true."""
    return flag is None or (isinstance(flag, int | float) and flag in (0, 1))


def is_box(bbox: Any) -> bool:
    """Whether it is a list of four finite numbers, small enough for float32 to add."""
    if not (isinstance(bbox, list) and len(bbox) == 4):
        return False
    try:
        return bool(abs(bbox[0]) + abs(bbox[1]) + abs(bbox[2]) + abs(bbox[3]) < 1e30)
    except (TypeError, OverflowError):
        return False
