"""The main job from the command line, as a user types it."""

import csv
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

import train
from models.errors import UnfitSettingError

ROOT = Path(__file__).resolve().parent.parent
TINY = [
    "debug=smoke",
    "trainer=cpu",
    "logger=csv",
    "callbacks.progress=null",
    "callbacks.plots=null",
    "callbacks.evaluation_plots=null",
    "data.image_size=64",
    "data.num_train=8",
    "data.num_val=7",
    "model.transformer.num_queries=20",
]

TINY_COCO = [
    *(word for word in TINY if not word.startswith(("data.", "debug="))),
    "data=coco",
    "model=deformable_detr_tiny",
    "backbone=resnet18",
    "data/augmentation@data.train_transform=light",
    "data.eval_transform.size=64",
    "data.eval_transform.max_size=64",
    "data.size_divisor=1",
    "data.eval_batch_size=8",
    "data.num_workers=0",
]


def summary_of(run_dir: Path) -> dict:
    return json.loads((run_dir / "summary.json").read_text())


def detections_of(run_dir: Path) -> list[tuple]:
    rows = json.loads((run_dir / "detections_val.json").read_text())
    return sorted((row["image_id"], round(row["score"], 5), *(round(x, 2) for x in row["bbox"])) for row in rows)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def run_train(run_command, cache):
    """Runs `train.py` with overrides and variables; the synthetic data of all runs lies in one folder."""
    return partial(run_command, str(ROOT / "train.py"), folder=cache, TRITON_DETR_CACHE=str(cache))


