"""Contrastive denoising: noised targets as extra queries of the decoder (arXiv 2203.03605, section 3.3).

An image of T targets gets, in each group, T positive queries (targets with a little noise, to be repaired) and T
negative ones (with more noise, to be recognised as background). Images with fewer targets are padded to the `slots` of
the fullest one. The queries of an image, in this order:

    group 0                                   group 1
    positive 0..slots-1, negative 0..slots-1, positive 0..slots-1, negative 0..slots-1, ..., padding at the end

The padding at the end leaves few numbers of queries, mostly one, whatever the numbers of targets: CUDA graphs are
captured for each. No query before or after it sees it, and it has no loss.
"""

import logging
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from models.boxes import cxcywh_to_xyxy, xyxy_to_cxcywh
from models.structures import Targets

PADDING_BOX = 0.5

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DenoisingNoise:
    """Random numbers for every noised target, shape [groups, 2, R]: R targets, positive then negative.

    Attributes:
        relabel: float32 [groups, 2, R], uniform in 0..1; the label is replaced where it lies below a threshold.
        labels: int64 [groups, 2, R], uniform over the classes.
        shifts: float32 [groups, 2, R, 4], uniform in -1..1, one for each side of the box (x0, y0, x1, y1).
    """

    relabel: Tensor
    labels: Tensor
    shifts: Tensor


@dataclass(frozen=True)
class DenoisingQueries:
    """What the decoder reads of the noised targets of a batch.

    Attributes:
        labels: int64 [B, Q], classes; 0 in the padding.
        boxes_cxcywh: float32 [B, Q, 4]; 0.5 in the padding. A negative's sides may cross: its size is negative then.
        padding_mask: bool [B, Q], True = padding, a query without a target.
        group: int64 [Q], the group of each query, from 0 on; the padding at the end has other numbers.
    """

    labels: Tensor
    boxes_cxcywh: Tensor
    padding_mask: Tensor
    group: Tensor

    def attention_mask(self, num_matching_queries: int) -> Tensor:
        """Hides each group from the other groups and from the matching queries, which follow the denoising ones.

        Args:
            num_matching_queries: number of queries that are matched to targets.

        Returns:
            bool [Q + num_matching_queries] squared, True where the query of the row must not see that of the column.
        """
        group = torch.nn.functional.pad(self.group, (0, num_matching_queries), value=-1)
        return (group.unsqueeze(1) != group) & (group >= 0)


@dataclass(frozen=True)
class NoisedTargets:
    """Noised targets of a batch, and where they came from.

    Attributes:
        queries: what the decoder reads, padding at the end included.
        num_queries: denoising queries of an image without the padding at the end.
        num_groups: how often each target was noised.
        batch: int64 [positives], the image of each positive query.
        query: int64 [positives], its index among the denoising queries of its image.
        target: int64 [positives], the target that it came from, an index into the concatenated targets of the batch.
    """

    queries: DenoisingQueries
    num_queries: int
    num_groups: int
    batch: Tensor
    query: Tensor
    target: Tensor


