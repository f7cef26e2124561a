"""The training loss: focal, L1 and GIoU over every decoder layer, the encoder's proposals and denoising queries."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

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
        self.focal_alpha = focal_alpha
        self.focal_gamma = focal_gamma

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
        matches, proposal_matches = self.matcher(output, targets)
        count = torch.full((), sum(targets.counts), dtype=torch.float32, device=output.logits.device)
        num_targets = mean_over_ranks(count).clamp(min=1)
        with torch.autocast(output.logits.device.type, enabled=False):
            losses = self._losses(output.logits, output.boxes_cxcywh, targets.labels, targets, matches)
            layer_suffixes = [f"_{index}" for index in range(len(output.logits) - 1)] + [""]
            suffixes = list(layer_suffixes)
            if output.proposals is not None and proposal_matches is not None:
                proposals = output.proposals
                classes = proposals.classes_of(targets.labels)
                encoder_losses = self._losses(
                    proposals.logits[None], proposals.boxes_cxcywh[None], classes, targets, proposal_matches
                )
                losses = {name: torch.cat((losses[name], encoder_losses[name])) for name in LOSS_NAMES}
                suffixes.append("_enc")
            if output.denoising is not None:
                denoising_losses = self._denoising_losses(output.denoising, targets)
                losses = {name: torch.cat((losses[name], denoising_losses[name])) for name in LOSS_NAMES}
                suffixes += [f"_dn{suffix}" for suffix in layer_suffixes]
            losses = {name: loss / num_targets for name, loss in losses.items()}
            total = torch.stack([self.loss_weights[name] * losses[name].sum() for name in LOSS_NAMES]).sum()
        terms = {
            name + suffix: value
            for name in LOSS_NAMES
            for suffix, value in zip(suffixes, losses[name].detach(), strict=True)
        }
        return Losses(total, terms)

    def _denoising_losses(self, denoising: DenoisingOutput, targets: Targets) -> dict[str, Tensor]:
        """Returns each loss of the denoising queries, summed over images and queries, a group's mean, float32 [n]."""
        num_layers = len(denoising.logits)
        layer = torch.arange(num_layers, device=denoising.batch.device).unsqueeze(1).expand(-1, len(denoising.batch))
        known = (denoising.batch, denoising.query, denoising.target)
        matches = Matches(layer, *(index.expand(num_layers, -1) for index in known))
        losses = self._losses(denoising.logits, denoising.boxes_cxcywh, targets.labels, targets, matches)
        return {name: loss / denoising.num_groups for name, loss in losses.items()}

    def _losses(
        self, logits: Tensor, boxes_cxcywh: Tensor, labels: Tensor, targets: Targets, matches: Matches
    ) -> dict[str, Tensor]:
        """Returns each loss summed over images and queries, float32 [n].

        Args:
            logits: float [n, B, Q, num_classes].
            boxes_cxcywh: float [n, B, Q, 4].
            labels: int64 [T_total], classes of the targets.
            targets: boxes of the targets.
            matches: the matches of these n layers.
        """
        logits, boxes_cxcywh = logits.float(), boxes_cxcywh.float()
        matched = (matches.layer, matches.batch, matches.query)
        class_targets = torch.zeros_like(logits)
        # Assigning the number 1.0 by index would copy it to the device and wait.
        class_targets.index_put_((*matched, labels[matches.target]), class_targets.new_ones(()))
        focal = sigmoid_focal_loss(logits, class_targets, self.focal_alpha, self.focal_gamma)
        matched_boxes, target_boxes = boxes_cxcywh[matched], targets.boxes_cxcywh[matches.target]
        return {
            "loss_ce": focal.sum((1, 2, 3)),
            "loss_bbox": box_l1_loss(matched_boxes, target_boxes).sum(1),
            "loss_giou": box_giou_loss(matched_boxes, target_boxes).sum(1),
        }
