"""The evaluation of a training run: metrics, table, per-class CSV, pictures and detections."""

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from PIL import Image
from rich.console import Console
from rich.table import Table

from coco.datamodule import CocoDataModule
from coco.drawing import Comparison, DrawnBox, draw_comparisons
from coco.evaluator import CocoEvaluator, EvaluationResult, ImageDetections

LOGGED_METRICS = ("AP", "AP50", "AP75", "APs", "APm", "APl")
NUM_PICTURES = 8
DRAWN_SCORE = 0.3


class CocoEvaluation(pl.Callback):
    """Evaluates what `validation_step` returns: {"image_ids": ids, "detections": scores, labels, boxes_xyxy}.

    Logs `val/AP`, `val/AP50`, `val/AP75`, `val/APs`, `val/APm` and `val/APl`, equal on all processes. Rank 0 prints
    them and writes into the run folder: `per_class_ap.csv` (appended to), `predictions/epoch_<epoch>.jpg` (the first
    images, detections with a score of 0.3 or more), and `detections_val.json` (all detections of the last evaluation,
    in COCO's results format). The sanity check before training does not count.

    Args:
        run_dir: Folder of the run; created if absent.
    """

    def __init__(self, run_dir: str) -> None:
        self._run_dir = Path(run_dir)
        self._evaluator: CocoEvaluator | None = None

    def on_validation_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Starts an evaluation."""
        self._evaluator = None
        if not trainer.sanity_checking:
            data = _require_datamodule(trainer)
            self._evaluator = CocoEvaluator(annotations=data.val_annotations, categories=data.categories)

    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Collects the detections of a batch."""
        if self._evaluator is not None:
            self._evaluator.update(outputs["image_ids"], outputs["detections"])

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Evaluates, logs and writes."""
        if self._evaluator is None:
            return
        if trainer.world_size > 1:
            self._evaluator.gather(_all_gather_object)
        result = self._evaluator.evaluate()
        metrics = {f"val/{name}": result.metrics[name] for name in LOGGED_METRICS}
        pl_module.log_dict(metrics, sync_dist=True)
        if trainer.is_global_zero:
            self._run_dir.mkdir(parents=True, exist_ok=True)
            print_result(result, trainer.current_epoch)
            append_category_results(
                self._run_dir / "per_class_ap.csv", result, epoch=trainer.current_epoch, step=trainer.global_step
            )
            (self._run_dir / "detections_val.json").write_text(json.dumps(self._evaluator.coco_results()))
            picture_path = self._run_dir / "predictions" / f"epoch_{trainer.current_epoch:03d}.jpg"
            picture_path.parent.mkdir(exist_ok=True)
            draw_detections(_require_datamodule(trainer), self._evaluator.detections).save(picture_path, quality=92)
        self._evaluator = None


def print_result(result: EvaluationResult, epoch: int) -> None:
    """Prints the logged metrics as a table, in percent."""
    table = Table(title=f"Validation, epoch {epoch}, {result.num_images} images")
    for name in LOGGED_METRICS:
        table.add_column(name, justify="right")
    table.add_row(*(_percent(result.metrics[name]) for name in LOGGED_METRICS))
    Console().print(table)


def append_category_results(path: Path, result: EvaluationResult, *, epoch: int, step: int) -> None:
    """Appends one line for each category; nan marks a category without boxes to find."""
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.writer(file)
        if is_new:
            writer.writerow(["epoch", "step", "category_id", "name", "num_boxes", "AP", "AP50"])
        for entry in result.categories:
            category, scores = entry.category, (f"{entry.ap:.4f}", f"{entry.ap50:.4f}")
            writer.writerow([epoch, step, category.id, category.name, entry.num_boxes, *scores])


def draw_detections(data: CocoDataModule, detections: dict[int, ImageDetections]) -> Image.Image:
    """Draws the first images, by id, with their annotations and their detections."""
    names = [category.name for category in data.categories]
    labels = {category.id: label for label, category in enumerate(data.categories)}
    comparisons = []
    for image_id in sorted(detections)[:NUM_PICTURES]:
        found = detections[image_id]
        truth = []
        for annotation in data.val_annotations.imgToAnns[image_id]:
            x, y, width, height = annotation["bbox"]
            label = labels[annotation["category_id"]]
            text = f"{names[label]} (crowd)" if annotation["iscrowd"] else names[label]
            truth.append(DrawnBox((x, y, x + width, y + height), label, text))
        drawn = [
            DrawnBox(tuple(box), label, f"{names[label]} {score:.2f}")
            for score, label, box in zip(
                found.scores.tolist(), found.labels.tolist(), found.boxes_xyxy.tolist(), strict=True
            )
            if score >= DRAWN_SCORE
        ]
        pixels = data.val_dataset.read_image(data.val_dataset.index_of(image_id))
        comparisons.append(Comparison(Image.fromarray(pixels.permute(1, 2, 0).numpy()), truth, drawn))
    return draw_comparisons(comparisons)


def _percent(value: float) -> str:
    """Formats a share as percent, a dash if there is none."""
    return "-" if value != value else f"{100 * value:.1f}"


def _all_gather_object(item: Any) -> Sequence[Any]:
    """Exchanges one object with all processes."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, item)
    return gathered


def _require_datamodule(trainer: pl.Trainer) -> CocoDataModule:
    """Returns the run's data module."""
    data = trainer.datamodule  # type: ignore[attr-defined]  # set by Lightning, undeclared
    if not isinstance(data, CocoDataModule):
        raise ValueError(
            f"datamodule must be a CocoDataModule, got {type(data).__name__}; pass one to trainer.fit or validate"
        )
    return data
