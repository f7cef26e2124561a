"""Two GPUs against one; without them, two processes of a CPU, and every training that it would start."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from coco.annotations import read_table
from scripts import scaling
from scripts.scaling import SIZE_HW, checkpoint_of, compare_detections, main, median_rate, write_images

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


def jobs_of(words):
    """Composes the jobs of a sweep, as Hydra would, each with its folder."""
    sweep = next(word for word in words if word.startswith("experiment="))
    folder = Path(next(word for word in words if word.startswith("hydra.sweep.dir=")).partition("=")[2])
    rest = [word for word in words if word not in ("--multirun", sweep) and not word.startswith("hydra.sweep.")]
    for name in sweep.partition("=")[2].split(","):
        with initialize_config_dir(str(CONFIGS), version_base="1.3"):
            yield compose("train", overrides=[*rest, f"experiment={name}"]), folder / name


def stand_in(monkeypatch, found=FOUND, found_again=FOUND, rate_of_two=39.0, loss=8.0):
    """Composes every job instead of running it, and leaves the files of a run; returns the configurations."""
    composed = {}

    def run(words):
        for cfg, run_dir in jobs_of(words):
            composed[run_dir.parent.name, run_dir.name] = cfg
            run_dir.mkdir(parents=True)
            rate = rate_of_two if cfg.trainer.devices == 2 else 20.0
            curve = [{"step": step, "img_per_s": rate if step > 10 else 1.0} for step in range(5, 55, 5)]
            summary = {"curve": curve, "loss_first": 9.0, "loss_last": loss, "validation": {"val/AP": 0.25}}
            if cfg.mode == "train":
                (run_dir / "summary.json").write_text(json.dumps(summary))
            rows = found_again if cfg.mode == "validate" else found
            (run_dir / "detections_val.json").write_text(json.dumps(rows))

    monkeypatch.setattr(scaling, "run", run)
    claim_two_gpus(monkeypatch)
    return composed


def claim_two_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a card")


@pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for GPUs")
@pytest.mark.parametrize(
    ("changes", "passed"),
    [
        ({}, True),
        ({"rate_of_two": 37.0}, False),
        ({"loss": float("nan")}, False),
        ({"found": [], "found_again": []}, False),
        ({"found_again": CHANGED["score"]}, False),
    ],
)
def test_speed_losses_and_evaluation_are_judged(monkeypatch, tmp_path, changes, passed):
    stand_in(monkeypatch, **changes)
    out = tmp_path / "results" / "scaling.json"
    assert main(["--coco", str(tmp_path), "--out", str(out)]) == int(not passed)
    result = json.loads(out.read_text())
    assert result["passed"] == passed
    assert result["losses_finite"] == ("loss" not in changes)
    assert result["evaluation_equals_one_gpu"] == (not changes.keys() & {"found", "found_again"})
    assert result["speed_up"] == pytest.approx(changes.get("rate_of_two", 39.0) / 20)
    assert result["evaluation"] == {"val/AP": 0.25}


@pytest.mark.parametrize("changed", CHANGED)
def test_detections_that_differ_are_seen(tmp_path, changed):
    for name, rows in {"one": FOUND, "same": FOUND, "other": CHANGED[changed]}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "detections_val.json").write_text(json.dumps(rows))
    assert compare_detections(tmp_path / "one", tmp_path / "same")[0]
    assert not compare_detections(tmp_path / "one", tmp_path / "other")[0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for GPUs")
def test_jobs_are_what_is_compared(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    composed = stand_in(monkeypatch)
    main(["--coco", "coco", "--workers", "3"])
    assert list(composed) == [("several", "timed"), ("several", "subset"), ("alone", "timed"), ("alone", "again")]
    data, trainers = ([OmegaConf.to_container(cfg)[key] for cfg in composed.values()] for key in ("data", "trainer"))
    assert data[0] == data[2]
    assert data[0]["batch_size"] == 4
    assert data[1] == data[3]
    assert Path(data[1]["root"]) == tmp_path / "coco"  # absolute: train.py runs elsewhere
    assert [trainer["devices"] for trainer in trainers] == [2, 2, 1, 1]
    assert [trainer["max_steps"] for trainer in trainers] == [50, -1, 50, -1]
    assert {cfg.data.num_workers for cfg in composed.values()} == {3}
    again = composed["alone", "again"]
    checkpoint = Path(again.model.weights)
    assert checkpoint == checkpoint_of(checkpoint.parents[3])
    assert composed["several", "subset"].callbacks.last_checkpoint is not None


@pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for GPUs")
def test_several_gpus_train_by_the_trainer_asked_for(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    composed = stand_in(monkeypatch)
    main(["--coco", "coco", "--trainer", "ddp_graphs", "op=triton", "precision=bf16", "cuda_graphs=true"])
    assert {cfg.cuda_graphs for cfg in composed.values()} == {True}
    strategies = [cfg.trainer.get("strategy") for cfg in composed.values()]
    assert [strategy["_target_"].split(".")[-1] for strategy in strategies[:2]] == ["GradientAveragingStrategy"] * 2
    assert strategies[2:] == ["auto", "auto"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for GPUs")
@pytest.mark.parametrize("lost", ["several", "alone"])
def test_a_sweep_that_fails_leaves_what_is_known(monkeypatch, tmp_path, lost):
    stand_in(monkeypatch)
    complete = scaling.run

    def run(words):
        if any(word.endswith(f"/{lost}") for word in words):
            raise subprocess.CalledProcessError(1, "train.py")
        complete(words)

    monkeypatch.setattr(scaling, "run", run)
    out = tmp_path / "scaling.json"
    with pytest.raises(subprocess.CalledProcessError):
        main(["--coco", str(tmp_path), "--out", str(out)])
    result = json.loads(out.read_text())
    assert result["passed"] is False
    assert "speed_up" not in result
    assert result.get("img_per_s_all") == (None if lost == "several" else 39.0)
    assert len(result["losses"]) == (0 if lost == "several" else 4)


def test_first_steps_do_not_count():
    curve = [{"step": 5, "img_per_s": 1.0}, {"step": 10, "img_per_s": 2.0}, {"step": 15, "img_per_s": 8.0}]
    assert median_rate({"curve": [*curve, {"step": 20, "img_per_s": 10.0}]}) == 9.0


def write_coco(folder):
    """A data set of few small images where COCO has its own."""
    for split in ("train2017", "val2017"):
        write_images(folder / split)
        (folder / "annotations").mkdir(exist_ok=True)
        (folder / split / "instances.json").rename(folder / "annotations" / f"instances_{split}.json")


def test_two_processes_train_and_detect_as_one_does(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    claim_two_gpus(monkeypatch)
    for name, value in {"SIZE_HW": (48, 64), "NUM_IMAGES": 5, "WARM_UP_STEPS": 2, "WINDOW_STEPS": 1}.items():
        monkeypatch.setattr(scaling, name, value)
    monkeypatch.setattr(scaling, "LEAST_STEPS", 4)
    write_coco(tmp_path / "coco")
    judge, sizes_of_worlds = scaling.judge, []

    def judge_and_keep(folder, gpus):
        sizes_of_worlds.append(json.loads((folder / "several" / "timed" / "manifest.json").read_text())["world_size"])
        again = folder / "alone" / "again" / "detections_val.json"
        if again.is_file():
            check_negative_control(folder / "several" / "subset", again)
        return judge(folder, gpus)

    monkeypatch.setattr(scaling, "judge", judge_and_keep)
    words = ["model=deformable_detr_tiny", "backbone=resnet18", "model.transformer.num_queries=20", "op=reference"]
    words += ["trainer.accelerator=cpu", "data.eval_transform.size=48", "data.eval_transform.max_size=64"]
    words += ["data/augmentation@data.train_transform=none", "data.size_divisor=32"]
    sizes = ["--steps", "4", "--coco-steps", "1", "--workers", "0", "--coco-images", "5"]
    out = tmp_path / "scaling.json"
    main(["--coco", str(tmp_path / "coco"), *sizes, "--out", str(out), *words])
    result = json.loads(out.read_text())
    assert sizes_of_worlds == [2, 2]
    assert result["evaluation_equals_one_gpu"], result["detections"]
    assert "bitwise equal" in result["detections"]
    assert result["losses_finite"]
    assert len(result["losses"]) == 6
    assert result["speed_up"] > 0
    assert "Starting with 2 processes" in capsys.readouterr().out


def check_negative_control(run_dir, again):
    rows = json.loads(again.read_text())
    assert {row["image_id"] for row in rows} == {1, 2, 3, 4, 5}
    rows[-1]["score"] += 1e-6
    changed = again.parent / "changed"
    changed.mkdir()
    (changed / again.name).write_text(json.dumps(rows))
    same, difference = compare_detections(run_dir, changed)
    assert not same
    assert "scores 1.0e-06" in difference


def test_lines_come_as_they_are_said_and_no_process_stays(monkeypatch, tmp_path, capsys):
    """A process that outlives train.py, as one that waits for a GPU's exchange, is ended."""
    orphan = "import os, time; print('begun', os.getpid(), flush=True); time.sleep(60)"
    program = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {orphan!r}]); time.sleep(3)"
    (tmp_path / "train.py").write_text(f"{program}; sys.exit(3)")
    monkeypatch.setattr(scaling, "ROOT", tmp_path)
    with pytest.raises(subprocess.CalledProcessError) as caught:
        scaling.run([])
    assert caught.value.returncode == 3
    said = re.fullmatch(r"\[ *[\d.]+ s\] begun (\d+)\n", capsys.readouterr().out)
    assert said
    deadline = time.monotonic() + 10
    while Path(f"/proc/{said[1]}").is_dir() and " Z " not in Path(f"/proc/{said[1]}/stat").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_stop_leaves_results_and_no_process(tmp_path):
    """SIGTERM to the program alone, in the middle of a sweep that would go on."""
    (tmp_path / "train.py").write_text("import os, time; print('begun', os.getpid(), flush=True); time.sleep(60)")
    program = (
        "import runpy, torch; torch.cuda.device_count = lambda: 2; torch.cuda.get_device_name = str; "
        f"runpy.run_path({str(tmp_path / 'scripts' / 'scaling.py')!r}, run_name='__main__')"
    )
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "scaling.py").write_text(Path(scaling.__file__).read_text())
    command = [sys.executable, "-c", program, "--coco", "absent", "--out", str(tmp_path / "scaling.json")]
    process = subprocess.Popen(command, cwd=CONFIGS.parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    said = next(line for line in process.stdout if "begun" in line)
    process.terminate()
    _, errors = process.communicate(timeout=30)
    assert errors.endswith("KeyboardInterrupt\n")
    assert process.returncode in (1, -signal.SIGINT)
    assert json.loads((tmp_path / "scaling.json").read_text())["passed"] is False
    pid = said.split()[-1]
    assert not Path(f"/proc/{pid}").is_dir() or " Z " in Path(f"/proc/{pid}/stat").read_text()


def test_too_few_gpus_and_steps_are_refused(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(SystemExit):
        main(["--coco", str(tmp_path)])
    assert "got 2 of 1" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--coco", str(tmp_path), "--gpus", "1", "--steps", "39"])
    assert "--steps must be at least 40, got 39" in capsys.readouterr().err


def test_drawn_images_are_a_data_set(monkeypatch, tmp_path):
    monkeypatch.setattr(scaling, "NUM_IMAGES", 1)
    write_images(tmp_path / "drawn")
    table = read_table(tmp_path / "drawn" / "instances.json", None)
    assert table.sizes_hw.tolist() == [list(SIZE_HW)]
    assert len(table.labels) == 2
