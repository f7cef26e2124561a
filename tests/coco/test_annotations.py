import logging

import pytest

from coco.annotations import Category, read_annotations, read_categories, read_table


def test_categories_are_sorted_by_id(write_json, content):
    expected = (Category(0, "ant"), Category(4, "bee"), Category(9, "cat"))
    assert read_categories(write_json(content)) == expected


def test_annotations_are_renumbered_repaired_and_counted(write_json, content, caplog):
    with caplog.at_level(logging.WARNING):
        index = read_annotations(write_json(content), limit=None)
    annotations = index.dataset["annotations"]
    assert [a["id"] for a in annotations] == [1, 2, 3, 4]
    assert annotations[1]["area"] == 400
    assert annotations[1]["iscrowd"] == 0
    assert annotations[0]["area"] == 150
    assert annotations[2]["iscrowd"] == 1
    (record,) = caplog.records
    assert "dropped 2 boxes" in record.message


def test_limit_keeps_the_first_images_by_id(write_json, content):
    index = read_annotations(write_json(content), limit=2)
    assert sorted(index.imgs) == [7, 12]
    assert {a["image_id"] for a in index.dataset["annotations"]} == {7}


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("annotations", 0, "id"), "c33c3539", "annotation id must be an integer, got 'c33c3539'"),
        (("images", 0, "id"), "7", "image id must be an integer, got '7'"),
        (("categories", 0, "id"), "9", "category id must be an integer, got '9'"),
        (("annotations", 0, "category_id"), 5, "category_id must be one that the file lists, got 5"),
        (("annotations", 0, "image_id"), 99, "image_id must be one that the file lists, got 99"),
        (("categories", 0, "id"), 0, "category ids must be distinct"),
        (("categories", 0, "name"), None, "category name must be text, got None for category 9"),
        (("images", 0, "file_name"), None, "file_name must be the name of a file, got None for image 30"),
        (("annotations", 0, "iscrowd"), "0", "iscrowd must be 0 or 1, got '0' in annotation 0"),
        (("images", 0, "id"), 7, "image ids must be distinct, got 7 for"),
        (("annotations", 3, "bbox"), [1, 2, 3], r"bbox must be four finite numbers .* got \[1, 2, 3\] in annotation 8"),
        (("annotations", 3, "bbox"), [1, 2, float("nan"), 3], "bbox must be four finite numbers"),
        (("annotations", 3, "bbox"), None, "bbox must be four finite numbers"),
        (("images", 0, "height"), 0, "integers above 0, got 0 and 60 for image 30"),
        (("images", 0, "width"), None, "image height and width must be integers above 0, got 40 and None for image 30"),
    ],
)
def test_defects_are_refused_in_one_line(write_json, content, path, value, message):
    key, index, field = path
    content[key][index][field] = value
    with pytest.raises(ValueError, match=message) as caught:
        read_annotations(write_json(content), limit=None)
    assert "\n" not in str(caught.value)


def test_absent_and_foreign_files_are_named(tmp_path, write_json):
    with pytest.raises(ValueError, match=r"must exist, got .*absent\.json"):
        read_categories(tmp_path / "absent.json")
    with pytest.raises(ValueError, match="without annotations, categories"):
        read_categories(write_json({"images": []}))
    (tmp_path / "cut.json").write_text('{"images": [')
    with pytest.raises(ValueError, match=r"must be JSON, got .*cut\.json"):
        read_categories(tmp_path / "cut.json")


@pytest.mark.parametrize(("kind", "key"), [("images", "file_name"), ("annotations", "bbox"), ("categories", "name")])
def test_incomplete_entries_are_named(write_json, content, kind, key):
    del content[kind][1][key]
    with pytest.raises(ValueError, match=rf"every entry of {kind} must have .*, got no {key} in entry 1 of"):
        read_annotations(write_json(content), limit=None)


@pytest.mark.parametrize("entry", ["a.png", None, [1, 2]])
def test_entries_that_are_no_objects_are_named(write_json, content, entry):
    content["images"][1] = entry
    with pytest.raises(ValueError, match=f"got {type(entry).__name__} in place of an object in entry 1 of"):
        read_annotations(write_json(content), limit=None)


@pytest.mark.parametrize("kind", ["images", "categories"])
def test_empty_lists_are_named(write_json, content, kind):
    content.update({kind: [], "annotations": []})
    with pytest.raises(ValueError, match=f"{kind} must be at least one, got none"):
        read_annotations(write_json(content), limit=None)


@pytest.mark.parametrize("area", [-150, "large", [150], float("inf"), float("nan"), None])
def test_an_area_that_is_none_becomes_that_of_the_box(write_json, content, area):
    """COCOeval would ignore a box of negative or infinite area in silence."""
    content["annotations"][0]["area"] = area
    assert read_table(write_json(content), limit=None).areas[0] == 20 * 10


def test_boxes_without_area_in_float32_are_dropped(write_json, content):
    content["annotations"][0]["bbox"] = [50, 5, 1e-7, 10]
    assert len(read_table(write_json(content), limit=None).labels) == 3


def test_a_byte_order_mark_is_no_fault_and_deep_nesting_is_told(tmp_path, write_json, content):
    path = write_json(content)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert len(read_categories(path)) == 3
    (tmp_path / "deep.json").write_text("[" * 10**5)
    with pytest.raises(ValueError, match=r"must be JSON, got .*deep\.json"):
        read_categories(tmp_path / "deep.json")


def test_a_limit_below_one_is_refused(write_json, content):
    with pytest.raises(ValueError, match="limit must be at least 1 image, got 0"):
        read_annotations(write_json(content), limit=0)


def test_files_from_public_bug_reports(odd_inputs):
    folder = odd_inputs / "json"
    zero_height = read_annotations(folder / "coco_train2017_200365_zero_height.json", limit=None)
    assert len(zero_height.anns) == 3
    without_area = read_annotations(folder / "mmdetection_issue804_no_area.json", limit=None)
    assert without_area.anns[1]["area"] == pytest.approx(26.72 * 26.41)
    with pytest.raises(ValueError, match="annotation id must be an integer"):
        read_annotations(folder / "detr_issue28_uuid_ids.json", limit=None)


def test_first_32_validation_images_of_coco_have_304_boxes(coco_subset):
    index = read_annotations(coco_subset / "annotations" / "instances_val2017.json", limit=32)
    assert len(index.imgs) == 32
    assert sum(not a["iscrowd"] for a in index.anns.values()) == 304
    assert sum(a["iscrowd"] for a in index.anns.values()) == 3
