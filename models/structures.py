"""Frozen records that pass between the data, the detectors, their losses and the evaluation."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, cast

import torch
from torch import Tensor


@dataclass(frozen=True)
class ImageBatch:
    """Normalised images, padded at the bottom and the right to one size.

    Attributes:
        images: float32 [B, 3, H, W], zero in the padding.
        padding_mask: bool [B, H, W], True = padding.
    """

    images: Tensor
    padding_mask: Tensor


@dataclass(frozen=True)
class Targets:
    """Ground truth of a batch, the images' objects concatenated in order.

    Attributes:
        labels: int64 [T_total], contiguous class indices.
        boxes_cxcywh: float32 [T_total, 4], relative to each image's own unpadded size, in 0..1.
        counts: number of objects of each image, B host integers that sum to T_total.
    """

    labels: Tensor
    boxes_cxcywh: Tensor
    counts: tuple[int, ...]


@dataclass(frozen=True)
class EncoderProposals:
    """Proposals of a two-stage encoder that have a loss: all pixels of the feature levels, or the best Q of them.

    Attributes:
        logits: float32 [B, S or Q, num_classes].
        boxes_cxcywh: float32 [B, S or Q, 4], in 0..1.
        class_agnostic: whether the first class scores objectness and the others are background for every target
            (Deformable-DETR); otherwise the classes are those of the targets (DINO).
    """

    logits: Tensor
    boxes_cxcywh: Tensor
    class_agnostic: bool

    def classes_of(self, labels: Tensor) -> Tensor:
        """Returns the classes, int64, that these proposals are to have for targets with the given labels."""
        return torch.zeros_like(labels) if self.class_agnostic else labels


@dataclass(frozen=True)
class DenoisingOutput:
    """Predictions for noised targets, which know the target that they came from and need no matching.

    R is the number of positive queries of the batch; all other denoising queries are background.

    Attributes:
        logits: float32 [n, B, Q, num_classes], n = number of decoder layers, Q = denoising queries of an image.
        boxes_cxcywh: float32 [n, B, Q, 4], relative to each image's own unpadded size, in 0..1.
        batch: int64 [R], the image of each positive query.
        query: int64 [R], its index among the denoising queries of its image.
        target: int64 [R], index into the concatenated targets of the batch.
        num_groups: how often each target was noised; its losses count 1 / num_groups each.
    """

    logits: Tensor
    boxes_cxcywh: Tensor
    batch: Tensor
    query: Tensor
    target: Tensor
    num_groups: int


@dataclass(frozen=True)
class DetectorOutput:
    """Predictions of every decoder layer; the last layer is the detector's answer.

    Attributes:
        logits: float32 [n, B, Q, num_classes], n = number of decoder layers.
        boxes_cxcywh: float32 [n, B, Q, 4], relative to each image's own unpadded size, in 0..1.
        proposals: the encoder's proposals, None for a one-stage detector.
        denoising: predictions for noised targets, None outside the training of a detector that learns from them.
    """

    logits: Tensor
    boxes_cxcywh: Tensor
    proposals: EncoderProposals | None
    denoising: DenoisingOutput | None = None


@dataclass(frozen=True)
class Detections:
    """Scored boxes in pixels of the original images, best first.

    Attributes:
        scores: float32 [B, k], in 0..1.
        labels: int64 [B, k], contiguous class indices.
        boxes_xyxy: float32 [B, k, 4], absolute pixels of the original image.
    """

    scores: Tensor
    labels: Tensor
    boxes_xyxy: Tensor


@dataclass(frozen=True)
class LevelGeometry:
    """Shapes and padding of the feature maps of a batch, flattened row by row and concatenated, finest level first.

    S is the sum of the levels' sizes h * w, L the number of levels.

    Attributes:
        padding_mask: bool [B, S], True = padding.
        spatial_shapes: L host pairs (h, w).
        valid_ratios: float32 [B, L, 2] (x, y), unpadded share of each level's width and height, in 0..1.
    """

    padding_mask: Tensor
    spatial_shapes: tuple[tuple[int, int], ...]
    valid_ratios: Tensor


@dataclass(frozen=True)
class FeatureLevels:
    """The feature maps themselves; C is the model's width.

    Attributes:
        features: float [B, S, C], in the dtype of the products: under autocast, half precision.
        positions: the same dtype [B, S, C], position encoding plus level embedding.
        geometry: their shapes and padding.
    """

    features: Tensor
    positions: Tensor
    geometry: LevelGeometry


def take_apart(record: Any) -> tuple[list[Tensor], Callable[[Iterator[Tensor]], Any]]:
    """Returns the tensors of a record of dataclasses and tuples, and what makes such a record of other tensors."""
    if isinstance(record, Tensor):
        return [record], next
    if isinstance(record, tuple):
        parts, make = list(record), _make_tuple
    elif is_dataclass(record):
        parts, make = [getattr(record, field.name) for field in fields(record)], cast(Callable[..., Any], type(record))
    else:
        return [], lambda tensors: record
    taken = [take_apart(part) for part in parts]
    tensors = [tensor for tensors, _ in taken for tensor in tensors]
    return tensors, lambda tensors: make(*(rebuild(tensors) for _, rebuild in taken))


def _make_tuple(*parts: Any) -> Any:
    return parts
