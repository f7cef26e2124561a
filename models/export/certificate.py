"""What is measured of a program before it is trusted: is it the detector, and does it look at its input?"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from models.export.buckets import Size
from models.export.inference import Inputs, Outputs

Program = Callable[[Tensor, Tensor, Tensor], Outputs]
"""Maps images, sizes and original sizes to detections, as `InferenceModule.forward` does."""

_SEED = 20
_PIXELS_PER_SCORE = 100.0
_ANOTHER_CLASS = 1e9
_SMALLER = 0.8
_ORIGINAL_PADDING = (7, 3)


@dataclass(frozen=True)
class Tolerance:
    """Largest differences between a program and the eager detector of the same precision.

    Attributes:
        score: of the scores, which lie in 0..1.
        box_px: of the boxes' coordinates, in pixels.
        min_score: detections that score less on both sides need no partner. In half precision another proposal may
            take a place among the queries, whose boxes then are not to be compared.
    """

    score: float
    box_px: float
    min_score: float


@dataclass(frozen=True)
class Difference:
    """How far detections lie from the expected ones.

    Attributes:
        score: largest difference of the scores, of paired detections and of those of equal rank.
        box_px: largest difference of a coordinate of paired detections, in pixels.
        compared: pairs that count.
        unpaired: expected detections that have no partner of their class.
        bitwise_equal: whether all numbers are the same, in the same order.
    """

    score: float
    box_px: float
    compared: int
    unpaired: int
    bitwise_equal: bool

    def within(self, tolerance: Tolerance) -> bool:
        """Whether all detections have a partner, near enough."""
        return self.unpaired == 0 and self.score <= tolerance.score and self.box_px <= tolerance.box_px


@dataclass(frozen=True)
class Measurement:
    """One program against the eager detector, on two inputs: see `Difference`.

    Attributes:
        bucket: height and width in pixels.
        difference: the larger of both inputs.
        depends_on_input: whether the program's two answers differ.
    """

    bucket: Size
    difference: Difference
    depends_on_input: bool

    def to_json(self) -> dict[str, Any]:
        """Returns plain values."""
        return asdict(self) | {"bucket": list(self.bucket)}


def contrasting_inputs(bucket: Size, batch_size: int) -> list[Inputs]:
    """Makes two fixed inputs of a program, on the CPU: noise that fills the bucket, and slopes that leave padding."""
    height, width = bucket
    noise = torch.randint(
        256, (batch_size, 3, height, width), dtype=torch.uint8, generator=torch.Generator().manual_seed(_SEED)
    )
    inner = (max(1, int(_SMALLER * height)), max(1, int(_SMALLER * width)))
    slopes = torch.zeros_like(noise)
    rows = torch.linspace(0, 255, inner[0]).view(-1, 1).expand(inner)
    columns = torch.linspace(255, 0, inner[1]).expand(inner)
    slopes[:, :, : inner[0], : inner[1]] = torch.stack((rows, columns, (rows + columns) / 2)).to(torch.uint8)
    inputs = []
    for images, size in ((noise, bucket), (slopes, inner)):
        sizes_hw = torch.tensor(size).expand(batch_size, 2).contiguous()
        inputs.append((images, sizes_hw, sizes_hw + torch.tensor(_ORIGINAL_PADDING)))
    return inputs


def measure(
    program: Program, eager: Program, bucket: Size, batch_size: int, device: torch.device, min_score: float
) -> Measurement:
    """Compares a program with the eager detector.

    Args:
        program: built for the bucket and the batch size.
        eager: the detector that it was built from.
        bucket: height and width of the inputs in pixels.
        batch_size: B.
        device: where both run.
        min_score: see `Tolerance`.
    """
    actual = collect_answers(program, bucket, batch_size, device)
    return compare_answers(collect_answers(eager, bucket, batch_size, device), actual, bucket, min_score)


@torch.no_grad()
def collect_answers(program: Program, bucket: Size, batch_size: int, device: torch.device) -> list[Outputs]:
    """Returns what a program answers to `contrasting_inputs`; arguments as of `measure`."""
    answers = []
    for inputs in contrasting_inputs(bucket, batch_size):
        scores, labels, boxes_xyxy = program(*(tensor.to(device) for tensor in inputs))
        answers.append((scores.clone(), labels.clone(), boxes_xyxy.clone()))  # the next call may overwrite them
    return answers


def compare_answers(
    expected: Sequence[Outputs], actual: Sequence[Outputs], bucket: Size, min_score: float
) -> Measurement:
    """Compares what a program answered with what the eager detector answered, both as of `collect_answers`."""
    differences = [compare_detections(*pair, min_score) for pair in zip(expected, actual, strict=True)]
    first, second = actual
    return Measurement(
        bucket,
        largest(differences),
        depends_on_input=not all(torch.equal(one, other) for one, other in zip(first, second, strict=True)),
    )


def largest(differences: Sequence[Difference]) -> Difference:
    """Returns the largest of each kind of difference."""
    return Difference(
        max(each.score for each in differences),
        max(each.box_px for each in differences),
        sum(each.compared for each in differences),
        max(each.unpaired for each in differences),
        all(each.bitwise_equal for each in differences),
    )


def compare_detections(expected: Outputs, actual: Outputs, min_score: float = 0.0) -> Difference:
    """Pairs detections one to one within their class, and returns the largest differences.

    Near ties may come in another order, so detections are paired by how near they are, not by rank. For the same reason
    the last place may go to another detection: what scores no more than the lowest score of either side, up to the
    largest difference of the others, needs no partner.

    Args:
        expected: detections of the eager detector.
        actual: those of the program, of the same shapes.
        min_score: see `Tolerance`.

    Raises:
        ValueError: if the shapes differ.
    """
    if [tensor.shape for tensor in expected] != [tensor.shape for tensor in actual]:
        raise ValueError(
            f"detections must have the shapes of the eager ones {[tuple(tensor.shape) for tensor in expected]}, got "
            f"{[tuple(tensor.shape) for tensor in actual]}; export the program anew"
        )
    equal = all(torch.equal(one, other.to(one.device)) for one, other in zip(expected, actual, strict=True))
    rows = zip(*(tensor.detach().cpu() for tensor in (*expected, *actual)), strict=True)
    found = [_compare_image(row[:3], row[3:], min_score) for row in rows]
    return Difference(
        max((each[0] for each in found), default=0.0),
        max((each[1] for each in found), default=0.0),
        sum(each[2] for each in found),
        sum(each[3] for each in found),
        equal,
    )


def _compare_image(
    expected: Sequence[Tensor], actual: Sequence[Tensor], min_score: float
) -> tuple[float, float, int, int]:
    """Returns the largest difference of scores, of coordinates, the pairs and the number without, of one image."""
    scores, labels, boxes = (tensor.double() for tensor in expected)
    other_scores, other_labels, other_boxes = (tensor.double() for tensor in actual)
    if not all(torch.isfinite(each).all() for each in (scores, boxes, other_scores, other_boxes)):
        return float("inf"), float("inf"), 0, len(scores)
    score_gaps = (scores[:, None] - other_scores).abs()
    box_gaps = (boxes[:, None] - other_boxes).abs().amax(-1)
    costs = torch.maximum(score_gaps * _PIXELS_PER_SCORE, box_gaps)
    costs = costs.masked_fill(labels[:, None] != other_labels, _ANOTHER_CLASS)
    pairs = [torch.as_tensor(places) for places in linear_sum_assignment(costs.numpy())]
    paired = costs[pairs[0], pairs[1]] < _ANOTHER_CLASS
    last_score = torch.maximum(scores.min(), other_scores.min())
    kept = paired & (torch.minimum(scores[pairs[0]], other_scores[pairs[1]]) > last_score)
    kept &= torch.maximum(scores[pairs[0]], other_scores[pairs[1]]) >= min_score
    first, second = pairs[0][kept], pairs[1][kept]
    by_rank = (scores.sort().values - other_scores.sort().values).abs().max()
    score = float(torch.cat((score_gaps[first, second], by_rank.view(1))).max())
    box_px = float(box_gaps[first, second].max()) if len(first) else 0.0
    lonely = ~paired & (scores[pairs[0]] > last_score + score) & (scores[pairs[0]] >= min_score)
    return score, box_px, len(first), int(lonely.sum())
