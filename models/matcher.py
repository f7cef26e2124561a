"""One-to-one assignment of targets to queries, for all decoder layers and images at once."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from models.boxes import generalized_box_iou
from models.compilation import Region
from models.losses import focal_matching_cost
from models.structures import DetectorOutput, Targets

NON_FINITE_COST = 1e8
# Sets of more queries leave the device as the cheapest few of each target; smaller ones are solved sooner than sorted.
MAX_DENSE_QUERIES = 1024


@dataclass(frozen=True)
class Matches:
    """Matched pairs of every layer; each layer has the same number R of them, the sum of min(Q, T) over the images.

    Attributes:
        layer: int64 [n, R], index of the decoder layer.
        batch: int64 [n, R], index of the image.
        query: int64 [n, R], index of the query in its image.
        target: int64 [n, R], index into the concatenated targets of the batch.
    """

    layer: Tensor
    batch: Tensor
    query: Tensor
    target: Tensor


class MatchingCosts(Region):
    """What matching a query to a target would cost, see `HungarianMatcher`."""

    def __init__(
        self, cost_class: float, cost_bbox: float, cost_giou: float, focal_alpha: float, focal_gamma: float
    ) -> None:
        super().__init__()
        self.cost_class = cost_class
        self.cost_bbox = cost_bbox
        self.cost_giou = cost_giou
        self.focal_alpha = focal_alpha
        self.focal_gamma = focal_gamma

    def compute(self, logits: Tensor, boxes: Tensor, labels: Tensor, target_boxes: Tensor) -> Tensor:  # type: ignore[override]
        """Returns the costs float32 [n, B, Q, T] of targets padded to the largest count T of an image.

        Args:
            logits: float [n, B, Q, num_classes].
            boxes: float [n, B, Q, 4], (cx, cy, w, h).
            labels: int64 [B, T].
            target_boxes: float [B, T, 4], (cx, cy, w, h).
        """
        index = labels[None, :, None, :].expand(*logits.shape[:3], -1)
        cost_class = focal_matching_cost(logits.float().gather(-1, index), self.focal_alpha, self.focal_gamma)
        cost_bbox = (boxes.float().unsqueeze(-2) - target_boxes.unsqueeze(-3)).abs().sum(-1)
        giou = generalized_box_iou(boxes.unsqueeze(-2), target_boxes.unsqueeze(-3))
        return self.cost_bbox * cost_bbox + self.cost_class * cost_class - self.cost_giou * giou


class HungarianMatcher(nn.Module):
    """Finds, for each layer and image, the assignment of least total cost.

    cost = cost_class * focal + cost_bbox * L1 + cost_giou * (-GIoU)  (arXiv 2005.12872, eq. 1; arXiv 2010.04159, A.4)
    """

    def __init__(
        self, *, cost_class: float, cost_bbox: float, cost_giou: float, focal_alpha: float, focal_gamma: float
    ) -> None:
        """Creates the matcher.

        Args:
            cost_class: weight of the class cost, at least 0.
            cost_bbox: weight of the L1 distance of the boxes, at least 0.
            cost_giou: weight of the negative GIoU, at least 0.
            focal_alpha: see `models.losses.sigmoid_focal_loss`.
            focal_gamma: see `models.losses.sigmoid_focal_loss`.

        Raises:
            ValueError: if a weight is negative or all are zero.
        """
        super().__init__()
        costs = (cost_class, cost_bbox, cost_giou)
        if min(costs) < 0 or max(costs) == 0:
            raise ValueError(f"cost_class, cost_bbox, cost_giou must be >= 0 and not all 0, got {costs}; change them")
        self.costs = MatchingCosts(*costs, focal_alpha, focal_gamma)

    @torch.no_grad()
    def forward(self, output: DetectorOutput, targets: Targets) -> tuple[Matches, Matches | None]:
        """Matches every decoder layer, and the proposals of a two-stage encoder.

        Args:
            output: predictions of the decoder layers.
            targets: ground truth of the batch. Class-agnostic proposals are matched to the same boxes with class 0.

        Returns:
            The matches of the decoder layers, and those of the proposals (n = 1) or None without proposals.

        Notes:
            Float32 under any autocast. One copy from the device, of all costs or, for more than `MAX_DENSE_QUERIES`
            queries, of the cheapest of each target, which hold a best assignment; the only wait. A cost that is not
            finite counts as 1e8, with a warning that names the layer and the image of each.
        """
        slots = _target_slots(targets.counts).to(targets.labels.device, non_blocking=True)
        labels, boxes = targets.labels[slots], targets.boxes_cxcywh[slots]
        sets = [("decoder layer {}", output.logits, output.boxes_cxcywh, labels)]
        if output.proposals is not None:
            proposals = output.proposals
            classes = proposals.classes_of(labels)
            sets.append(("the encoder's proposals", proposals.logits[None], proposals.boxes_cxcywh[None], classes))
        with torch.autocast(boxes.device.type, enabled=False):
            costs = [self.costs(logits, queries, classes, boxes) for _, logits, queries, classes in sets]
            candidates = [
                _cheapest(cost) if cost.shape[2] > MAX_DENSE_QUERIES else (cost.transpose(2, 3),) for cost in costs
            ]
        on_host = iter(_copy_to_host([tensor for tensors in candidates for tensor in tensors]))
        solved, non_finite = [], []
        for (name, logits, *_), tensors in zip(sets, candidates, strict=True):
            found, failed = _solve(
                *(next(on_host) for _ in tensors), counts=targets.counts, num_queries=logits.shape[2]
            )
            solved.append(found)
            non_finite += [f"{name.format(layer)}, image {image}" for layer, image in failed]
        if non_finite:
            warnings.warn(f"matching costs are not finite for {'; '.join(non_finite)}: training diverges", stacklevel=2)
        matches = _copy_to_device(solved, boxes.device)
        return matches[0], matches[1] if output.proposals is not None else None


def _target_slots(counts: tuple[int, ...]) -> Tensor:
    """Returns int64 [B, T], the targets of each image, padded to the largest count with any target of the batch."""
    starts = np.cumsum((0, *counts))[:-1, None]
    return torch.from_numpy(np.minimum(starts + np.arange(max(counts)), max(0, sum(counts) - 1)))


def _cheapest(costs: Tensor) -> tuple[Tensor, Tensor]:
    """Keeps the T cheapest queries of each target.

    They hold a best assignment: a target with another query could change to one of its T cheapest that no other target
    has, and would not lose by it.

    Args:
        costs: float32 [n, B, Q, T].

    Returns:
        Costs float32 [n, B, T, k], k = min(Q, T), and their queries as float32, exact below 2^24.
    """
    values, queries = costs.transpose(2, 3).topk(min(costs.shape[2:]), dim=3, largest=False)
    return values, queries.float()


def _copy_to_host(tensors: Sequence[Tensor]) -> list[np.ndarray]:
    """Copies tensors at once, as float64: the solver would convert them one by one, while the device waits."""
    flat = torch.cat([tensor.flatten() for tensor in tensors]).double().cpu()
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape).numpy() for part, tensor in zip(parts, tensors, strict=True)]


def _solve(
    costs: np.ndarray, queries: np.ndarray | None = None, *, counts: tuple[int, ...], num_queries: int
) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """Solves the assignments of all layers and images.

    Args:
        costs: [n, B, T, Q] of all queries, or [n, B, T, k] of those in `queries`.
        queries: [n, B, T, k] the cheapest queries of each target; None for all queries.
        counts: number of targets of each image.
        num_queries: number Q of queries.

    Returns:
        int64 [4, n, R], the rows of `Matches`; and the layers and images of costs that are not finite.
    """
    sizes = [min(count, num_queries) for count in counts]
    starts, ends = np.cumsum((0, *counts)), np.cumsum((0, *sizes))
    matches = np.empty((4, len(costs), ends[-1]), dtype=np.int64)
    matches[0] = np.arange(len(costs))[:, None]
    matches[1] = np.repeat(np.arange(len(counts)), sizes)
    failed = []
    all_finite = bool(np.isfinite(costs).all())
    for layer, image in product(range(len(costs)), range(len(counts))):
        mine, count = slice(ends[image], ends[image + 1]), counts[image]
        cost = costs[layer, image, :count]
        if not all_finite and not (finite := np.isfinite(cost)).all():
            failed.append((layer, image))
            cost = np.where(finite, cost, NON_FINITE_COST)
        if queries is None:
            query, target = _assign(cost)
        else:
            query, target = _assign_candidates(cost, queries[layer, image, :count])
        matches[2, layer, mine] = query
        matches[3, layer, mine] = target + starts[image]
    return matches, failed


def _assign(costs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Assigns targets to queries, given costs [T, Q], which are solved sooner than [Q, T]; returns as the next does."""
    targets, queries = linear_sum_assignment(costs)
    order = queries.argsort()
    return queries[order], targets[order]


def _assign_candidates(costs: np.ndarray, queries: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Assigns targets to their candidates, given costs and queries [T, k]; returns queries in order, and targets."""
    candidates, columns = np.unique(queries, return_inverse=True)
    table = np.full((len(candidates), len(costs)), np.inf)
    table[columns.reshape(costs.shape), np.arange(len(costs))[:, None]] = costs
    rows, targets = linear_sum_assignment(table)
    return candidates[rows].astype(np.int64), targets


def _copy_to_device(solved: Sequence[np.ndarray], device: torch.device) -> list[Matches]:
    flat = torch.from_numpy(np.concatenate([indices.ravel() for indices in solved])).to(device, non_blocking=True)
    parts = flat.split([indices.size for indices in solved])
    return [Matches(*part.view(indices.shape)) for part, indices in zip(parts, solved, strict=True)]