class ContrastiveDenoising:
    """Makes denoising queries from the targets of a batch."""

    def __init__(self, *, num_queries: int, max_queries: int, label_noise_ratio: float, box_noise_scale: float) -> None:
        """Keeps the settings.

        Args:
            num_queries: positive queries aimed at for the image with the most targets, at least 1: there are as many
                groups as fit into it, at least one.
            max_queries: upper bound of the denoising queries of an image, positive and negative, at least 2. Images
                with more than half as many targets are noised in part, another random part each time. Batches are
                padded to a multiple of 2 * num_queries, or else to this bound.
            label_noise_ratio: twice the probability that a label is replaced by a random one, in 0..2.
            box_noise_scale: largest shift of a positive's sides in halves of the box's width or height, at least 0;
                a negative's sides move by one to two times as much.

        Raises:
            ValueError: if a setting is out of its range.

        Notes:
            The official code divides by the number of targets only where num_queries is at least 50; here always. It
            has no upper bound.
        """
        for name, value, low in (("num_queries", num_queries, 1), ("max_queries", max_queries, 2)):
            if value < low:
                raise ValueError(f"{name} must be at least {low}, got {value}; raise it")
        if not 0 <= label_noise_ratio <= 2:
            raise ValueError(f"label_noise_ratio must lie in 0..2, got {label_noise_ratio}; give twice a probability")
        if box_noise_scale < 0:
            raise ValueError(f"box_noise_scale must be at least 0, got {box_noise_scale}; 0 leaves the boxes alone")
        self.num_queries = num_queries
        self.max_queries = max_queries
        self.label_noise_ratio = label_noise_ratio
        self.box_noise_scale = box_noise_scale
        self._reported = False

    def make_queries(self, targets: Targets, num_classes: int, generator: torch.Generator | None) -> NoisedTargets:
        """Noises the targets.

        Args:
            targets: ground truth of the batch; images without targets, and batches of them, are fine.
            num_classes: number of classes that a replaced label is drawn from.
            generator: source of the noise on the targets' device; None takes the device's own.

        Returns:
            The queries and where they came from; nothing but padding for a batch without targets.

        Notes:
            Never waits for the device. Logs once if max_queries makes it leave targets out.
        """
        largest = max(targets.counts)
        slots = min(largest, self.max_queries // 2)
        num_groups = max(1, min(self.num_queries, self.max_queries // 2) // max(1, slots))
        self._report_cap(largest)
        device = targets.labels.device
        batch, slot, target = _choose_targets(targets.counts, slots, device, generator)
        query = torch.arange(2 * num_groups, device=device).view(num_groups, 2, 1) * slots + slot

        noise = draw_noise((num_groups, 2, len(target)), num_classes, device, generator)
        labels = torch.where(noise.relabel < self.label_noise_ratio / 2, noise.labels, targets.labels[target])
        num_queries = 2 * num_groups * slots
        shape = (len(targets.counts), self._pad(num_queries))
        place = (batch.expand_as(query), query)
        boxes_cxcywh = torch.full((*shape, 4), PADDING_BOX, device=device)
        padding_mask = torch.ones(shape, dtype=torch.bool, device=device)
        queries = DenoisingQueries(
            labels=labels.new_zeros(shape).index_put_(place, labels),
            boxes_cxcywh=boxes_cxcywh.index_put_(place, self._shift(targets.boxes_cxcywh[target], noise.shifts)),
            padding_mask=padding_mask.index_put_(place, padding_mask.new_zeros(())),
            group=(torch.arange(shape[1], device=device) // max(1, 2 * slots)).clamp(max=num_groups),
        )
        return NoisedTargets(
            queries=queries,
            num_queries=num_queries,
            num_groups=num_groups,
            batch=batch.expand_as(query[:, 0]).flatten(),
            query=query[:, 0].flatten(),
            target=target.expand_as(query[:, 0]).flatten(),
        )

    def _pad(self, needed: int) -> int:
        """Rounds a number of queries up to a multiple of 2 * num_queries, at least one, or to max_queries."""
        multiple = 2 * self.num_queries
        return min(max(1, math.ceil(needed / multiple)) * multiple, self.max_queries)

    def _shift(self, boxes_cxcywh: Tensor, shifts: Tensor) -> Tensor:
        """Moves the sides of boxes [R, 4] by shifts [groups, 2, R, 4]; returns float32 [groups, 2, R, 4]."""
        further = torch.arange(2.0, device=shifts.device).view(2, 1, 1)  # nothing for positives, one for negatives
        half_sizes = boxes_cxcywh[:, 2:].repeat(1, 2) / 2
        shifts = (shifts + torch.copysign(further, shifts)) * half_sizes * self.box_noise_scale
        shifted = cxcywh_to_xyxy(boxes_cxcywh) + shifts
        return xyxy_to_cxcywh(shifted.clamp(min=0, max=1))

    def _report_cap(self, num_targets: int) -> None:
        if num_targets <= self.max_queries // 2 or self._reported:
            return
        self._reported = True
        logger.warning(
            "an image has %d targets, but max_queries=%d leaves room for %d: denser images are noised in part "
            "(raise model.denoising.max_queries if memory allows)",
            num_targets,
            self.max_queries,
            self.max_queries // 2,
        )


def draw_noise(
    shape: tuple[int, int, int], num_classes: int, device: torch.device, generator: torch.Generator | None
) -> DenoisingNoise:
    """Draws the random numbers of a batch.

    Args:
        shape: groups, 2 and number R of targets.
        num_classes: number of classes.
        device: where the numbers are wanted.
        generator: their source, on that device; None takes the device's own.
    """
    return DenoisingNoise(
        relabel=torch.rand(shape, device=device, generator=generator),
        labels=torch.randint(num_classes, shape, device=device, generator=generator),
        shifts=torch.rand((*shape, 4), device=device, generator=generator) * 2 - 1,
    )


def _choose_targets(
    counts: tuple[int, ...], slots: int, device: torch.device, generator: torch.Generator | None
) -> Tensor:
    """Chooses the targets of each image that are noised: all of them, or a random part of `slots`.

    Returns:
        int64 [3, R]: the image of each, its slot, and its index in the concatenated targets; made on the host, which
        copies some kilobytes without waiting.
    """
    kept, starts = np.minimum(counts, slots), np.cumsum((0, *counts))[:-1]
    batch = np.repeat(np.arange(len(counts)), kept)
    slot = np.arange(len(batch)) - np.repeat(np.cumsum(kept) - kept, kept)
    chosen = torch.from_numpy(np.stack((batch, slot, starts[batch] + slot))).to(device, non_blocking=True)
    for count, start, part in zip(counts, starts, chosen[2].split(kept.tolist()), strict=True):
        if count > slots:
            order = torch.rand(count, device=device, generator=generator).argsort()
            part.copy_(order[:slots] + int(start))
    return chosen
