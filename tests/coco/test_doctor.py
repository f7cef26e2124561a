"""Every fault that the doctor knows, put into a sound data set; its verdict is what training does."""

import json

import numpy as np
import pytest
from PIL import ExifTags, Image

from coco.annotations import read_table
from coco.doctor import compare_splits, examine_annotations, examine_files, require_files
from coco.errors import DataError
from coco.findings import KINDS, MAX_EXAMPLES, MAX_LETTERS, NOTED, REFUSED, Findings, report_json


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
    box = content["annotations"][0]
    content["annotations"] += [{**box, "id": 10 + n, "bbox": [0.1 * n, 5, 20, 10]} for n in range(300)]


def repeat_box(content):
    content["annotations"].append({**content["annotations"][0], "id": 10})


FAULTS = {
    "unreadable annotation file": put("annotations", None),
    "no images or no categories": lambda content: content.update(images=[], annotations=[]),
    "incomplete entry": drop("bbox"),
    "id that is no integer": put("annotations", 1, "id", "c33c3539"),
    "repeated image id": put("images", 1, "id", 1),
    "repeated category id": lambda content: content["categories"].append({"id": 3, "name": "dog"}),
    "image without a size": put("images", 1, "height", None),
    "image without a file name": put("images", 1, "file_name", None),
    "category without a name": lambda content: content["categories"].append({"id": 4, "name": 5}),
    "unknown category": put("annotations", 1, "category_id", 91),
    "unknown image": put("annotations", 1, "image_id", "2"),
    "malformed box": put("annotations", 1, "bbox", [1, 2, float("nan"), 4]),
    "malformed iscrowd": put("annotations", 1, "iscrowd", "0"),
    "box without area": put("annotations", 1, "bbox", [10, 5, 20, 0]),
    "box beyond the image": put("annotations", 1, "bbox", [50, 5, 20, 10]),
    "missing area": drop("area"),
    "malformed area": put("annotations", 1, "area", -150),
    "missing iscrowd": drop("iscrowd"),
    "annotation id 0 or repeated": put("annotations", 1, "id", 0),
    "crowd": put("annotations", 1, "iscrowd", 1),
    "image without boxes": lambda content: content["annotations"].pop(),
    "category without boxes": add_category,
    "more than 300 boxes in an image": add_boxes,
    "box given twice": repeat_box,
    "file of several images": put("images", 1, "file_name", "a.png"),
    "name of several categories": lambda content: content["categories"].append({"id": 4, "name": "cat"}),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_is_found_and_judged_as_training_does(write_json, sound, kind):
    assert examine_annotations(write_json(sound))[0].faults == {}
    FAULTS[kind](sound)
    path = write_json(sound)
    findings, _ = examine_annotations(path)
    assert kind in findings.faults
    fault = findings.faults[kind]
    assert (fault.count, len(fault.examples)) == (1, 1)
    assert findings.has_refused == (KINDS[kind][0] == REFUSED)
    if findings.has_refused:
        with pytest.raises(DataError):
            read_table(path, None)
    else:
        read_table(path, None)


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("unreadable annotation file", ("images",), {"1": "a.png"}),
        ("unreadable annotation file", ("annotations",), "none"),
        ("incomplete entry", ("categories", 0), "cat"),
        ("incomplete entry", ("annotations", 0), None),
        ("id that is no integer", ("images", 0, "id"), [1]),
        ("id that is no integer", ("images", 0, "id"), 2**64),
        ("id that is no integer", ("categories", 0, "id"), {}),
        ("image without a file name", ("images", 0, "file_name"), ""),
        ("image without a file name", ("images", 0, "file_name"), "\ud800.png"),
        ("image without a file name", ("images", 0, "file_name"), "a\0.png"),
        ("image without a size", ("images", 0, "height"), 10**30),
        ("image without a size", ("images", 0, "height"), "40"),
        ("unknown image", ("annotations", 0, "image_id"), [1]),
        ("unknown category", ("annotations", 0, "category_id"), None),
        ("malformed box", ("annotations", 0, "bbox"), [10**400, 5, 20.5, 10]),
        ("malformed box", ("annotations", 0, "bbox"), [-1e308, 5, 1e308, 10]),
        ("malformed box", ("annotations", 0, "bbox"), ["10", "5", "20", "10"]),
        ("malformed iscrowd", ("annotations", 0, "iscrowd"), [0]),
        ("malformed area", ("annotations", 0, "area"), "large"),
        ("malformed area", ("annotations", 0, "area"), [150]),
        ("malformed area", ("annotations", 0, "area"), float("inf")),
        ("box without area", ("annotations", 0, "bbox"), [50, 5, 1e-7, 10]),
    ],
)
def test_values_of_any_type_end_in_a_line(write_json, sound, kind, path, value):
    put(*path, value)(sound)
    path = write_json(sound)
    findings, _ = examine_annotations(path)
    assert findings.faults[kind].count == 1
    if findings.has_refused:
        with pytest.raises(DataError) as caught:
            read_table(path, None)
        assert "\n" not in str(caught.value)
    else:
        areas = read_table(path, None).areas
        assert areas[0] == 200 or kind == "box without area"


