"""Every fault that the doctor knows, put into a sound data set; its verdict is what training does."""

import json

import numpy as np
import pytest
from PIL import ExifTags, Image

from coco.annotations import read_table
from coco.doctor import KINDS, REFUSED, Findings, examine_annotations, examine_files, report_json, require_files
from coco.errors import DataError


@pytest.fixture
def sound():
    """Two images, a box and nothing to remark."""
    box = {"category_id": 3, "bbox": [10, 5, 20, 10], "area": 150, "iscrowd": 0}
    return {
        "categories": [{"id": 3, "name": "cat"}],
        "images": [
            {"id": 1, "file_name": "a.png", "height": 40, "width": 60},
            {"id": 2, "file_name": "b.png", "height": 40, "width": 60},
        ],
        "annotations": [{"id": 1, "image_id": 1, **box}, {"id": 2, "image_id": 2, **box}],
    }


def put(*path_and_value):
    """Returns a change that sets an entry."""
    *path, key, value = path_and_value

    def change(content):
        place = content
        for part in path:
            place = place[part]
        place[key] = value

    return change


def drop(key):
    return lambda content: content["annotations"][1].pop(key)


def add_category(content):
    content["categories"].append({"id": 9, "name": "dog"})


def add_boxes(content):
    content["annotations"] += [{**content["annotations"][0], "id": 10 + number} for number in range(300)]


FAULTS = {
    "unreadable annotation file": drop("bbox"),
    "id that is no integer": put("annotations", 1, "id", "c33c3539"),
    "repeated image id": put("images", 1, "id", 1),
    "repeated category id": lambda content: content["categories"].append({"id": 3, "name": "dog"}),
    "image without a size": put("images", 1, "height", None),
    "unknown category": put("annotations", 1, "category_id", 91),
    "unknown image": put("annotations", 1, "image_id", "2"),
    "malformed box": put("annotations", 1, "bbox", [1, 2, float("nan"), 4]),
    "box without area": put("annotations", 1, "bbox", [10, 5, 20, 0]),
    "box beyond the image": put("annotations", 1, "bbox", [50, 5, 20, 10]),
    "missing area": drop("area"),
    "missing iscrowd": drop("iscrowd"),
    "annotation id 0 or repeated": put("annotations", 1, "id", 0),
    "crowd": put("annotations", 1, "iscrowd", 1),
    "image without boxes": lambda content: content["annotations"].pop(),
    "category without boxes": add_category,
    "more than 300 boxes in an image": add_boxes,
}


@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_is_found_and_judged_as_training_does(write_json, sound, kind):
    assert examine_annotations(write_json(sound)).faults == {}
    FAULTS[kind](sound)
    path = write_json(sound)
    findings = examine_annotations(path)
    assert kind in findings.faults
    fault = findings.faults[kind]
    assert (fault.count, len(fault.examples)) == (1, 1)
    assert findings.has_refused == (KINDS[kind][0] == REFUSED)
    if findings.has_refused:
        with pytest.raises(DataError):
            read_table(path, None)
    else:
        read_table(path, None)


def write_pictures(folder):
    """One picture for each kind of fault of files."""
    pixels = np.zeros((40, 60, 3), np.uint8)
    Image.fromarray(pixels).save(folder / "sound.jpg")
    Image.fromarray(pixels[..., 0]).save(folder / "gray.jpg")
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    Image.fromarray(pixels).save(folder / "rotated.jpg", exif=exif)
    (folder / "cut.jpg").write_bytes((folder / "sound.jpg").read_bytes()[:-100])
    Image.fromarray(pixels[:30]).save(folder / "smaller.jpg")
    return ("sound.jpg", "gray.jpg", "rotated.jpg", "cut.jpg", "smaller.jpg", "absent.jpg")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_files_are_read_as_in_training(write_json, sound, tmp_path, num_workers):
    names = write_pictures(tmp_path)
    sound["images"] = [
        {"id": number, "file_name": name, "height": 40, "width": 60} for number, name in enumerate(names, start=1)
    ]
    findings, steps = Findings(), []
    table = read_table(write_json(sound), None)
    examine_files(table, tmp_path, findings, num_workers=num_workers, progress=steps.append)
    assert {kind: fault.count for kind, fault in findings.faults.items()} == {
        "missing image file": 1,
        "image that is not RGB": 1,
        "image with an orientation tag": 1,
        "unreadable image file": 2,
    }
    assert findings.faults["missing image file"].examples == ["absent.jpg"]
    assert sum(steps) == 5
    assert findings.as_json()[0]["severity"] == REFUSED
    assert json.loads(report_json({"train": findings}))["train"][0]["count"] == 1
    with pytest.raises(DataError, match=r"got no absent\.jpg \(1 of 6 are missing\)"):
        require_files(table.file_names, tmp_path)


def test_every_kind_has_a_test():
    files = {"missing image file", "unreadable image file", "image that is not RGB", "image with an orientation tag"}
    assert set(FAULTS) | files == set(KINDS)


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("coco_train2017_200365_zero_height", {"box without area"}),
        ("detr_issue28_uuid_ids", {"id that is no integer"}),
        ("mmdetection_issue804_no_area", {"missing area"}),
    ],
)
def test_reported_files(odd_inputs, name, kinds):
    findings = examine_annotations(odd_inputs / "json" / f"{name}.json")
    assert set(findings.faults) == kinds
