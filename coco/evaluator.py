"""COCO's box evaluation (pycocotools) of detections that arrive batch by batch, from any number of processes."""

import contextlib
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from torch import Tensor

from coco.annotations import Category, build_index
from coco.errors import NonFiniteDetectionsError

METRIC_NAMES = ("AP", "AP50", "AP75", "APs", "APm", "APl", "AR1", "AR10", "AR100", "ARs", "ARm", "ARl")
"""COCO's twelve numbers in the order of `COCOeval.stats`."""

GatherObjects = Callable[[Any], Sequence[Any]]
"""Maps one object of this process to the objects of all processes, in order of their ranks."""


class Detections(Protocol):
    """What a detector returns for a batch: scores [B, k], contiguous labels [B, k], boxes_xyxy [B, k, 4] in pixels."""

    @property
    def scores(self) -> Tensor: ...

    @property
    def labels(self) -> Tensor: ...

    @property
    def boxes_xyxy(self) -> Tensor: ...


@dataclass(frozen=True)
class ImageDetections:
    """The detections of one image, on the host: scores [k], contiguous labels [k], boxes_xyxy [k, 4] in pixels."""

    scores: NDArray[np.float64]
    labels: NDArray[np.int64]
    boxes_xyxy: NDArray[np.float64]


@dataclass(frozen=True)
class CategoryResult:
    """Average precision of one category (nan without boxes to find) and the number of boxes to find, crowds aside."""

    category: Category
    ap: float
    ap50: float
    num_boxes: int


@dataclass(frozen=True)
class EvaluationResult:
    """COCO's twelve numbers by name, 0..1 (nan where there is nothing to find), and the result of each category."""

    metrics: dict[str, float]
    categories: tuple[CategoryResult, ...]
    num_images: int


class CocoEvaluator:
    """Collects detections and evaluates them on the images seen.

    An image counts once, however often it arrives: distributed samplers repeat images to even out the processes.

    Args:
        annotations: As `coco.annotations.read_annotations` returns it, crowds included; they are ignored as in COCO.
        categories: All categories, in the order of the contiguous labels.
    """

    def __init__(self, *, annotations: COCO, categories: tuple[Category, ...]) -> None:
        self._annotations = annotations
        self._categories = categories
        self._detections: dict[int, ImageDetections] = {}

    @property
    def detections(self) -> dict[int, ImageDetections]:
        """The detections collected so far, by image id."""
        return self._detections

    def update(self, image_ids: Sequence[int], detections: Detections) -> None:
        """Adds a batch.

        Args:
            image_ids: B ids.
            detections: Those of the B images, on any device.

        Raises:
            NonFiniteDetectionsError: A score or a box is not finite.
        """
        scores, labels = detections.scores.double().cpu().numpy(), detections.labels.cpu().numpy()
        boxes_xyxy = detections.boxes_xyxy.double().cpu().numpy()
        for row, image_id in enumerate(image_ids):
            if not (np.isfinite(scores[row]).all() and np.isfinite(boxes_xyxy[row]).all()):
                raise NonFiniteDetectionsError(
                    f"detections must be finite, got nan or inf in image {image_id}; the model has diverged, lower the "
                    "learning rate or resume from an earlier checkpoint"
                )
            self._detections.setdefault(image_id, ImageDetections(scores[row], labels[row], boxes_xyxy[row]))

    def gather(self, all_gather_object: GatherObjects) -> None:
        """Brings the detections of all processes together in each of them.

        Args:
            all_gather_object: The exchange; called once.
        """
        gathered: dict[int, ImageDetections] = {}
        for part in all_gather_object(self._detections):
            gathered = part | gathered
        self._detections = gathered

    def coco_results(self) -> list[dict[str, Any]]:
        """Returns the detections as COCO's results format has them: category ids mapped back, boxes as x, y, w, h."""
        results = []
        for image_id, found in sorted(self._detections.items()):
            boxes_xywh = np.concatenate([found.boxes_xyxy[:, :2], found.boxes_xyxy[:, 2:] - found.boxes_xyxy[:, :2]], 1)
            for score, label, bbox in zip(
                found.scores.tolist(), found.labels.tolist(), boxes_xywh.tolist(), strict=True
            ):
                results.append(
                    {"image_id": image_id, "category_id": self._categories[label].id, "bbox": bbox, "score": score}
                )
        return results

    def evaluate(self) -> EvaluationResult:
        """Evaluates what has been collected, with at most 100 detections an image."""
        evaluation = COCOeval(self._annotations, self._index_detections(), iouType="bbox")
        evaluation.params.imgIds = sorted(self._detections)
        with contextlib.redirect_stdout(io.StringIO()):
            evaluation.evaluate()
            evaluation.accumulate()
            evaluation.summarize()
        stats = [_nan_if_absent(value) for value in evaluation.stats.tolist()]
        return EvaluationResult(
            metrics=dict(zip(METRIC_NAMES, stats, strict=True)),
            categories=self._evaluate_categories(evaluation.eval["precision"]),
            num_images=len(self._detections),
        )

    def _index_detections(self) -> COCO:
        """Indexes the detections, an empty list included."""
        numbered = [
            {**result, "id": number, "area": result["bbox"][2] * result["bbox"][3], "iscrowd": 0}
            for number, result in enumerate(self.coco_results(), start=1)
        ]
        source = self._annotations.dataset
        return build_index(source["images"], source["categories"], numbered)

    def _evaluate_categories(self, precision: NDArray[np.float64]) -> tuple[CategoryResult, ...]:
        """Splits precision [threshold, recall, category, area, limit] (-1 = absent) by category; threshold 0 is 0.5."""
        num_boxes = dict.fromkeys((category.id for category in self._categories), 0)
        for image_id in self._detections:
            for annotation in self._annotations.imgToAnns[image_id]:
                num_boxes[annotation["category_id"]] += not annotation["iscrowd"]
        all_areas, hundred_detections = 0, 2
        results = []
        for label, category in enumerate(self._categories):
            curves = precision[:, :, label, all_areas, hundred_detections]
            results.append(
                CategoryResult(
                    category=category,
                    ap=_nan_if_absent(float(curves.mean())),
                    ap50=_nan_if_absent(float(curves[0].mean())),
                    num_boxes=num_boxes[category.id],
                )
            )
        return tuple(results)


def _nan_if_absent(value: float) -> float:
    """COCOeval writes -1 where there is nothing to find."""
    return value if value >= 0 else float("nan")
