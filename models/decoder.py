"""The deformable decoder: object queries attend to each other and to the encoded image."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from models.boxes import inverse_sigmoid
from models.compilation import Region
from models.layers.feed_forward import relu_dropout
from models.layers.ms_deform_attn import MSDeformAttn
from models.layers.residual_norm import ResidualNorm
from models.layers.self_attention import SelfAttention
from models.proposals import embed_boxes
from models.structures import LevelGeometry
from models.weight_casts import casting_weights


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
        fused: bool,
        fused_norm: bool,
    ) -> None:
        """Creates the layer; see `models.deformable_transformer.EncoderDecoder` for the arguments."""
        super().__init__()
        self.cross_attn = MSDeformAttn(
            d_model=d_model,
            num_heads=num_heads,
            num_levels=num_levels,
            num_points=num_points,
            backend=backend,
            fused=fused,
        )
        self.dropout = dropout
        self.norm1 = ResidualNorm(d_model, dropout=dropout, fused=fused_norm)
        self.self_attn = SelfAttention(d_model=d_model, num_heads=num_heads, dropout=dropout)
        self.norm2 = ResidualNorm(d_model, dropout=dropout, fused=fused_norm)
        self.linear1 = nn.Linear(d_model, dim_feedforward)
        self.linear2 = nn.Linear(dim_feedforward, d_model)
        self.norm3 = ResidualNorm(d_model, dropout=dropout, fused=fused_norm)

    def forward(
        self,
        query: Tensor,
        query_pos: Tensor,
        reference_points: Tensor,
        memory: Tensor,
        levels: LevelGeometry,
        attention_mask: Tensor | None,
    ) -> Tensor:
        """Updates the queries.

        Args:
            query: float [B, Q, C], content of the queries.
            query_pos: float [B, Q, C], position of the queries, in the dtype of the memory.
            reference_points: float32 [B, Q, L, 2 or 4]; 0..1 spans the padded level.
            memory: float [B, S, C], output of the encoder.
            levels: padding and shapes of the levels.
            attention_mask: bool [Q, Q], True where the query of the row must not see that of the column; None where
                all see all.

        Returns:
            [B, Q, C] in the dtype of the query: heads read it, and do so in float32.

        Notes:
            In between, the queries have the dtype of the memory, which is that of the products.
        """
        content, dtype = query.to(memory.dtype), memory.dtype
        attended = self.self_attn(content + query_pos, content, attention_mask)
        updated = self.norm2(query, attended, dtype)
        sampled = self.cross_attn(
            updated + query_pos, reference_points, memory, levels.spatial_shapes, levels.padding_mask
        )
        updated = self.norm1(updated, sampled, dtype)
        transformed = self.linear2(relu_dropout(self.linear1(updated), self.dropout, self.training))
        return self.norm3(updated, transformed, query.dtype)


class DeformableDecoder(nn.Module):
    """A stack of decoder layers that may refine the boxes of the queries from layer to layer.

    Attributes:
        bbox_embed: box head of every layer where boxes are refined, else None; set by the detector that owns the heads.
        class_embed: class heads of a two-stage detector, kept here because published checkpoints store them here too.
    """

    bbox_embed: nn.ModuleList | None
    class_embed: nn.ModuleList | None

    def __init__(
        self,
        *,
        layers: list[DeformableDecoderLayer],
        norm: nn.Module | None,
        ref_point_head: nn.Module | None,
        look_forward_twice: bool,
        inverse_sigmoid_eps: float,
        gradient_checkpointing: bool,
    ) -> None:
        """Creates the stack.

        Args:
            layers: the layers, first to last.
            norm: applied to every state that the heads read, not to what the next layer and the refinement read; None
                for none.
            ref_point_head: makes the queries' positions before every layer from the sine encoding of their boxes,
                [..., 2C] -> [..., C] (arXiv 2201.12329, section 4); None keeps one position in all layers.
            look_forward_twice: whether the boxes of a layer are predicted from the boxes of the layer before without a
                detachment, so that each box head also learns from the next layer's loss (arXiv 2203.03605, 3.5).
            inverse_sigmoid_eps: see `models.boxes.inverse_sigmoid`.
            gradient_checkpointing: whether training recomputes each layer in the backward pass to save memory.
        """
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.norm = norm
        self.ref_point_head = ref_point_head
        self.look_forward_twice = look_forward_twice
        self.refine = BoxRefinement(inverse_sigmoid_eps)
        self.gradient_checkpointing = gradient_checkpointing
        self.bbox_embed = None
        self.class_embed = None

    def forward(
        self,
        query: Tensor,
        query_pos: Tensor | None,
        reference_points: Tensor,
        memory: Tensor,
        levels: LevelGeometry,
        attention_mask: Tensor | None,
    ) -> DecoderOutput:
        """Runs the layers.

        Args:
            query: float [B, Q, C], content of the queries.
            query_pos: float [B, Q, C], position of the queries; None where the ref_point_head makes it.
            reference_points: float32 [B, Q, 2] (x, y) or [B, Q, 4] (cx, cy, w, h), relative to the unpadded image.
            memory: float [B, S, C], output of the encoder.
            levels: padding, shapes and valid ratios of the levels.
            attention_mask: bool [Q, Q], True where the query of the row must not see that of the column, or None.

        Returns:
            The states after every layer.

        Notes:
            Refined boxes are detached before the next layer reads them, so each box head learns from its own layer;
            looking forward twice, also from the next.
        """
        with casting_weights(*(part for part in (self.layers, self.ref_point_head) if part is not None)):
            return self._run_layers(query, query_pos, reference_points, memory, levels, attention_mask)

    def _run_layers(
        self,
        query: Tensor,
        query_pos: Tensor | None,
        reference_points: Tensor,
        memory: Tensor,
        levels: LevelGeometry,
        attention_mask: Tensor | None,
    ) -> DecoderOutput:
        query_pos = None if query_pos is None else query_pos.to(memory.dtype)
        hidden, boxes = [], []
        attached_points = reference_points
        for index, layer in enumerate(self.layers):
            level_points = scale_to_levels(reference_points, levels.valid_ratios)
            if self.ref_point_head is not None:
                query_pos = self.ref_point_head(embed_references(level_points[:, :, 0], query.shape[-1] // 2))
            arguments = (query, query_pos, level_points, memory, levels, attention_mask)
            if self.gradient_checkpointing and self.training:
                query = checkpoint(layer, *arguments, use_reentrant=False)
            else:
                query = layer(*arguments)
            hidden.append(query if self.norm is None else self.norm(query))
            if self.bbox_embed is not None:
                head = self.bbox_embed[index]
                refined = predict_boxes(head, query, reference_points, self.refine)
                if self.look_forward_twice:
                    boxes.append(predict_boxes(head, hidden[-1], attached_points, self.refine))
                else:
                    boxes.append(refined)
                attached_points, reference_points = refined, refined.detach()
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


def embed_references(boxes_cxcywh: Tensor, channels: int) -> Tensor:
    """Encodes boxes by sines in the order (cy, cx, w, h) of the published weights, float32 [..., 4 * channels].

    Args:
        boxes_cxcywh: float [..., 4], in 0..1.
        channels: channels of each number, even.
    """
    center_x, center_y, size = boxes_cxcywh.split((1, 1, 2), dim=-1)
    return embed_boxes(torch.cat((center_y, center_x, size), dim=-1), channels)


class BoxRefinement(Region):
    """Moves reference points by what a box head predicts.

    box = sigmoid(delta + inverse_sigmoid(reference)); a point moves the centre only (arXiv 2010.04159, A.3-A.4).
    """

    def __init__(self, inverse_sigmoid_eps: float) -> None:
        """Takes the eps of `models.boxes.inverse_sigmoid`."""
        super().__init__()
        self.inverse_sigmoid_eps = inverse_sigmoid_eps

    def compute(self, delta: Tensor, reference_points: Tensor) -> Tensor:  # type: ignore[override]
        """Computes boxes.

        Args:
            delta: float32 [..., 4].
            reference_points: float32 [..., 2] (x, y) or [..., 4] (cx, cy, w, h), in 0..1.

        Returns:
            float32 [..., 4] (cx, cy, w, h), in 0..1.
        """
        anchor = inverse_sigmoid(reference_points, self.inverse_sigmoid_eps)
        missing = delta.shape[-1] - anchor.shape[-1]
        return (delta + nn.functional.pad(anchor, (0, missing))).sigmoid()


def predict_boxes(
    head: Callable[[Tensor], Tensor], hidden: Tensor, reference_points: Tensor, refine: BoxRefinement
) -> Tensor:
    """Predicts boxes relative to reference points, in float32 under any autocast.

    Args:
        head: box head, [..., C] -> [..., 4].
        hidden: float [..., C].
        reference_points: float32 [..., 2] (x, y) or [..., 4] (cx, cy, w, h), in 0..1.
        refine: joins the head's answer and the points.

    Returns:
        float32 [..., 4] (cx, cy, w, h), in 0..1.
    """
    with torch.autocast(hidden.device.type, enabled=False):
        return refine(head(hidden.float()), reference_points)