@pytest.fixture(scope="module")
def smoke_run(run_train, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("smoke") / "run"
    drawn = [override for override in TINY if "plots" not in override]
    result = run_train(*drawn, f"hydra.run.dir={run_dir}")
    assert result.returncode == 0, result.stderr
    return run_dir


def test_a_run_leaves_logs_tables_pictures_and_checkpoints(smoke_run):
    rows = list(csv.DictReader((smoke_run / "csv" / "metrics.csv").open()))
    assert any(row["train/loss"] for row in rows)
    assert any(row["val/AP50"] for row in rows)
    assert len((smoke_run / "per_class_ap.csv").read_text().splitlines()) == 1 + 6
    assert [file.suffix for file in (smoke_run / "predictions").iterdir()] == [".jpg"]
    pictures = {file.name for file in (smoke_run / "plots").iterdir()}
    assert pictures >= {"sampling.png", "worst.jpg"}
    assert {file.name for file in (smoke_run / "checkpoints").iterdir()} == {"best.ckpt", "last.ckpt"}
    manifest = json.loads((smoke_run / "manifest.json").read_text())
    assert manifest["environment"]["packages"]["torch"]
    assert manifest["config"]["trainer"]["max_epochs"] == 1
    assert len(manifest["categories"]) == 6
    assert summary_of(smoke_run)["steps"] == 2


def test_checkpoints_load_without_running_code(smoke_run):
    checkpoint = torch.load(smoke_run / "checkpoints" / "last.ckpt", weights_only=True)
    assert checkpoint["categories"][0].keys() == {"id", "name"}
    assert checkpoint["config"]["num_classes"] == 6


def test_a_resumed_run_goes_on_where_the_first_stopped(run_train, smoke_run, tmp_path):
    ckpt_path = smoke_run / "checkpoints" / "last.ckpt"
    result = run_train(*TINY, f"ckpt_path={ckpt_path}", "trainer.max_epochs=2", f"hydra.run.dir={tmp_path / 'run'}")
    assert result.returncode == 0, result.stderr
    assert summary_of(tmp_path / "run")["steps"] == 4
    assert [point["step"] for point in summary_of(tmp_path / "run")["curve"]] == [4]


def test_validation_on_two_processes_equals_one(run_train, smoke_run, tmp_path):
    """Seven images: the sampler repeats one for the second process, which must not count twice."""
    weights = f"model.weights={smoke_run / 'checkpoints' / 'last.ckpt'}"
    found = {}
    for name, trainer in {"one": ["trainer=cpu"], "two": ["trainer=ddp", "trainer.accelerator=cpu"]}.items():
        run_dir = tmp_path / name
        result = run_train(
            *TINY, *trainer, "mode=validate", weights, "data.eval_batch_size=1", f"hydra.run.dir={run_dir}"
        )
        assert result.returncode == 0, result.stderr
        found[name] = detections_of(run_dir), (run_dir / "per_class_ap.csv").read_text()
    assert len(found["one"][0]) == 7 * 100
    assert found["one"] == found["two"]


@pytest.fixture(scope="module")
def drawn(cache, smoke_run):
    """The validation split of the synthetic data that the smoke run drew: its content, and words that train on it."""
    (folder,) = (path.parent.parent for path in (cache / "synthetic").glob("*/annotations/instances_val.json"))
    words = [*TINY_COCO, *(f"data.{split}_images={folder / 'val'}" for split in ("train", "val"))]
    return (folder / "annotations" / "instances_val.json").read_text(), words


def write_annotations(path, content):
    path.write_text(json.dumps(content))
    return [f"data.{split}_json={path}" for split in ("train", "val")]


@pytest.mark.parametrize("key", ["ckpt_path", "model.weights"])
def test_validation_finds_categories_by_their_names(run_train, smoke_run, drawn, tmp_path, key):
    text, words = drawn
    content = json.loads(text)
    for row in content["categories"]:
        row["id"] = 1000 - row["id"]
    for row in content["annotations"]:
        row["category_id"] = 1000 - row["category_id"]
    weights = f"{key}={smoke_run / 'checkpoints' / 'last.ckpt'}"
    words = [*words, "mode=validate", weights, f"hydra.run.dir={tmp_path / 'run'}"]
    result = run_train(*words, *write_annotations(tmp_path / "renumbered.json", content))
    assert result.returncode == 0, result.stderr
    assert "matched to the classes of" in result.stdout + result.stderr
    expected = json.loads((smoke_run / "detections_val.json").read_text())
    found = json.loads((tmp_path / "run" / "detections_val.json").read_text())
    assert [1000 - row["category_id"] for row in found] == [row["category_id"] for row in expected]
    assert [row["score"] for row in found] == pytest.approx([row["score"] for row in expected], abs=1e-5)
    content["categories"][0]["name"] = "cat"
    refused = run_train(*words, *write_annotations(tmp_path / "other.json", content))
    assert refused.returncode == 1
    message = (
        r"error: the data must have the 6 categories of .*last.ckpt, got 6 without \w+, with the new cat; validate"
    )
    assert re.match(message, refused.stderr.strip().splitlines()[-1])


def test_processes_without_targets_train(run_train, drawn, tmp_path):
    """One image of four has boxes: in one of two steps one process has targets, in the other none."""
    text, words = drawn
    content = json.loads(text)
    shown = content["annotations"][0]["image_id"]
    images = sorted(content["images"], key=lambda image: image["id"] != shown)[:4]
    boxes = [row for row in content["annotations"] if row["image_id"] == shown and not row["iscrowd"]]
    assert boxes
    words = [*words, *write_annotations(tmp_path / "a.json", {**content, "images": images, "annotations": boxes})]
    words += ["trainer=ddp", "trainer.accelerator=cpu", "data.batch_size=1", "trainer.max_epochs=1"]
    words += ["trainer.log_every_n_steps=1", "trainer.num_sanity_val_steps=0"]
    result = run_train(*words, f"hydra.run.dir={tmp_path / 'run'}")
    assert result.returncode == 0, result.stderr
    rows = list(csv.DictReader((tmp_path / "run" / "csv" / "metrics.csv").open()))
    losses = [float(row["train/loss"]) for row in rows if row["train/loss"]]
    assert len(losses) == summary_of(tmp_path / "run")["steps"] == 2
    assert all(map(math.isfinite, losses))
    checkpoint = torch.load(tmp_path / "run" / "checkpoints" / "last.ckpt", weights_only=True)
    assert all(value.isfinite().all() for value in checkpoint["state_dict"].values())


def test_training_on_two_processes_runs(run_train, tmp_path):
    run_dir = tmp_path / "run"
    overrides = ["trainer=ddp", "trainer.accelerator=cpu", "data.batch_size=2", f"hydra.run.dir={run_dir}"]
    result = run_train(*TINY, *overrides)
    assert result.returncode == 0, result.stderr
    summary = summary_of(run_dir)
    assert summary["steps"] == 2
    assert summary["manifest"]["world_size"] == 2
    assert [folder.name for folder in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize(
    "trainer", [["data.num_workers=1"], ["trainer=ddp", "trainer.accelerator=cpu"]], ids=["one", "two"]
)
def test_ctrl_c_saves_and_says_how_to_go_on(run_train, trainer, cache, tmp_path):
    """A terminal sends the signal to all processes of the command, loader workers included."""
    run_dir = tmp_path / "run"
    overrides = [*TINY, *trainer, "data.batch_size=1", "trainer.max_epochs=1000", "trainer.limit_val_batches=1"]
    command = [sys.executable, str(ROOT / "train.py"), *overrides, f"hydra.run.dir={run_dir}"]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_DETR_CACHE": str(cache)}
    process = subprocess.Popen(
        command, cwd=cache, env=variables, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    last = run_dir / "checkpoints" / "last.ckpt"
    while not last.exists():
        assert process.poll() is None
        time.sleep(0.1)
    evaluated = last.stat().st_mtime_ns
    os.killpg(process.pid, signal.SIGINT)
    _, messages = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT
    assert "Traceback" not in messages
    assert last.stat().st_mtime_ns > evaluated
    steps = torch.load(last, weights_only=True)["global_step"]
    stopped = re.findall(
        r"^stopped and saved after (\d+) steps; to go on: python train.py (.*)$", messages, re.MULTILINE
    )
    assert [int(number) for number, _ in stopped] == [steps]
    again = [*shlex.split(stopped[0][1]), f"trainer.max_steps={steps + 1}"]
    assert f"ckpt_path={last}" in again
    result = run_train(*again)
    assert result.returncode == 0, result.stderr
    assert summary_of(run_dir)["steps"] == steps + 1


def interrupt(cfg):
    raise KeyboardInterrupt


def exit_as_the_trainer_does(cfg):
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        sys.exit(1)


@pytest.mark.parametrize(("run", "status"), [(interrupt, 130), (exit_as_the_trainer_does, 130), (sys.exit, "error")])
def test_ctrl_c_has_its_status_before_a_training_too(monkeypatch, run, status):
    monkeypatch.setattr(train, "run", run)
    with pytest.raises(SystemExit) as caught:
        train.main.__wrapped__("error")
    assert caught.value.code == status


class DeadWorkers:
    """A trainer whose loader dies, with SIGTERM for all or without."""

    world_size = 1
    callbacks = ()

    def __init__(self, received_sigterm):
        self.received_sigterm = received_sigterm

    def fit(self, *arguments, **settings):
        raise RuntimeError("DataLoader worker (pid 12) is killed by signal: Terminated. ")


@pytest.mark.parametrize("received_sigterm", [True, False])
def test_workers_that_die_of_the_run_s_own_sigterm_are_no_fault_of_the_loader(monkeypatch, capsys, received_sigterm):
    monkeypatch.setattr(train, "build", lambda cfg: (None, None, DeadWorkers(received_sigterm)))
    with pytest.raises(SystemExit) as caught:
        train.run(OmegaConf.create({"mode": "train", "ckpt_path": None}))
    if received_sigterm:
        assert caught.value.code == 143
        assert capsys.readouterr().err.startswith("stopped by SIGTERM, which loader workers got too")
    else:
        assert "loader workers must stay alive" in caught.value.code


FULL = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.99 GiB of which 1 GiB is free."


@pytest.mark.parametrize(
    ("raised", "message"),
    [
        (torch.OutOfMemoryError(FULL), "got: CUDA out of memory. Tried to allocate 2.00 GiB; lower data.batch_size"),
        (UnfitSettingError("num_queries must be less"), "error: num_queries must be less"),
    ],
)
def test_what_shows_only_when_a_batch_runs_ends_in_one_line(monkeypatch, raised, message):
    class Failing(DeadWorkers):
        def fit(self, *arguments, **settings):
            raise raised

    monkeypatch.setattr(train, "build", lambda cfg: (None, None, Failing(False)))
    with pytest.raises(SystemExit) as caught:
        train.run(OmegaConf.create({"mode": "train", "ckpt_path": None}))
    assert message in caught.value.code
    assert "\n" not in caught.value.code


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["op=triton", "data=coco", "data.root=/nowhere"], "op=triton cannot run here"),
        (["backbone.norm=layer"], "norm must be one of"),
        (["data=coco", "data.root=/nowhere"], "/nowhere"),
        (["data.batch_size=many"], "data.batch_size must be an integer of at least 1, got many"),
        (["trainer.devices=0"], r"devices=0.* not a valid"),
    ],
)
def test_wrong_settings_are_refused_in_a_line(run_train, overrides, message, tmp_path):
    result = run_train("trainer=cpu", *overrides, f"hydra.run.dir={tmp_path}", TRITON_INTERPRET="0")
    assert result.returncode == 1
    assert result.stderr.strip().splitlines()[-1].startswith("error: ")
    assert "Traceback" not in result.stderr
    assert re.search(message, result.stderr)


def test_optional_settings_run_together(run_train, tmp_path):
    run_dir = tmp_path / "run"
    result = run_train(
        *TINY,
        "ema=exponential",
        "early_stopping=best_ap",
        "precision=bf16",
        "trainer.accumulate_grad_batches=2",
        "model.transformer.gradient_checkpointing=true",
        f"hydra.run.dir={run_dir}",
    )
    assert result.returncode == 0, result.stderr
    assert summary_of(run_dir)["steps"] == 1
    checkpoint = torch.load(run_dir / "checkpoints" / "last.ckpt", weights_only=True)
    averaged, trained = checkpoint["state_dict"], checkpoint["current_model_state"]
    assert averaged.keys() == trained.keys()
