"""Tiny YOLO and VOC folders become the annotations that they mean."""

import json

import numpy as np
import pytest
from PIL import Image

from coco.annotations import read_table
from scripts.convert_annotations import main

OBJECT = """<object><name>{name}</name><difficult>{difficult}</difficult>
<bndbox><xmin>{box[0]}</xmin><ymin>{box[1]}</ymin><xmax>{box[2]}</xmax><ymax>{box[3]}</ymax></bndbox></object>"""


def draw(path, size_wh=(40, 20), orientation=1):
    path.parent.mkdir(parents=True, exist_ok=True)
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.new("RGB", size_wh).save(path, exif=exif)


@pytest.fixture
def yolo(tmp_path):
    draw(tmp_path / "images" / "a.jpg")
    draw(tmp_path / "images" / "more" / "b.jpg", orientation=6)
    draw(tmp_path / "images" / "empty.jpg")
    (tmp_path / "labels" / "more").mkdir(parents=True)
    (tmp_path / "labels" / "a.txt").write_text("1 0.5 0.5 0.5 0.5\n\n0 0.25 0.25 0.1 0.2\n")
    (tmp_path / "labels" / "more" / "b.txt").write_text("0 0.5 0.25 1 0.5")
    return tmp_path


@pytest.fixture
def voc(tmp_path):
    boxes = {"a": ("dog", 0, (1, 1, 40, 20)), "b": ("cat", 1, (11, 6, 20, 10))}
    (tmp_path / "xml").mkdir()
    for stem, (name, difficult, box) in boxes.items():
        draw(tmp_path / "images" / f"{stem}.jpg")
        text = OBJECT.format(name=name, difficult=difficult, box=box)
        text = f"<annotation><filename>{stem}.jpg</filename>{text}</annotation>"
        (tmp_path / "xml" / f"{stem}.xml").write_text(text)
    return tmp_path


def convert(kind, folder, labels, *more):
    out = folder / "out" / "instances.json"
    status = main([kind, str(folder / "images"), str(folder / labels), "--out", str(out), *more])
    return read_table(out, None) if status == 0 else None


def test_yolo(yolo, capsys):
    table = convert("yolo", yolo, "labels", "--names", "cat, dog")
    assert [(entry.id, entry.name) for entry in table.categories] == [(1, "cat"), (2, "dog")]
    assert [table.file_names[place] for place in range(3)] == ["a.jpg", "empty.jpg", "more/b.jpg"]
    assert table.sizes_hw.tolist() == [[20, 40], [20, 40], [40, 20]]
    np.testing.assert_allclose(table.boxes_xywh, [[10, 5, 20, 10], [8, 3, 4, 4], [0, 0, 20, 20]])
    assert table.labels.tolist() == [1, 0, 0]
    assert table.first_box.tolist() == [0, 2, 2, 3]
    assert "3 images, 3 boxes, classes cat, dog" in capsys.readouterr().out


def test_voc_counts_pixels_from_one_and_ignores_the_difficult(voc):
    table = convert("voc", voc, "xml")
    assert [entry.name for entry in table.categories] == ["cat", "dog"]
    np.testing.assert_allclose(table.boxes_xywh, [[0, 0, 40, 20], [10, 5, 10, 5]])
    assert table.labels.tolist() == [1, 0]
    assert table.is_crowd.tolist() == [False, True]


def test_voc_splits_share_the_names(voc):
    (voc / "train.txt").write_text("b  1\n\n")
    (voc / "names.txt").write_text("dog\ncat\n")
    table = convert("voc", voc, "xml", "--split", str(voc / "train.txt"), "--names", str(voc / "names.txt"))
    assert [entry.name for entry in table.categories] == ["dog", "cat"]
    assert (len(table.file_names), table.labels.tolist()) == (1, [1])


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.txt", "0 0.1 0.1 0.2 0.1 0.3 0.3", "line must be: class cx cy w h"),
        ("a.txt", "0.0 0.5 0.5 1 1", "line must be: class cx cy w h"),
        ("a.txt", "0 0.5 nan 1 1", "line must be: class cx cy w h"),
        ("a.txt", "2 0.5 0.5 1 1", "class must be one of the 2 names cat, dog, got 2"),
    ],
)
def test_wrong_yolo_lines_are_refused(yolo, name, text, message, capsys):
    (yolo / "labels" / name).write_text(text)
    assert convert("yolo", yolo, "labels", "--names", "cat,dog") is None
    assert f"error: {message}" in capsys.readouterr().err


def test_files_in_other_encodings(yolo, capsys):
    text = yolo / "labels" / "a.txt"
    text.write_bytes(b"\xef\xbb\xbf1 0.5 0.5 0.5 0.5\r\n")
    table = convert("yolo", yolo, "labels", "--names", "cat,dog")
    assert table.labels.tolist() == [1, 0]
    text.write_bytes(b"\xff\xfe0")
    assert convert("yolo", yolo, "labels", "--names", "cat,dog") is None
    assert "error: file must be text in UTF-8" in capsys.readouterr().err


def test_absent_paths_are_told_in_a_line(yolo, voc, capsys):
    """Without its labels a data set would become one of empty images."""
    assert convert("yolo", yolo, "label", "--names", "cat,dog") is None
    assert "error: label folder must exist" in capsys.readouterr().err
    assert convert("voc", voc, "xml", "--split", str(voc / "absent.txt")) is None
    assert "error: file must be text in UTF-8, got" in capsys.readouterr().err


def test_wrong_voc_files_are_refused(voc, capsys):
    for text, message in (
        ("<annotation>", "annotation file must be XML"),
        ("<annotation></annotation>", "annotation must hold filename"),
        (OBJECT.format(name="cat", difficult=0, box="abcd"), "bndbox must hold four numbers"),
        ("<object></object>", "object must hold name"),
    ):
        if text.startswith("<object"):
            text = f"<annotation><filename>a.jpg</filename>{text}</annotation>"
        (voc / "xml" / "a.xml").write_text(text)
        assert convert("voc", voc, "xml") is None
        assert f"error: {message}" in capsys.readouterr().err
    (voc / "xml" / "a.xml").unlink()
    assert convert("voc", voc, "xml", "--names", "bird") is None
    assert "class must be one of the 1 names bird, got cat" in capsys.readouterr().err
    (voc / "images" / "b.jpg").write_text("no picture")
    assert convert("voc", voc, "xml") is None
    assert "image file must be readable" in capsys.readouterr().err


def test_empty_folders_are_refused(tmp_path, capsys):
    (tmp_path / "images").mkdir()
    assert convert("yolo", tmp_path, "images", "--names", "cat") is None
    assert convert("voc", tmp_path, "images") is None
    assert json.dumps(capsys.readouterr().err).count("got none in") == 2
