"""Measures what a second GPU brings: `python -m scripts.scaling --coco /path/to/coco`, on a machine with two or more.

    python -m scripts.scaling --coco /path/to/coco                                          by CUDA graphs
    python -m scripts.scaling --coco /path/to/coco --trainer ddp op=triton precision=bf16   without them

Starts train.py twice, each time for a sweep of two jobs: several GPUs train on drawn images of 800x1333 with 4 images a
GPU, and then on COCO, which they evaluate; one GPU trains on the same drawn images, and evaluates the checkpoint of the
others. Images a second are compared, and all numbers of the detections. Each line is printed behind the seconds since
the start. Writes results/scaling.json after each sweep, also one that fails or is stopped, with what is known by then.

The exit status is 1 if a loss is not finite, a detection differs by a bit, there is none, or the speed-up is below 0.95
times the number of GPUs.
"""

import argparse
import contextlib
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from omegaconf import OmegaConf
from PIL import Image

from coco.shapes import draw_scene
from models.environment import describe_environment
from models.export.agreement import compare_results, describe_difference, read_results

ROOT = Path(__file__).resolve().parent.parent
SIZE_HW = (800, 1333)
NUM_IMAGES = 4
EPOCH_IMAGES = 100_000
"""Images that a timed training takes for an epoch, more than its steps need: no loader starts anew, none evaluates."""

WARM_UP_STEPS = 10
WINDOW_STEPS = 5
LEAST_STEPS = 40
MIN_EFFICIENCY = 0.95
MODEL = ("model=deformable_detr", "backbone=resnet50", "backbone.weights=none", "backbone.norm=group")
QUIET = (
    "logger=csv",
    "trainer.num_sanity_val_steps=0",
    *(f"callbacks.{name}=null" for name in ("progress", "plots", "evaluation_plots")),
    *(f"callbacks.{name}_checkpoint=null" for name in ("best", "step")),
)
_BEGAN = time.monotonic()


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs both sweeps and returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--coco", type=Path, required=True, help="COCO, or a part of it, in COCO's layout")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument(
        "--trainer", default="ddp_graphs", help="of several GPUs: ddp_graphs with cuda_graphs=true, ddp, or fsdp"
    )
    parser.add_argument(
        "--steps", type=int, default=50, help="steps of each timed training; the first ten do not count"
    )
    parser.add_argument("--coco-steps", type=int, default=10, help="steps of the training on COCO")
    parser.add_argument("--coco-images", type=int, default=32, help="images of COCO that are evaluated")
    parser.add_argument("--workers", type=int, default=6, help="loader processes of each GPU")
    parser.add_argument("--out", type=Path, default=Path("results/scaling.json"))
    parser.add_argument(
        "overrides", nargs="*", default=["op=triton", "precision=bf16", "cuda_graphs=true"], help="of train.py"
    )
    options = parser.parse_args(arguments)
    if torch.cuda.device_count() < options.gpus:
        parser.error(f"--gpus must be at most the machine's GPUs, got {options.gpus} of {torch.cuda.device_count()}")
    if options.steps < LEAST_STEPS:
        parser.error(f"--steps must be at least {LEAST_STEPS}, got {options.steps}")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        result = measure(options, Path(folder))
    print(json.dumps(result, indent=1))
    return int(not result["passed"])


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Runs both sweeps in a folder and judges them; the result file is written after each."""
    write_images(folder / "drawn")
    write_experiments(folder, options)
    common = ["data=coco", *MODEL, *QUIET, f"hydra.searchpath=[file://{folder}]"]
    common += [f"data.num_workers={options.workers}", f"trainer.log_every_n_steps={WINDOW_STEPS}"]
    sweeps = {
        "several": ["experiment=timed,subset", f"trainer={options.trainer}", f"trainer.devices={options.gpus}"],
        "alone": ["experiment=timed,again", "trainer=gpu"],
    }
    for name, words in sweeps.items():
        places = [f"hydra.sweep.dir={folder / name}", "hydra.sweep.subdir=${hydra:runtime.choices.experiment}"]
        say(f"{name}: {' '.join(words)}")
        try:
            run(["--multirun", *common, *words, *options.overrides, *places])
        finally:
            settings = [f"trainer={options.trainer}", *options.overrides]
            result = {"settings": settings, **judge(folder, options.gpus)}
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps({"environment": describe_environment(), **result}, indent=1) + "\n")
    return result


def write_experiments(folder: Path, options: argparse.Namespace) -> None:
    """Writes the three jobs as experiments that train.py finds below a folder: `timed`, `subset` and `again`.

    One image in a batch of the evaluation, so that no neighbour changes its padding.
    """
    paths = {
        f"{split}_{word}": value
        for split in ("train", "val")
        for word, value in (("json", "instances.json"), ("images", "."))
    }
    drawn = {"root": str(folder / "drawn"), **paths, "batch_size": 4, "repeat_train": EPOCH_IMAGES // NUM_IMAGES}
    coco = {
        "root": str(options.coco.absolute()),
        "batch_size": 2,
        "eval_batch_size": 1,
        "limit_val": options.coco_images,
    }
    experiments = {
        "timed": {
            "defaults": [{"override /data/augmentation@data.train_transform": "none"}],
            "data": drawn,
            "trainer": {"max_steps": options.steps, "limit_val_batches": 0},
            "callbacks": {"last_checkpoint": None},
        },
        "subset": {"data": coco, "trainer": {"max_epochs": 1, "limit_train_batches": options.coco_steps}},
        "again": {"data": coco, "mode": "validate", "model": {"weights": str(checkpoint_of(folder))}},
    }
    (folder / "experiment").mkdir()
    for name, content in experiments.items():
        (folder / "experiment" / f"{name}.yaml").write_text(f"# @package _global_\n{OmegaConf.to_yaml(content)}")


def checkpoint_of(folder: Path) -> Path:
    """The checkpoint of several GPUs, after their evaluation."""
    return folder / "several" / "subset" / "checkpoints" / "last.ckpt"


def judge(folder: Path, gpus: int) -> dict[str, Any]:
    """Returns what the run folders say, as far as there are any; `passed` is false unless all are there."""
    paths = {place: folder / place / "summary.json" for place in ("alone/timed", "several/timed", "several/subset")}
    summaries = {place: json.loads(path.read_text()) for place, path in paths.items() if path.is_file()}
    losses = [summary[name] for summary in summaries.values() for name in ("loss_first", "loss_last")]
    finite = all(math.isfinite(loss) for loss in losses)
    result: dict[str, Any] = {"gpus": gpus, "losses": losses, "losses_finite": finite}
    rates = {place: median_rate(summary) for place, summary in summaries.items() if place.endswith("timed")}
    result |= {f"img_per_s_{'one' if place == 'alone/timed' else 'all'}": rate for place, rate in rates.items()}
    if "several/subset" in summaries:
        result["evaluation"] = summaries["several/subset"]["validation"]
    if len(summaries) < len(paths) or not (folder / "alone" / "again" / "detections_val.json").is_file():
        return {**result, "passed": False}
    same, difference = compare_detections(folder / "several" / "subset", folder / "alone" / "again")
    speed_up = rates["several/timed"] / rates["alone/timed"]
    return {
        **result,
        "speed_up": speed_up,
        "evaluation_equals_one_gpu": same,
        "detections": difference,
        "passed": finite and same and speed_up >= MIN_EFFICIENCY * gpus,
    }


def median_rate(summary: dict[str, Any]) -> float:
    """Median of the images a second of a training's log windows, without its first steps."""
    return statistics.median(point["img_per_s"] for point in summary["curve"] if point["step"] > WARM_UP_STEPS)


