import json

import pytest

from coco.findings import Findings
from coco.synthetic import SyntheticSpec, write_synthetic_dataset
from scripts.doctor import main, show


@pytest.fixture
def folder(tmp_path):
    return write_synthetic_dataset(SyntheticSpec(num_train=3, num_val=2, image_size=48, seed=0), tmp_path)


def words(folder):
    paths = {name: f"annotations/instances_{name}.json" for name in ("train", "val")}
    return ["data=coco", f"data.root={folder}", *(f"data.{name}_json={path}" for name, path in paths.items()),
            "data.train_images=train", "data.val_images=val", "--workers=1"]  # fmt: skip


def test_the_exit_status_says_whether_training_takes_the_data(folder, tmp_path, capsys):
    report = tmp_path / "out" / "report.json"
    assert main([*words(folder), f"--json={report}"]) == 0
    assert set(json.loads(report.read_text())) == {"train", "val"}
    next((folder / "train").iterdir()).unlink()
    assert main([*words(folder), "--annotations-only"]) == 0
    capsys.readouterr()
    assert main(words(folder)) == 1
    assert "missing image file" in capsys.readouterr().out.replace("\n", " ")


def test_data_without_faults_gets_a_line_and_no_table(capsys):
    faulty = Findings()
    faulty.add("missing image file", "a.jpg")
    show({"train": Findings(), "val": faulty})
    first, second, *_ = (line.strip() for line in capsys.readouterr().out.splitlines())
    assert first == "train: nothing found"
    assert second == "val: what was found"


def test_absent_data_is_told_in_a_line(tmp_path, capsys):
    assert main(["data=coco", f"data.root={tmp_path}"]) == 1
    assert capsys.readouterr().err.startswith("error: annotation files and image folders must exist")


def test_categories_of_both_files_must_agree(folder, tmp_path):
    path = folder / "annotations" / "instances_val.json"
    content = json.loads(path.read_text())
    content["categories"].append({"id": 99, "name": "unicorn"})
    path.write_text(json.dumps(content))
    report = tmp_path / "report.json"
    assert main([*words(folder), "--annotations-only", f"--json={report}"]) == 1
    (fault,) = (row for row in json.loads(report.read_text())["val"] if row["severity"] == "refused")
    assert (fault["kind"], fault["count"]) == ("categories that differ from training", 1)


def test_files_are_examined_beside_faults_of_annotations(folder, tmp_path):
    path = folder / "annotations" / "instances_train.json"
    content = json.loads(path.read_text())
    content["annotations"][0]["category_id"] = 1234
    path.write_text(json.dumps(content))
    next((folder / "train").iterdir()).unlink()
    report = tmp_path / "report.json"
    assert main([*words(folder), f"--json={report}"]) == 1
    found = {fault["kind"]: fault["count"] for fault in json.loads(report.read_text())["train"]}
    assert (found["unknown category"], found["missing image file"]) == (1, 1)


def test_names_of_files_are_no_markup(capsys):
    findings = Findings()
    findings.add("missing image file", "[/red] [bold]a.jpg")
    show({"train": findings})
    assert "[/red] [bold]a.jpg" in capsys.readouterr().out


def test_wrong_words_are_told_in_a_line(capsys):
    for word in ("data=nowhere", "data.rooot=x", "data.size_divisor=="):
        assert main([word]) == 1
        assert capsys.readouterr().err.startswith("error: ")
