"""Frozen records that pass between the data, the detectors, their losses and the evaluation."""

from dataclasses import dataclass

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
    """Dense proposals of a two-stage encoder, one a pixel of the feature levels.

    Attributes:
        logits: float32 [B, S, num_classes]; the first class scores objectness.
        boxes_cxcywh: float32 [B, S, 4], in 0..1.
    """

    logits: Tensor
    boxes_cxcywh: Tensor


@dataclass(frozen=True)
class DetectorOutput:
    """Predictions of every decoder layer; the last layer is the detector's answer.

    Attributes:
        logits: float32 [n, B, Q, num_classes], n = number of decoder layers.
        boxes_cxcywh: float32 [n, B, Q, 4], relative to each image's own unpadded size, in 0..1.
        proposals: the encoder's proposals, None for a one-stage detector.
    """

    logits: Tensor
    boxes_cxcywh: Tensor
    proposals: EncoderProposals | None


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
class FeatureLevels:
    """The feature maps of a batch, flattened row by row and concatenated, finest level first.

    S is the sum of the levels' sizes h * w, L the number of levels, C the model's width.

    Attributes:
        features: float [B, S, C].
        positions: float32 [B, S, C], position encoding plus level embedding.
        padding_mask: bool [B, S], True = padding.
        spatial_shapes: L host pairs (h, w).
        valid_ratios: float32 [B, L, 2] (x, y), unpadded share of each level's width and height, in 0..1.
    """

    features: Tensor
    positions: Tensor
    padding_mask: Tensor
    spatial_shapes: tuple[tuple[int, int], ...]
    valid_ratios: Tensor
