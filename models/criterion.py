"""The training loss: focal, L1 and GIoU over every decoder layer, the encoder's proposals and denoising queries."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from models.compilation import Region
from models.losses import box_giou_loss, box_l1_loss, sigmoid_focal_loss
from models.matcher import HungarianMatcher, Matches
from models.structures import DenoisingOutput, DetectorOutput, Targets

LOSS_NAMES = ("loss_ce", "loss_bbox", "loss_giou")


@dataclass(frozen=True)
class Losses:
    """The loss of a batch.

    Attributes:
        total: float32 scalar, the weighted sum, to be differentiated.
        terms: unweighted float32 scalars, detached: each of `LOSS_NAMES` for the last decoder layer, with the suffix
            `_0`, `_1`, ... for the layers before, `_enc` for the encoder's proposals, and `_dn_0`, `_dn_1`, ..., `_dn`
            for the denoising queries of each layer.
    """

    total: Tensor
    terms: dict[str, Tensor]


class _Part(NamedTuple):
    """Predictions that have losses, by layer.

    Attributes:
        suffixes: of the names of each layer's terms.
        logits: float [n, B, Q, num_classes].
        boxes_cxcywh: float [n, B, Q, 4].
        labels: int64 [T_total], classes of the targets.
        matches: the matches of these n layers.
        num_groups: how often each target is matched; each of its losses counts 1 / num_groups.
    """

    suffixes: tuple[str, ...]
    logits: Tensor
    boxes_cxcywh: Tensor
    labels: Tensor
    matches: Matches
    num_groups: int

    def matched_boxes(self) -> Tensor:
        """Returns the boxes with a target, layer by layer, float32 [n * R, 4]."""
        return self.boxes_cxcywh.float()[self.matches.layer, self.matches.batch, self.matches.query].flatten(0, 1)

    def sum_layers(self, losses: Tensor) -> Tensor:
        """Sums losses [k, n * anything] by layer, [k, n]."""
        layers = len(self.suffixes)
        sums = losses.view(len(losses), layers, losses.shape[1] // layers).sum(2)
        return sums if self.num_groups == 1 else sums / self.num_groups


class FocalLoss(Region):
    """`sigmoid_focal_loss` of given settings."""

    def __init__(self, alpha: float, gamma: float) -> None:
        super().__init__()
        self.alpha = alpha
        self.gamma = gamma

    def compute(self, logits: Tensor, targets: Tensor) -> Tensor:  # type: ignore[override]
        """Returns the losses, float32 of the shape of logits and targets."""
        return sigmoid_focal_loss(logits, targets, self.alpha, self.gamma)


class BoxLosses(Region):
    """L1 and GIoU loss of corresponding boxes."""

    def compute(self, boxes_cxcywh: Tensor, targets_cxcywh: Tensor) -> Tensor:  # type: ignore[override]
        """Returns `box_l1_loss` and `box_giou_loss` of float32 [R, 4] and [R, 4], float32 [2, R]."""
        losses = (box_l1_loss(boxes_cxcywh, targets_cxcywh), box_giou_loss(boxes_cxcywh, targets_cxcywh))
        return torch.stack(losses)


class Criterion(nn.Module):
    """Matches targets and sums the weighted losses of all layers (arXiv 2010.04159, A.4; arXiv 2005.12872, 3.1).

    Denoising queries know their targets and have the same losses, averaged over the groups (arXiv 2203.03605, 3.3).
    """

    def __init__(
        self, *, matcher: HungarianMatcher, loss_weights: Mapping[str, float], focal_alpha: float, focal_gamma: float
    ) -> None:
        """Creates the criterion.

        Args:
            matcher: assigns targets to queries.
            loss_weights: the weight of each of `LOSS_NAMES`, the same in every layer, for proposals and denoising.
            focal_alpha: see `models.losses.sigmoid_focal_loss`.
            focal_gamma: see `models.losses.sigmoid_focal_loss`.

        Raises:
            ValueError: if a weight is missing or its name unknown.
        """
        super().__init__()
        if set(loss_weights) != set(LOSS_NAMES):
            raise ValueError(
                f"loss_weights must hold exactly {', '.join(LOSS_NAMES)}, got {', '.join(loss_weights)}; "
                "give every term its weight"
            )
        self.matcher = matcher
        self.loss_weights = dict(loss_weights)
        self.focal_loss = FocalLoss(focal_alpha, focal_gamma)
        self.box_losses = BoxLosses()

    def forward(self, output: DetectorOutput, targets: Targets, mean_over_ranks: Callable[[Tensor], Tensor]) -> Losses:
        """Computes the loss of a batch.

        Args:
            output: predictions of the decoder layers, and proposals and denoising queries where there are any.
            targets: ground truth of the batch.
            mean_over_ranks: averages a float32 scalar over all processes; the identity for one process.

        Returns:
            The weighted total and its terms, each divided by the mean number of targets a rank, at least 1.

        Notes:
            Float32 under any autocast; synchronises with the device only in the matcher.
        """
        count = torch.full((), sum(targets.counts), dtype=torch.float32, device=output.logits.device)
        num_targets = mean_over_ranks(count).clamp(min=1)
        parts = self._parts(output, targets)
        with torch.autocast(output.logits.device.type, enabled=False):
            losses = torch.cat((self._class_losses(parts), self._box_losses(parts, targets))) / num_targets
            sums = losses.sum(1).unbind()
            total = torch.stack([self.loss_weights[name] * part for name, part in zip(LOSS_NAMES, sums, strict=True)])
        suffixes = [suffix for part in parts for suffix in part.suffixes]
        names = [name + suffix for name in LOSS_NAMES for suffix in suffixes]
        return Losses(total.sum(), dict(zip(names, losses.detach().flatten().unbind(), strict=True)))

    def _parts(self, output: DetectorOutput, targets: Targets) -> list[_Part]:
        """Matches what has to be matched; returns the decoder layers, the proposals and the denoising queries."""
        matches, proposal_matches = self.matcher(output, targets)
        suffixes = (*(f"_{index}" for index in range(len(output.logits) - 1)), "")
        parts = [_Part(suffixes, output.logits, output.boxes_cxcywh, targets.labels, matches, 1)]
        if output.proposals is not None and proposal_matches is not None:
            proposals = output.proposals
            classes = proposals.classes_of(targets.labels)
            parts.append(
                _Part(("_enc",), proposals.logits[None], proposals.boxes_cxcywh[None], classes, proposal_matches, 1)
            )
        if output.denoising is not None:
            known = output.denoising
            names = tuple(f"_dn{suffix}" for suffix in suffixes)
            parts.append(
                _Part(names, known.logits, known.boxes_cxcywh, targets.labels, _known_matches(known), known.num_groups)
            )
        return parts

    def _class_losses(self, parts: Sequence[_Part]) -> Tensor:
        """Returns the focal loss of every layer of all parts, summed over images and queries, float32 [1, n]."""
        logits = torch.cat([part.logits.float().flatten() for part in parts])
        class_targets = torch.zeros_like(logits)
        one = class_targets.new_ones(())  # assigning the number 1.0 by index would copy it to the device and wait
        sizes = [part.logits.numel() for part in parts]
        for part, flat in zip(parts, class_targets.split(sizes), strict=True):
            places = (part.matches.layer, part.matches.batch, part.matches.query, part.labels[part.matches.target])
            flat.view(part.logits.shape).index_put_(places, one)
        focal = self.focal_loss(logits, class_targets)
        return torch.cat(
            [part.sum_layers(flat[None]) for part, flat in zip(parts, focal.split(sizes), strict=True)], dim=1
        )

    def _box_losses(self, parts: Sequence[_Part], targets: Targets) -> Tensor:
        """Returns L1 and GIoU loss of every layer of all parts, summed over the matches, float32 [2, n]."""
        boxes = torch.cat([part.matched_boxes() for part in parts])
        target_boxes = targets.boxes_cxcywh[torch.cat([part.matches.target.flatten() for part in parts])]
        losses = self.box_losses(boxes, target_boxes)
        sizes = [part.matches.target.numel() for part in parts]
        return torch.cat(
            [part.sum_layers(flat) for part, flat in zip(parts, losses.split(sizes, dim=1), strict=True)], dim=1
        )


def _known_matches(denoising: DenoisingOutput) -> Matches:
    """Returns the matches of the denoising queries, the same in every layer."""
    num_layers = len(denoising.logits)
    layer = torch.arange(num_layers, device=denoising.batch.device).unsqueeze(1).expand(-1, len(denoising.batch))
    known = (denoising.batch, denoising.query, denoising.target)
    return Matches(layer, *(index.expand(num_layers, -1) for index in known))