def test_ids_of_tables_are_numbers(write_json, sound):
    sound["annotations"][0].update(image_id=1.0, category_id=3.0)
    path = write_json(sound)
    assert examine_annotations(path)[0].faults == {}
    assert read_table(path, None).labels.tolist() == [0, 0]


def test_what_is_sound_is_examined_beside_what_is_not(write_json, sound):
    """A fault does not hide others: what a person mends in one go needs one look."""
    sound["images"].append({"id": 3, "file_name": "c.png", "height": 0, "width": 60})
    sound["images"].append({"id": 4, "file_name": "d.png", "width": 60})
    sound["annotations"] += [
        {**sound["annotations"][0], "id": 3, "bbox": [1, 2, 3]},
        {**sound["annotations"][0], "id": 4, "bbox": None, "category_id": 8},
        {**sound["annotations"][0], "id": 5, "image_id": 3},
        {**sound["annotations"][0], "id": 6, "bbox": [50, 5, 20, 10]},
        {**sound["annotations"][0], "id": 7, "image_id": 4},
    ]
    findings, table = examine_annotations(write_json(sound))
    assert {kind: fault.count for kind, fault in findings.faults.items()} == {
        "incomplete entry": 1,
        "image without a size": 1,
        "malformed box": 2,
        "unknown category": 1,
        "box beyond the image": 1,
    }
    assert table.image_ids.tolist() == [1, 2]
    assert len(table.boxes_xywh) == 3


def test_splits_are_compared(write_json, sound, tmp_path):
    train = read_table(write_json(sound), None)
    sound["categories"].append({"id": 9, "name": "dog"})
    sound["images"][1]["file_name"] = "c.png"
    val = read_table(write_json(sound), None)
    findings = Findings()
    compare_splits(train, tmp_path, val, tmp_path, findings)
    assert {kind: fault.examples for kind, fault in findings.faults.items()} == {
        "categories that differ from training": ["category 9 (dog) is in validation alone"],
        "file of training and validation": ["a.png"],
    }
    assert findings.has_refused
    apart = Findings()
    compare_splits(train, tmp_path / "train", train, tmp_path / "val", apart)
    assert apart.faults == {}


def test_examples_are_few_and_short():
    findings = Findings()
    findings.add_all("crowd", ["x" * 1000] * 9)
    fault = findings.faults["crowd"]
    assert (fault.count, len(fault.examples), fault.severity) == (9, MAX_EXAMPLES, NOTED)
    assert len(fault.examples[0]) == MAX_LETTERS + len("...")


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
        "unreadable image file": 1,
        "image of another size": 1,
    }
    assert findings.faults["missing image file"].examples == ["absent.jpg"]
    assert sum(steps) == 5
    assert findings.as_json()[0]["severity"] == REFUSED
    assert json.loads(report_json({"train": findings}))["train"][0]["count"] == 1
    with pytest.raises(DataError, match=r"got no absent\.jpg \(1 of 6 are missing\)"):
        require_files(table.file_names, tmp_path)


def test_every_kind_has_a_test():
    splits = {"categories that differ from training", "file of training and validation"}
    files = {"missing image file", "unreadable image file", "image of another size"}
    files |= {"image that is not RGB", "image with an orientation tag"}
    assert set(FAULTS) | files | splits == set(KINDS)


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("coco_train2017_200365_zero_height", {"box without area"}),
        ("detr_issue28_uuid_ids", {"id that is no integer"}),
        ("mmdetection_issue804_no_area", {"missing area"}),
    ],
)
def test_reported_files(odd_inputs, name, kinds):
    findings, _ = examine_annotations(odd_inputs / "json" / f"{name}.json")
    assert set(findings.faults) == kinds
