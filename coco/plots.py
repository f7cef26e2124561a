"""What a finished run shows of its last evaluation: precision against recall, and the worst mistakes."""

import contextlib
import io
import json
import logging
from collections import defaultdict
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
from lightning.pytorch.utilities import rank_zero_only
from numpy.typing import NDArray
from PIL import Image
from pycocotools import mask as coco_mask
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from coco.annotations import Category, build_index
from coco.callbacks import DRAWN_SCORE
from coco.datamodule import CocoDataModule
from coco.drawing import Comparison, DrawnBox, draw_comparisons

NUM_WORST = 8
MATCHING_IOU = 0.5
SHOWN_IOUS = (0.5, 0.75, 0.9)

logger = logging.getLogger(__name__)


class EvaluationPlots(pl.Callback):
    """Draws the last evaluation when training ends, from the run folder's `detections_val.json`.

    Writes `plots/worst.jpg`, and with matplotlib `plots/precision_recall.png`.

    Args:
        run_dir: Folder of the run.
    """

    def __init__(self, run_dir: str) -> None:
        self.run_dir = Path(run_dir)

    @rank_zero_only
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Draws, if there was an evaluation."""
        path = self.run_dir / "detections_val.json"
        data = trainer.datamodule  # type: ignore[attr-defined]  # set by Lightning, undeclared
        if not (path.is_file() and isinstance(data, CocoDataModule)):
            return
        results = json.loads(path.read_text())
        folder = self.run_dir / "plots"
        folder.mkdir(exist_ok=True)
        draw_worst(data, results).save(folder / "worst.jpg", quality=92)
        if find_spec("matplotlib") is None:
            logger.info("no plots of curves without matplotlib: pip install -e '.[plots]'")
        else:
            draw_precision_recall(data.val_annotations, data.categories, results, folder / "precision_recall.png")


def weigh_mistakes(annotations: COCO, results: Sequence[dict[str, Any]]) -> dict[int, float]:
    """Returns how much is wrong with each image: 1 a box that is missed, its score a detection that finds nothing.

    Detections with a score of 0.3 or more are matched by falling score to the box of their category that they overlap
    most, at an IoU of 0.5 or more; every box is found once. Crowds excuse what lies in them and need not be found.

    Args:
        annotations: Index of the ground truth.
        results: In COCO's results format.
    """
    found = defaultdict(list)
    for result in results:
        if result["score"] >= DRAWN_SCORE:
            found[result["image_id"]].append(result)
    return {image_id: _weigh_image(annotations.imgToAnns[image_id], found[image_id]) for image_id in annotations.imgs}


def draw_worst(data: CocoDataModule, results: Sequence[dict[str, Any]]) -> Image.Image:
    """Draws the images with the worst mistakes, worst first, with their annotations and detections."""
    weights = weigh_mistakes(data.val_annotations, results)
    labels = {category.id: label for label, category in enumerate(data.categories)}
    by_image = defaultdict(list)
    for result in results:
        if result["score"] >= DRAWN_SCORE:
            by_image[result["image_id"]].append(result)
    comparisons = []
    for image_id in sorted(weights, key=lambda key: (-weights[key], key))[:NUM_WORST]:
        pixels = data.val_dataset.read_image(data.val_dataset.index_of(image_id))
        truth = [_drawn(entry, labels, data.categories) for entry in data.val_annotations.imgToAnns[image_id]]
        detections = [_drawn(entry, labels, data.categories) for entry in by_image[image_id]]
        comparisons.append(Comparison(Image.fromarray(pixels.permute(1, 2, 0).numpy()), truth, detections))
    return draw_comparisons(comparisons)


def precision_curves(annotations: COCO, results: Sequence[dict[str, Any]]) -> NDArray[np.float64]:
    """Returns COCO's precision at 101 recalls from 0 to 1, averaged over the categories that have boxes to find.

    Args:
        annotations: Index of the ground truth.
        results: In COCO's results format.

    Returns:
        float64 [IoU of 0.5 to 0.95, 101]; nan where no category has boxes.
    """
    numbered = [
        {**result, "id": number, "area": result["bbox"][2] * result["bbox"][3], "iscrowd": 0}
        for number, result in enumerate(results, start=1)
    ]
    source = annotations.dataset
    evaluation = COCOeval(annotations, build_index(source["images"], source["categories"], numbered), iouType="bbox")
    with contextlib.redirect_stdout(io.StringIO()):
        evaluation.evaluate()
        evaluation.accumulate()
    all_areas, hundred_detections = 0, 2
    precision = evaluation.eval["precision"][:, :, :, all_areas, hundred_detections]
    is_present = (precision >= 0).all(axis=(0, 1))
    if not is_present.any():
        return np.full(precision.shape[:2], np.nan)
    return np.asarray(precision[:, :, is_present].mean(axis=2))


def draw_precision_recall(
    annotations: COCO, categories: Sequence[Category], results: Sequence[dict[str, Any]], path: Path
) -> None:
    """Writes a picture of precision against recall at three IoUs; needs matplotlib."""
    from matplotlib.figure import Figure  # optional, and slow to import

    curves = precision_curves(annotations, results)
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot()
    for iou in SHOWN_IOUS:
        curve = curves[round((iou - 0.5) / 0.05)]
        axes.plot(np.linspace(0, 1, len(curve)), curve, label=f"IoU {iou:.2f}, AP {100 * curve.mean():.1f}")
    axes.set(xlabel="recall", ylabel="precision", xlim=(0, 1), ylim=(0, 1.02))
    axes.set_title(f"mean of {len(categories)} categories, {len(annotations.imgs)} images")
    axes.legend()
    figure.savefig(path, dpi=120)


def _weigh_image(truth: Sequence[dict[str, Any]], found: Sequence[dict[str, Any]]) -> float:
    """The weight of one image."""
    missed = {place for place, box in enumerate(truth) if not box["iscrowd"]}
    weight = 0.0
    ordered = sorted(found, key=lambda result: -result["score"])
    overlaps = np.zeros((len(ordered), len(truth)))
    if ordered and truth:
        crowds = [box["iscrowd"] for box in truth]
        overlaps = coco_mask.iou([box["bbox"] for box in ordered], [box["bbox"] for box in truth], crowds)
    for row, result in enumerate(ordered):
        right = [place for place, box in enumerate(truth) if box["category_id"] == result["category_id"]]
        open_places = [place for place in right if place in missed and overlaps[row, place] >= MATCHING_IOU]
        if open_places:
            missed.remove(max(open_places, key=lambda place: overlaps[row, place]))
        elif not any(truth[place]["iscrowd"] and overlaps[row, place] >= MATCHING_IOU for place in right):
            weight += result["score"]
    return weight + len(missed)


def _drawn(entry: dict[str, Any], labels: dict[int, int], categories: Sequence[Category]) -> DrawnBox:
    """An annotation or a result as a box to draw."""
    label = labels[entry["category_id"]]
    x, y, width, height = entry["bbox"]
    text = categories[label].name
    if "score" in entry:
        text = f"{text} {entry['score']:.2f}"
    elif entry["iscrowd"]:
        text = f"{text} (crowd)"
    return DrawnBox((x, y, x + width, y + height), label, text)
