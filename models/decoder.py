"""The deformable decoder: object queries attend to each other and to the encoded image."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from models.boxes import inverse_sigmoid
from models.layers.ms_deform_attn import MSDeformAttn
from models.structures import FeatureLevels


@dataclass(frozen=True)
class DecoderOutput:
    """States of the queries after every decoder layer.

    Attributes:
        hidden: float [n, B, Q, C], n = number of layers.
        boxes_cxcywh: float32 [n, B, Q, 4] in 0..1 where the decoder refines boxes, else None.
    """

    hidden: Tensor
    boxes_cxcywh: Tensor | None


class DeformableDecoderLayer(nn.Module):
    """Self-attention, deformable cross-attention and a feed-forward block, each followed by residual and LayerNorm."""

    def __init__(
        self,
        *,
        d_model: int,
        num_heads: int,
        num_levels: int,
        num_points: int,
        dim_feedforward: int,
        dropout: float,
        backend: str,
    ) -> None:
        """Creates the layer; see `models.deformable_transformer.DeformableTransformer` for the arguments."""
        super().__init__()
        self.cross_attn = MSDeformAttn(
            d_model=d_model, num_heads=num_heads, num_levels=num_levels, num_points=num_points, backend=backend
        )
        self.dropout1 = nn.Dropout(dropout)
        self.norm1 = nn.LayerNorm(d_model)
        self.self_attn = nn.MultiheadAttention(d_model, num_heads, dropout=dropout, batch_first=True)
        self.dropout2 = nn.Dropout(dropout)
        self.norm2 = nn.LayerNorm(d_model)
        self.linear1 = nn.Linear(d_model, dim_feedforward)
        self.dropout3 = nn.Dropout(dropout)
        self.linear2 = nn.Linear(dim_feedforward, d_model)
        self.dropout4 = nn.Dropout(dropout)
        self.norm3 = nn.LayerNorm(d_model)

    def forward(
        self, query: Tensor, query_pos: Tensor, reference_points: Tensor, memory: Tensor, levels: FeatureLevels
    ) -> Tensor:
        """Updates the queries.

        Args:
            query: float [B, Q, C], content of the queries.
            query_pos: float [B, Q, C], position of the queries.
            reference_points: float32 [B, Q, L, 2 or 4]; 0..1 spans the padded level.
            memory: float [B, S, C], output of the encoder.
            levels: padding and shapes of the levels; its features are not read.

        Returns:
            float [B, Q, C].
        """
        positioned = query + query_pos
        attended, _ = self.self_attn(positioned, positioned, query, need_weights=False)
        query = self.norm2(query + self.dropout2(attended))
        sampled = self.cross_attn(
            query + query_pos, reference_points, memory, levels.spatial_shapes, levels.padding_mask
        )
        query = self.norm1(query + self.dropout1(sampled))
        transformed = self.linear2(self.dropout3(self.linear1(query).relu()))
        return self.norm3(query + self.dropout4(transformed))


class DeformableDecoder(nn.Module):
    """A stack of decoder layers that may refine the boxes of the queries from layer to layer.

    Attributes:
        bbox_embed: box head of every layer where boxes are refined, else None; set by the detector that owns the heads.
        class_embed: class heads of a two-stage detector, kept here because published checkpoints store them here too.
    """

    bbox_embed: nn.ModuleList | None
    class_embed: nn.ModuleList | None

    def __init__(
        self, *, layers: list[DeformableDecoderLayer], inverse_sigmoid_eps: float, gradient_checkpointing: bool
    ) -> None:
        """Creates the stack.

        Args:
            layers: the layers, first to last.
            inverse_sigmoid_eps: see `models.boxes.inverse_sigmoid`.
            gradient_checkpointing: whether training recomputes each layer in the backward pass to save memory.
        """
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.inverse_sigmoid_eps = inverse_sigmoid_eps
        self.gradient_checkpointing = gradient_checkpointing
        self.bbox_embed = None
        self.class_embed = None

    def forward(
        self, query: Tensor, query_pos: Tensor, reference_points: Tensor, memory: Tensor, levels: FeatureLevels
    ) -> DecoderOutput:
        """Runs the layers.

        Args:
            query: float [B, Q, C], content of the queries.
            query_pos: float [B, Q, C], position of the queries.
            reference_points: float32 [B, Q, 2] (x, y) or [B, Q, 4] (cx, cy, w, h), relative to the unpadded image.
            memory: float [B, S, C], output of the encoder.
            levels: padding, shapes and valid ratios of the levels.

        Returns:
            The states after every layer.

        Notes:
            Refined boxes are detached before the next layer reads them, so each box head learns from its own layer.
        """
        hidden, boxes = [], []
        for index, layer in enumerate(self.layers):
            arguments = (query, query_pos, scale_to_levels(reference_points, levels.valid_ratios), memory, levels)
            if self.gradient_checkpointing and self.training:
                query = checkpoint(layer, *arguments, use_reentrant=False)
            else:
                query = layer(*arguments)
            hidden.append(query)
            if self.bbox_embed is not None:
                boxes.append(predict_boxes(self.bbox_embed[index], query, reference_points, self.inverse_sigmoid_eps))
                reference_points = boxes[-1].detach()
        return DecoderOutput(torch.stack(hidden), torch.stack(boxes) if boxes else None)


def scale_to_levels(reference_points: Tensor, valid_ratios: Tensor) -> Tensor:
    """Turns points or boxes of the unpadded image into ones of the padded levels.

    Args:
        reference_points: float32 [B, Q, 2 or 4].
        valid_ratios: float32 [B, L, 2] (x, y).

    Returns:
        float32 [B, Q, L, 2 or 4].
    """
    repeats = reference_points.shape[-1] // 2
    return reference_points.unsqueeze(2) * valid_ratios.repeat(1, 1, repeats).unsqueeze(1)


def predict_boxes(head: Callable[[Tensor], Tensor], hidden: Tensor, reference_points: Tensor, eps: float) -> Tensor:
    """Predicts boxes relative to reference points, in float32 under any autocast.

    box = sigmoid(head(hidden) + inverse_sigmoid(reference)); a point moves the centre only (arXiv 2010.04159, A.3-A.4).

    Args:
        head: box head, [..., C] -> [..., 4].
        hidden: float [..., C].
        reference_points: float32 [..., 2] (x, y) or [..., 4] (cx, cy, w, h), in 0..1.
        eps: see `models.boxes.inverse_sigmoid`.

    Returns:
        float32 [..., 4] (cx, cy, w, h), in 0..1.
    """
    with torch.autocast(hidden.device.type, enabled=False):
        delta = head(hidden.float())
        anchor = inverse_sigmoid(reference_points, eps)
        missing = delta.shape[-1] - anchor.shape[-1]
        return (delta + nn.functional.pad(anchor, (0, missing))).sigmoid()
