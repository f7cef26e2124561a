"""Measures what a second GPU brings: `python -m scripts.scaling --coco /path/to/coco`, on a machine with two or more.

Trains on drawn images of 800x1333 with 4 images a GPU, on one GPU and on several, and compares images a second; trains
on COCO with several GPUs, and compares their detections with those of one GPU from the same checkpoint. Writes
results/scaling.json. The exit status is 1 if a loss is not finite, a detection differs by a bit, there is none, or the
speed-up is below 0.95 times the number of GPUs.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from coco.shapes import draw_scene
from models.environment import describe_environment
from models.export.agreement import compare_results, describe_difference, read_results

ROOT = Path(__file__).resolve().parent.parent
SIZE_HW = (800, 1333)
NUM_IMAGES = 16
MIN_EFFICIENCY = 0.95
MODEL = ["model=deformable_detr", "backbone=resnet50", "backbone.weights=none", "backbone.norm=group"]
QUIET = ["callbacks.progress=null", "logger=csv", "trainer.num_sanity_val_steps=0", "trainer.log_every_n_steps=10"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the trainings and returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--coco", type=Path, required=True, help="COCO, or a part of it, in COCO's layout")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60, help="steps of each timed training")
    parser.add_argument("--workers", type=int, default=6, help="loader processes of each GPU")
    parser.add_argument("--out", type=Path, default=Path("results/scaling.json"))
    parser.add_argument("overrides", nargs="*", default=["op=triton", "precision=bf16"], help="of train.py")
    options = parser.parse_args(arguments)
    if torch.cuda.device_count() < options.gpus:
        parser.error(f"--gpus must be at most the machine's GPUs, got {options.gpus} of {torch.cuda.device_count()}")
    with tempfile.TemporaryDirectory() as folder:
        result = measure(options, Path(folder))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"environment": describe_environment(), **result}, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    return int(not result["passed"])


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Runs all trainings in a folder and judges them."""
    words = [*MODEL, *QUIET, f"data.num_workers={options.workers}", *options.overrides]
    several = ["trainer=ddp", f"trainer.devices={options.gpus}"]
    write_images(folder / "drawn")
    timed = [*words, *drawn_data(folder / "drawn"), f"trainer.max_steps={options.steps}", "trainer.limit_val_batches=0"]
    one = train(folder / "one", timed)
    many = train(folder / "many", [*timed, *several])
    trained = train_and_validate(folder, [*words, *coco_data(options.coco)], several, ["trainer=gpu"])
    same, difference = compare_detections(folder / "coco", folder / "again")

    speed_up = many["img_per_s_median"] / one["img_per_s_median"]
    losses = [summary[name] for summary in (one, many, trained) for name in ("loss_first", "loss_last")]
    finite = all(math.isfinite(loss) for loss in losses)
    return {
        "gpus": options.gpus,
        "img_per_s_one": one["img_per_s_median"],
        "img_per_s_all": many["img_per_s_median"],
        "speed_up": speed_up,
        "losses": losses,
        "losses_finite": finite,
        "evaluation": trained["validation"],
        "evaluation_equals_one_gpu": same,
        "detections": difference,
        "passed": finite and same and speed_up >= MIN_EFFICIENCY * options.gpus,
    }


def train_and_validate(folder: Path, words: list[str], several: list[str], alone: list[str]) -> dict[str, Any]:
    """Trains a little with several processes, then validates the checkpoint with one; returns the training's summary.

    Args:
        folder: Gets the run folders `coco` and `again`.
        words: Overrides of both.
        several: Overrides that start several processes.
        alone: Overrides that start one.
    """
    trained = train(folder / "coco", [*words, *several, "trainer.max_epochs=1", "trainer.limit_train_batches=20"])
    checkpoint = folder / "coco" / "checkpoints" / "last.ckpt"
    run(folder / "again", [*words, *alone, "mode=validate", f"model.weights={checkpoint}"])
    return trained


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
            box = [100 * place, 50 * place, 300, 200]
            entry = {"id": len(annotations) + 1, "image_id": number, "category_id": place, "bbox": box}
            annotations.append(entry)
    categories = [{"id": number, "name": str(number)} for number in range(1, 81)]
    content = {"images": images, "annotations": annotations, "categories": categories}
    (folder / "instances.json").write_text(json.dumps(content))


def drawn_data(folder: Path) -> list[str]:
    """Overrides that train on `write_images`, without resizing."""
    paths = [f"data.{split}_{word}" for split in ("train", "val") for word in ("json=instances.json", "images=.")]
    augmentation = "data/augmentation@data.train_transform=none"
    return ["data=coco", augmentation, f"data.root={folder}", *paths, "data.batch_size=4", "data.repeat_train=100"]


def coco_data(root: Path) -> list[str]:
    """Overrides for COCO; one image in a batch of the evaluation, so that no neighbour changes its padding."""
    return ["data=coco", f"data.root={root}", "data.batch_size=2", "data.eval_batch_size=1"]


def train(run_dir: Path, words: list[str]) -> dict[str, Any]:
    """Trains and returns the run's summary."""
    run(run_dir, words)
    return json.loads((run_dir / "summary.json").read_text())


def run(run_dir: Path, words: list[str]) -> None:
    """Calls train.py."""
    command = [sys.executable, str(ROOT / "train.py"), *words, f"hydra.run.dir={run_dir}"]
    subprocess.run(command, cwd=ROOT, check=True)


if __name__ == "__main__":
    sys.exit(main())
