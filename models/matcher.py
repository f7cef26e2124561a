"""One-to-one assignment of targets to queries, for all decoder layers and images at once."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from models.boxes import cxcywh_to_xyxy, pairwise_generalized_box_iou
from models.losses import focal_matching_cost
from models.structures import DetectorOutput, Targets

NON_FINITE_COST = 1e8


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
        self.cost_class = cost_class
        self.cost_bbox = cost_bbox
        self.cost_giou = cost_giou
        self.focal_alpha = focal_alpha
        self.focal_gamma = focal_gamma

    @torch.no_grad()
    def forward(self, output: DetectorOutput, targets: Targets) -> tuple[Matches, Matches | None]:
        """Matches every decoder layer, and the proposals of a two-stage encoder.

        Args:
            output: predictions of the decoder layers.
            targets: ground truth of the batch. Class-agnostic proposals are matched to the same boxes with class 0.

        Returns:
            The matches of the decoder layers, and those of the proposals (n = 1) or None without proposals.

        Notes:
            Float32 under any autocast. One copy from the device, of all costs, and one back to it. A cost that is not
            finite counts as 1e8, with a warning that names the layer and the image of each.
        """
        labels = pad_sequence(targets.labels.split(targets.counts), batch_first=True)
        boxes = pad_sequence(targets.boxes_cxcywh.split(targets.counts), batch_first=True)
        with torch.autocast(boxes.device.type, enabled=False):
            costs = [self._costs(output.logits, output.boxes_cxcywh, labels, boxes)]
            if output.proposals is not None:
                proposals = output.proposals
                classes = proposals.classes_of(labels)
                costs.append(self._costs(proposals.logits[None], proposals.boxes_cxcywh[None], classes, boxes))
        names = [[f"decoder layer {index}" for index in range(len(output.logits))], ["the encoder's proposals"]]
        solved = [
            _solve(cost, targets.counts, layer_names)
            for cost, layer_names in zip(_copy_to_host(costs), names[: len(costs)], strict=True)
        ]
        matches = _copy_to_device(solved, boxes.device)
        return matches[0], matches[1] if output.proposals is not None else None

    def _costs(self, logits: Tensor, boxes: Tensor, labels: Tensor, target_boxes: Tensor) -> Tensor:
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
        giou = pairwise_generalized_box_iou(cxcywh_to_xyxy(boxes), cxcywh_to_xyxy(target_boxes))
        return self.cost_bbox * cost_bbox + self.cost_class * cost_class - self.cost_giou * giou


def _copy_to_host(costs: Sequence[Tensor]) -> list[np.ndarray]:
    flat = torch.cat([cost.flatten() for cost in costs]).cpu()
    parts = flat.split([cost.numel() for cost in costs])
    return [part.view(cost.shape).numpy() for part, cost in zip(parts, costs, strict=True)]


def _solve(costs: np.ndarray, counts: tuple[int, ...], layer_names: Sequence[str]) -> np.ndarray:
    """Solves the assignments of costs [n, B, Q, T]; returns int64 [4, n, R], the rows of `Matches`."""
    starts = np.cumsum((0, *counts))
    non_finite: list[str] = []
    layers = []
    for layer, layer_costs in enumerate(costs):
        pairs = [np.empty((4, 0), dtype=np.int64)]
        for image, count in enumerate(counts):
            cost = layer_costs[image, :, :count]
            if not np.isfinite(cost).all():
                non_finite.append(f"{layer_names[layer]}, image {image}")
                cost = np.where(np.isfinite(cost), cost, NON_FINITE_COST)
            query, target = linear_sum_assignment(cost)
            pairs.append(
                np.stack((np.full_like(query, layer), np.full_like(query, image), query, target + starts[image]))
            )
        layers.append(np.concatenate(pairs, axis=1))
    if non_finite:
        warnings.warn(f"matching costs are not finite for {'; '.join(non_finite)}: training diverges", stacklevel=3)
    return np.stack(layers, axis=1)


def _copy_to_device(solved: Sequence[np.ndarray], device: torch.device) -> list[Matches]:
    flat = torch.from_numpy(np.concatenate([indices.ravel() for indices in solved])).to(device, non_blocking=True)
    parts = flat.split([indices.size for indices in solved])
    return [Matches(*part.view(indices.shape)) for part, indices in zip(parts, solved, strict=True)]