def compare_detections(expected: Path, actual: Path) -> tuple[bool, str]:
    """Compares the detections of two runs: whether there are some and all numbers are the same, and that in words."""
    expected_rows, actual_rows = (read_results(run_dir / "detections_val.json") for run_dir in (expected, actual))
    try:
        found = compare_results(expected_rows, actual_rows)
    except ValueError as error:
        return False, str(error)
    return found.bitwise_equal, f"{len(expected_rows)} detections, {describe_difference(found)}"


def write_images(folder: Path) -> None:
    """Draws images of one size, with two boxes each, in COCO's format."""
    folder.mkdir(parents=True)
    height, width = SIZE_HW
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for number in range(1, NUM_IMAGES + 1):
        pixels, _ = draw_scene(np.random.default_rng(number), height, width)
        Image.fromarray(pixels).save(folder / f"{number}.jpg", quality=90)
        images.append({"id": number, "file_name": f"{number}.jpg", "height": height, "width": width})
        for place in (1, 2):
            box = [place * width // 8, place * height // 8, width // 4, height // 4]
            entry = {"id": len(annotations) + 1, "image_id": number, "category_id": place, "bbox": box}
            annotations.append(entry)
    categories = [{"id": number, "name": str(number)} for number in range(1, 81)]
    content = {"images": images, "annotations": annotations, "categories": categories}
    (folder / "instances.json").write_text(json.dumps(content))


def run(words: list[str]) -> None:
    """Calls train.py, passes on what it and the processes that it starts say, and leaves none of them behind.

    Raises:
        subprocess.CalledProcessError: If it fails.
    """
    command = [sys.executable, str(ROOT / "train.py"), *words]
    settings: dict[str, Any] = {"cwd": ROOT, "env": {**os.environ, "PYTHONUNBUFFERED": "1"}, "text": True}
    settings |= {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "start_new_session": True}
    process = subprocess.Popen(command, **settings)
    reader = threading.Thread(target=pass_on, args=(process.stdout,), daemon=True)
    reader.start()
    try:
        status = process.wait()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    reader.join(timeout=10)  # until all have closed the pipe
    if status:
        raise subprocess.CalledProcessError(status, command)


def pass_on(stream: IO[str]) -> None:
    """Prints lines as they come."""
    for line in stream:
        say(line.rstrip())


def say(text: str) -> None:
    """Prints a line behind the seconds since the start."""
    print(f"[{time.monotonic() - _BEGAN:5.1f} s] {text}", flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what `timeout` sends leaves results as Ctrl-C does
    sys.exit(main())
