"""Two GPUs against one; without them, that every training it would start is one that train.py accepts."""

import json
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir

from coco.annotations import read_table
from scripts import scaling
from scripts.scaling import SIZE_HW, main, write_images

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def stand_in(monkeypatch, ap_again="0.25", rate_of_two=39.0):
    """Composes every call instead of running it, and leaves the files of a run."""

    def run(run_dir, words):
        with initialize_config_dir(str(CONFIGS), version_base="1.3"):
            cfg = compose("train", overrides=words)
        run_dir.mkdir()
        rate = rate_of_two if cfg.trainer.devices == 2 else 20.0
        summary = {"img_per_s_median": rate, "loss_first": 9.0, "loss_last": 8.0, "validation": {"val/AP": 0.25}}
        (run_dir / "summary.json").write_text(json.dumps(summary))
        ap = ap_again if cfg.mode == "validate" else "0.25"
        (run_dir / "per_class_ap.csv").write_text(f"epoch,step,category_id,AP\n0,{len(words)},1,{ap}\n")

    monkeypatch.setattr(scaling, "run", run)
    monkeypatch.setattr(scaling, "NUM_IMAGES", 2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a card")


@pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for GPUs")
@pytest.mark.parametrize(
    ("changes", "passed"), [({}, True), ({"ap_again": "0.24"}, False), ({"rate_of_two": 37.0}, False)]
)
def test_speed_and_evaluation_are_judged(monkeypatch, tmp_path, changes, passed):
    stand_in(monkeypatch, **changes)
    out = tmp_path / "results" / "scaling.json"
    assert main(["--coco", str(tmp_path), "--out", str(out)]) == int(not passed)
    result = json.loads(out.read_text())
    assert result["passed"] == passed
    assert result["speed_up"] == pytest.approx(changes.get("rate_of_two", 39.0) / 20)


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
