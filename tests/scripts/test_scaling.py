"""Two GPUs against one; without them, that every training it would start is one that train.py accepts."""

import json
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir

from coco.annotations import read_table
from scripts import scaling
from scripts.scaling import QUIET, SIZE_HW, compare_detections, main, train_and_validate, write_images

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


FOUND = [
    {"image_id": 1, "category_id": 3, "bbox": [10.0, 20.0, 30.0, 40.0], "score": 0.0123},
    {"image_id": 1, "category_id": 5, "bbox": [11.0, 20.0, 30.0, 40.0], "score": 0.0122},
    {"image_id": 2, "category_id": 3, "bbox": [12.0, 20.0, 30.0, 40.0], "score": 0.0121},
]
CHANGED = {
    "score": [*FOUND[:2], FOUND[2] | {"score": 0.01210001}],
    "box": [FOUND[0] | {"bbox": [10.0, 20.0, 30.001, 40.0]}, *FOUND[1:]],
    "category": [FOUND[0], FOUND[1] | {"category_id": 4}, FOUND[2]],
    "image": [*FOUND[:2], FOUND[2] | {"image_id": 3}],
    "missing": FOUND[:2],
    "twice": [*FOUND, FOUND[2]],
    "none": [],
}


def stand_in(monkeypatch, found=FOUND, found_again=FOUND, rate_of_two=39.0):
    """Composes every call instead of running it, and leaves the files of a run."""

    def run(run_dir, words):
        with initialize_config_dir(str(CONFIGS), version_base="1.3"):
            cfg = compose("train", overrides=words)
        run_dir.mkdir()
        rate = rate_of_two if cfg.trainer.devices == 2 else 20.0
        summary = {"img_per_s_median": rate, "loss_first": 9.0, "loss_last": 8.0, "validation": {"val/AP": 0.25}}
        (run_dir / "summary.json").write_text(json.dumps(summary))
        rows = found_again if cfg.mode == "validate" else found
        (run_dir / "detections_val.json").write_text(json.dumps(rows))

    monkeypatch.setattr(scaling, "run", run)
    monkeypatch.setattr(scaling, "NUM_IMAGES", 2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a card")


@pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for GPUs")
@pytest.mark.parametrize(
    ("changes", "passed"),
    [
        ({}, True),
        ({"rate_of_two": 37.0}, False),
        ({"found": [], "found_again": []}, False),
        *(({"found_again": rows}, False) for rows in CHANGED.values()),
    ],
)
def test_speed_and_evaluation_are_judged(monkeypatch, tmp_path, changes, passed):
    stand_in(monkeypatch, **changes)
    out = tmp_path / "results" / "scaling.json"
    assert main(["--coco", str(tmp_path), "--out", str(out)]) == int(not passed)
    result = json.loads(out.read_text())
    assert result["passed"] == passed
    assert result["evaluation_equals_one_gpu"] == (passed or "rate_of_two" in changes)
    assert result["speed_up"] == pytest.approx(changes.get("rate_of_two", 39.0) / 20)


def test_two_processes_detect_as_one_does(monkeypatch, tmp_path):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TRITON_DETR_CACHE", str(tmp_path))
    words = [*QUIET, "data.num_train=4", "data.num_val=5", "data.image_size=64", "data.batch_size=2"]
    words += ["data.eval_batch_size=1", "data.num_workers=0", "model.transformer.num_queries=20", "backbone.norm=group"]
    two = ["trainer=ddp", "trainer.accelerator=cpu"]
    summary = train_and_validate(tmp_path, [*words, "callbacks.plots=null"], two, ["trainer=cpu"])
    assert summary["manifest"]["world_size"] == 2
    same, difference = compare_detections(tmp_path / "coco", tmp_path / "again")
    assert same, difference
    assert "bitwise equal" in difference

    rows = json.loads((tmp_path / "again" / "detections_val.json").read_text())
    assert {row["image_id"] for row in rows} == {1, 2, 3, 4, 5}
    rows[-1]["score"] += 1e-6
    (tmp_path / "again" / "detections_val.json").write_text(json.dumps(rows))
    same, difference = compare_detections(tmp_path / "coco", tmp_path / "again")
    assert not same
    assert "scores 1.0e-06" in difference


def test_a_machine_with_too_few_gpus_is_refused(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(SystemExit):
        main(["--coco", str(tmp_path)])
    assert "got 2 of 1" in capsys.readouterr().err


def test_drawn_images_are_a_data_set(monkeypatch, tmp_path):
    monkeypatch.setattr(scaling, "NUM_IMAGES", 1)
    write_images(tmp_path / "drawn")
    table = read_table(tmp_path / "drawn" / "instances.json", None)
    assert table.sizes_hw.tolist() == [list(SIZE_HW)]
    assert len(table.labels) == 2
