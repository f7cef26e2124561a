"""L5: with the same weights, does the other op find the same?"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import torch
from pycocotools.coco import COCO
from torch import Tensor

from coco.annotations import build_index
from coco.datamodule import CocoDataModule
from coco.evaluator import CocoEvaluator, EvaluationResult, ImageDetections
from models.postprocess import postprocess
from parity.arms import Arm, Experiment
from parity.recording import Progress, train_weights
from parity.results import Check, LevelResult, guard, judge
from parity.statistics import allowed_difference
from parity.tolerances import OUTPUT
from parity.training import autocast_dtype, build_data, build_detector, faulty, move_batch, set_flags

QUESTION = "With the same weights, does the other op give the same AP?"
PERCENT = 100


@dataclass(frozen=True)
class Evaluated:
    """Detections of one arm by image id, the images' annotations, and COCO's metrics."""

    detections: dict[int, ImageDetections]
    annotations: COCO
    result: EvaluationResult


def run_evaluation(experiment: Experiment, progress: Progress) -> LevelResult:
    """Evaluates the same weights under both ops, each also rounding otherwise, and the one compared with once more.

    AP over a few images moves in jumps: rounding lifts one box over a threshold, or not. So means over several
    roundings are compared, and their scatter under the op that is compared with says how far they may lie apart.
    Weights come from `model.weights`, or from a short training with that op. Beside AP the detections themselves are
    compared: AP of one arm's best detections where the other's count as ground truth.
    """
    weights = train_weights(experiment, progress)
    tested = rounded_otherwise(experiment.arm_under_test(experiment.seed), experiment)
    arms = [*control_arms(experiment), *tested]
    found = [evaluate_arm(experiment, arm, weights, progress) for arm in arms]
    base, *controls = found[: -len(tested)]
    yardstick = take_yardstick(base, controls, experiment)
    checks, numbers = compare_evaluations(yardstick, found[-len(tested) :], experiment)
    settings = experiment.settings.evaluation
    data = {
        "metrics": {arm.name: _in_percent(each.result.metrics) for arm, each in zip(arms, found, strict=True)},
        "categories": [
            {
                "name": entry.category.name,
                "num_boxes": entry.num_boxes,
                **{arm.name: PERCENT * each.result.categories[row].ap for arm, each in zip(arms, found, strict=True)},
            }
            for row, entry in enumerate(found[0].result.categories)
        ],
        "num_images": found[0].result.num_images,
        **numbers,
    }
    margins = {
        "AP": f"{settings.margin_ap:g} points + the difference of A' from A + the {PERCENT * settings.confidence:g} % "
        f"interval of what rounding changes, between means over {settings.controls + 1} roundings",
        "agreement": f"at least {settings.min_agreement:g} points, or {OUTPUT.factor:g} x the controls' gap to 100",
    }
    return LevelResult("evaluation", QUESTION, tuple(checks), margins, data)


@torch.no_grad()
def evaluate_arm(experiment: Experiment, arm: Arm, weights: dict[str, Tensor], progress: Progress) -> Evaluated:
    """Evaluates weights on the validation images under the op, and the fault, of an arm."""
    config = experiment.config_of(arm)
    set_flags(config)
    data: CocoDataModule = build_data(config)
    detector = build_detector(config, data, arm, weights).to(experiment.device).eval()
    evaluator = CocoEvaluator(annotations=data.val_annotations, categories=data.categories)
    dtype = autocast_dtype(config)
    with faulty(detector, arm), torch.autocast(experiment.device.type, dtype=dtype, enabled=dtype is not None):
        for batch in data.val_dataloader():
            moved = move_batch(batch, experiment.device)
            detections = postprocess(detector(moved), moved["original_sizes_hw"], detector.top_k)
            evaluator.update(moved["image_ids"], detections)
    result = evaluator.evaluate()
    progress(f"evaluation: arm {arm.name} ({arm.op}), AP {PERCENT * result.metrics['AP']:.2f}")
    return Evaluated(evaluator.detections, data.val_annotations, result)


def control_arms(experiment: Experiment) -> list[Arm]:
    """Returns A, A' (A again), and A rounding otherwise."""
    arm, *rounded = rounded_otherwise(Arm("A", experiment.against, experiment.seed), experiment)
    return [arm, replace(arm, name="A'", repeat=1), *rounded]


