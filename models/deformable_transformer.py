"""The deformable transformer: encoder, choice of the queries, decoder."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from models.decoder import DeformableDecoder, DeformableDecoderLayer
from models.encoder import DeformableEncoder, DeformableEncoderLayer
from models.errors import UnfitSettingError
from models.layers.autocast import autocast_dtype
from models.layers.ms_deform_attn import MSDeformAttn
from models.position_encoding import SinePositionEncoding
from models.proposals import embed_boxes, pixel_proposals
from models.structures import EncoderProposals, FeatureLevels, LevelGeometry
from models.weight_casts import casting_weights


@dataclass(frozen=True)
class TransformerOutput:
    """What the detection heads read.

    Attributes:
        hidden: float [n, B, Q, C], the queries after each of the n decoder layers.
        reference_points: float32 [B, Q, 2] (x, y) or [B, Q, 4] (cx, cy, w, h), where the first layer looked, in 0..1.
        boxes_cxcywh: float32 [n, B, Q, 4] where the decoder refines boxes, else None.
        proposals: the encoder's proposals where it is two-stage, else None.
    """

    hidden: Tensor
    reference_points: Tensor
    boxes_cxcywh: Tensor | None
    proposals: EncoderProposals | None


class EncoderDecoder(nn.Module):
    """The parts that all deformable transformers share; a subclass chooses the queries.

    A subclass adds its own parts and calls `reset_parameters`.

    Args:
        d_model: width C of features and queries, a multiple of 4 and of num_heads.
        num_heads: attention heads M.
        num_encoder_layers: layers of the encoder.
        num_decoder_layers: layers of the decoder.
        num_feature_levels: feature levels L.
        num_encoder_points: sampling points K of a head on each level, in the encoder.
        num_decoder_points: the same in the decoder.
        num_queries: object queries Q.
        dim_feedforward: channels inside the feed-forward blocks.
        dropout: probability of dropping, in 0..1.
        inverse_sigmoid_eps: see `models.boxes.inverse_sigmoid`.
        gradient_checkpointing: whether training recomputes each layer in the backward pass to save memory.
        backend: backend of the op, one of `msda_op.BACKENDS`.
        fused: whether the op takes offsets and logits instead of locations and weights, see `MSDeformAttn`.
        fused_norm: whether norms take dropout and residual into one kernel on a GPU, see `ResidualNorm`.
        decoder_norm: see `models.decoder.DeformableDecoder`, as the next two.
        ref_point_head: see there.
        look_forward_twice: see there.
    """

    def __init__(
        self,
        *,
        d_model: int,
        num_heads: int,
        num_encoder_layers: int,
        num_decoder_layers: int,
        num_feature_levels: int,
        num_encoder_points: int,
        num_decoder_points: int,
        num_queries: int,
        dim_feedforward: int,
        dropout: float,
        inverse_sigmoid_eps: float,
        gradient_checkpointing: bool,
        backend: str,
        fused: bool,
        fused_norm: bool,
        decoder_norm: nn.Module | None,
        ref_point_head: nn.Module | None,
        look_forward_twice: bool,
    ) -> None:
        super().__init__()
        self.d_model = d_model
        self.num_feature_levels = num_feature_levels
        self.num_decoder_layers = num_decoder_layers
        self.num_queries = num_queries
        self.inverse_sigmoid_eps = inverse_sigmoid_eps
        layer_settings: dict[str, Any] = {
            "d_model": d_model,
            "num_heads": num_heads,
            "num_levels": num_feature_levels,
            "dim_feedforward": dim_feedforward,
            "dropout": dropout,
            "backend": backend,
            "fused": fused,
            "fused_norm": fused_norm,
        }
        encoder_layers = [
            DeformableEncoderLayer(num_points=num_encoder_points, **layer_settings) for _ in range(num_encoder_layers)
        ]
        decoder_layers = [
            DeformableDecoderLayer(num_points=num_decoder_points, **layer_settings) for _ in range(num_decoder_layers)
        ]
        self.encoder = DeformableEncoder(layers=encoder_layers, gradient_checkpointing=gradient_checkpointing)
        self.decoder = DeformableDecoder(
            layers=decoder_layers,
            norm=decoder_norm,
            ref_point_head=ref_point_head,
            look_forward_twice=look_forward_twice,
            inverse_sigmoid_eps=inverse_sigmoid_eps,
            gradient_checkpointing=gradient_checkpointing,
        )
        self.level_embed = nn.Parameter(torch.empty(num_feature_levels, d_model))

    def reset_parameters(self) -> None:
        """Initialises matrices by Xavier, attention by its own rule and the level embedding by N(0, 1)."""
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)
        for module in self.modules():
            if isinstance(module, MSDeformAttn):
                module.reset_parameters()
        nn.init.normal_(self.level_embed)

    def encode(
        self, feature_maps: list[Tensor], padding_masks: list[Tensor], position_encoding: SinePositionEncoding
    ) -> tuple[LevelGeometry, Tensor]:
        """Flattens the levels and encodes them.

        Args:
            feature_maps: L tensors float [B, C, H_l, W_l], finest first.
            padding_masks: L tensors bool [B, H_l, W_l], True = padding.
            position_encoding: encodes the positions of each level.

        Returns:
            Shapes and padding of the levels, and the encoder's output float [B, S, C].
        """
        features = torch.cat([features.flatten(2).transpose(1, 2) for features in feature_maps], dim=1)
        dtype = autocast_dtype(features.device) or features.dtype
        geometry = LevelGeometry(
            padding_mask=torch.cat([mask.flatten(1) for mask in padding_masks], dim=1),
            spatial_shapes=tuple((features.shape[2], features.shape[3]) for features in feature_maps),
            valid_ratios=torch.stack([valid_ratio(mask) for mask in padding_masks], dim=1),
        )
        positions = position_encoding.embed_levels(geometry, self.level_embed, dtype)
        with casting_weights(self.encoder):
            return geometry, self.encoder(FeatureLevels(features.to(dtype), positions, geometry))


class DeformableTransformer(EncoderDecoder):
    """Encodes feature levels and decodes object queries (arXiv 2010.04159, sections 4 and A.4)."""

    def __init__(self, *, two_stage: bool, **settings: Any) -> None:
        """Creates encoder and decoder.

        Args:
            two_stage: whether the queries start from the encoder's best proposals instead of learned embeddings.
            **settings: see `EncoderDecoder`, up to `fused_norm`.
        """
        super().__init__(decoder_norm=None, ref_point_head=None, look_forward_twice=False, **settings)
        self.two_stage = two_stage
        if two_stage:
            self.enc_output = nn.Linear(self.d_model, self.d_model)
            self.enc_output_norm = nn.LayerNorm(self.d_model)
            self.pos_trans = nn.Linear(2 * self.d_model, 2 * self.d_model)
            self.pos_trans_norm = nn.LayerNorm(2 * self.d_model)
        else:
            self.reference_points = nn.Linear(self.d_model, 2)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialises as every transformer, and lets the reference points of equal queries start in the middle."""
        super().reset_parameters()
        if not self.two_stage:
            nn.init.zeros_(self.reference_points.bias)

    def forward(
        self,
        feature_maps: list[Tensor],
        padding_masks: list[Tensor],
        position_encoding: SinePositionEncoding,
        query_embed: Tensor | None,
    ) -> TransformerOutput:
        """Encodes the levels and decodes the queries.

        Args:
            feature_maps: L tensors float [B, C, H_l, W_l], finest first.
            padding_masks: L tensors bool [B, H_l, W_l], True = padding.
            position_encoding: encodes the positions of each level.
            query_embed: float [Q, 2C], position then content of the learned queries; None with two_stage.

        Returns:
            Queries after each layer, and boxes and proposals where the variant makes them.

        Raises:
            ValueError: if a two-stage model is asked for more queries than the images have pixels on all levels.
        """
        levels, memory = self.encode(feature_maps, padding_masks, position_encoding)
        proposals = None
        if query_embed is None:
            proposals, reference_points, query_embed = self._select_proposals(memory, levels)
        else:
            query_embed = query_embed.expand(memory.shape[0], -1, -1)
            with torch.autocast(memory.device.type, enabled=False):
                reference_points = self.reference_points(query_embed[..., : self.d_model]).sigmoid()
        query_pos, query = query_embed.split(self.d_model, dim=-1)
        decoded = self.decoder(query, query_pos, reference_points, memory, levels, attention_mask=None)
        return TransformerOutput(decoded.hidden, reference_points, decoded.boxes_cxcywh, proposals)

    def _select_proposals(self, memory: Tensor, levels: LevelGeometry) -> tuple[EncoderProposals, Tensor, Tensor]:
        """Scores all proposals and makes queries of the best.

        Returns:
            All proposals; the best ones' boxes, float32 [B, Q, 4], detached; their query embeddings, [B, Q, 2C].
        """
        class_heads, box_heads = self.decoder.class_embed, self.decoder.bbox_embed
        assert class_heads is not None, "the detector sets the heads of a two-stage decoder"
        assert box_heads is not None, "the detector sets the heads of a two-stage decoder"
        anchors, valid = pixel_proposals(levels)
        features = self.enc_output_norm(self.enc_output(torch.where(valid.unsqueeze(-1), memory, 0.0)))
        with torch.autocast(memory.device.type, enabled=False):
            features = features.float()
            logits = class_heads[-1](features)
            boxes_cxcywh = (box_heads[-1](features) + anchors).sigmoid()
        best = best_proposals(logits[..., 0], self.num_queries)
        reference_points = boxes_cxcywh.detach().gather(1, best.unsqueeze(-1).expand(-1, -1, 4))
        query_embed = self.pos_trans_norm(self.pos_trans(embed_boxes(reference_points, self.d_model // 2)))
        return EncoderProposals(logits, boxes_cxcywh, class_agnostic=True), reference_points, query_embed


def best_proposals(scores: Tensor, num_queries: int) -> Tensor:
    """Finds the proposals that become queries.

    Args:
        scores: float32 [B, S].
        num_queries: number Q of queries.

    Returns:
        int64 [B, Q], best first.

    Raises:
        UnfitSettingError: if there are fewer proposals than queries.
    """
    num_proposals = scores.shape[1]
    if num_queries > num_proposals:
        raise UnfitSettingError(
            f"num_queries must be at most the number of proposals, {num_proposals} for images of this size, "
            f"got {num_queries}; take fewer queries or larger images"
        )
    return scores.topk(num_queries, dim=1).indices


def valid_ratio(padding_mask: Tensor) -> Tensor:
    """Measures the unpadded share of a level.

    Args:
        padding_mask: bool [B, H, W], True = padding.

    Returns:
        float32 [B, 2] (x, y), in 0..1.
    """
    valid = ~padding_mask
    return torch.stack([edge.mean(-1, dtype=torch.float32) for edge in (valid[:, 0, :], valid[:, :, 0])], dim=-1)