def rounded_otherwise(arm: Arm, experiment: Experiment) -> list[Arm]:
    """Returns an arm and the same from weights one unit in the last place away, once for each control."""
    nudges = range(1, experiment.settings.evaluation.controls + 1)
    return [arm, *(replace(arm, name=f"{arm.name}+{nudge}", nudge=nudge) for nudge in nudges)]


@dataclass(frozen=True)
class Yardstick:
    """What the op that is compared with found, and how far its controls were from it.

    Args:
        base: arm A.
        aps: of A and of A rounding otherwise, in points.
        repeat_difference: of the AP of A' from that of A.
        missing: largest gap of a control's agreement with A to 100 points.
    """

    base: Evaluated
    aps: tuple[float, ...]
    repeat_difference: float
    missing: float


def take_yardstick(base: Evaluated, controls: Sequence[Evaluated], experiment: Experiment) -> Yardstick:
    """Compares the arms of `control_arms`, A and then A' and the rest."""
    ap, again, *rounded = (PERCENT * each.result.metrics["AP"] for each in (base, *controls))
    num_agreed = experiment.settings.evaluation.num_agreed
    missing = max(PERCENT - agree(base, each, num_agreed) for each in controls)
    return Yardstick(base, (ap, *rounded), abs(again - ap), missing)


def compare_evaluations(
    yardstick: Yardstick, others: Sequence[Evaluated], experiment: Experiment
) -> tuple[list[Check], dict[str, Any]]:
    """Compares AP and detections of an op with those of arm A, by A's own difference from its controls.

    Args:
        yardstick: A and its controls.
        others: the other op, under one rounding or several.
        experiment: has the margins.

    Returns:
        Checks, and the numbers behind them.
    """
    settings, ap = experiment.settings.evaluation, yardstick.aps[0]
    other_aps = [PERCENT * each.result.metrics["AP"] for each in others]
    rounding = allowed_difference(yardstick.aps, len(other_aps), settings.confidence)
    allowed = settings.margin_ap + yardstick.repeat_difference + rounding
    difference = abs(fmean(other_aps) - fmean(yardstick.aps))
    agreement = min(agree(yardstick.base, each, settings.num_agreed) for each in others)
    required = min(settings.min_agreement, PERCENT - OUTPUT.factor * yardstick.missing)
    found = ap >= settings.min_ap
    words = "AP of the base" if found else "refused: too low to compare anything, AP of the base"
    checks = [
        guard("AP of arm A", found, f"{words} {ap:.3f} points ({settings.min_ap:g} needed)"),
        Check("AP", judge(difference <= allowed), f"differs by {difference:.4f} of {allowed:.4f} points"),
        Check("detections", judge(agreement >= required), f"agreement {agreement:.2f} points ({required:.2f} needed)"),
    ]
    numbers = {"agreement": agreement, "required_agreement": required, "allowed_ap_difference": allowed}
    return checks, numbers


def agree(truth: Evaluated, other: Evaluated, num_agreed: int) -> float:
    """Returns the AP, in points, of the best detections of `other` with those of `truth` as the ground truth."""
    numbered = [
        {**found, "id": number, "area": found["bbox"][2] * found["bbox"][3], "iscrowd": 0}
        for number, found in enumerate(_keep_best(truth, truth.annotations, num_agreed).coco_results(), start=1)
    ]
    source = truth.annotations.dataset
    index = build_index(source["images"], source["categories"], numbered)
    return PERCENT * _keep_best(other, index, num_agreed).evaluate().metrics["AP"]


def _keep_best(evaluated: Evaluated, annotations: COCO, num_kept: int) -> CocoEvaluator:
    """Returns an evaluator of the best detections of each image; they come best first."""
    categories = tuple(entry.category for entry in evaluated.result.categories)
    evaluator = CocoEvaluator(annotations=annotations, categories=categories)
    best = {
        image_id: ImageDetections(found.scores[:num_kept], found.labels[:num_kept], found.boxes_xyxy[:num_kept])
        for image_id, found in evaluated.detections.items()
    }
    evaluator.gather(lambda _: [best])
    return evaluator


def _in_percent(metrics: dict[str, float]) -> dict[str, float]:
    return {name: PERCENT * value for name, value in metrics.items()}
