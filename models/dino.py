"""DINO (arXiv 2203.03605): Deformable-DETR's encoder and decoder with better queries and denoising."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from models.backbone import Backbone
from models.boxes import inverse_sigmoid
from models.checkpoints import load_weights
from models.cuda_graphs import TrainingGraphs
from models.deformable_detr import box_head, check_sizes, class_head, classify, feature_levels, input_projections
from models.deformable_transformer import EncoderDecoder, TransformerOutput, best_proposals
from models.denoising import ContrastiveDenoising, DenoisingQueries, NoisedTargets
from models.layers.mlp import MLP
from models.position_encoding import SinePositionEncoding
from models.proposals import pixel_proposals
from models.structures import DenoisingOutput, DetectorOutput, EncoderProposals, ImageBatch, LevelGeometry, Targets

NUM_POSITION_LAYERS = 2


@dataclass(frozen=True)
class ExtraQueries:
    """Queries that the decoder gets before its own ones.

    Attributes:
        content: float [B, Q, C].
        reference_points: float32 [B, Q, 4] (cx, cy, w, h), in 0..1.
        attention_mask: bool [Q + own queries] squared, True where the query of the row must not see that of the column.
    """

    content: Tensor
    reference_points: Tensor
    attention_mask: Tensor


class DinoTransformer(EncoderDecoder):
    """Deformable transformer with mixed query selection: the encoder's best boxes, with learned contents (section 3.4).

    Positions of the queries follow their boxes from layer to layer, the heads read normalised states, and the boxes of
    a layer look forward twice (section 3.5).

    Attributes:
        enc_out_class_embed: scores the proposals; set by the detector, which makes the heads.
        enc_out_bbox_embed: moves the proposals; set by the detector.
    """

    enc_out_class_embed: nn.Module
    enc_out_bbox_embed: nn.Module

    def __init__(self, *, d_model: int, **settings: Any) -> None:
        """Creates encoder and decoder.

        Args:
            d_model: width C of features and queries, a multiple of 4 and of the number of heads.
            **settings: see `models.deformable_transformer.EncoderDecoder`, up to `fused_norm`.
        """
        super().__init__(
            d_model=d_model,
            decoder_norm=nn.LayerNorm(d_model),
            ref_point_head=MLP(
                in_features=2 * d_model,
                hidden_features=d_model,
                out_features=d_model,
                num_layers=NUM_POSITION_LAYERS,
            ),
            look_forward_twice=True,
            **settings,
        )
        self.tgt_embed = nn.Embedding(self.num_queries, d_model)
        self.enc_output = nn.Linear(d_model, d_model)
        self.enc_output_norm = nn.LayerNorm(d_model)
        self.reset_parameters()

    def forward(
        self,
        feature_maps: list[Tensor],
        padding_masks: list[Tensor],
        position_encoding: SinePositionEncoding,
        extra_queries: ExtraQueries | None,
    ) -> TransformerOutput:
        """Encodes the levels, chooses the proposals and decodes the queries.

        Args:
            feature_maps: L tensors float [B, C, H_l, W_l], finest first.
            padding_masks: L tensors bool [B, H_l, W_l], True = padding.
            position_encoding: encodes the positions of each level.
            extra_queries: queries to decode besides, or None.

        Returns:
            The extra queries and after them the own ones after each layer, their boxes, and the chosen proposals.

        Raises:
            ValueError: if there are more queries than the images have pixels on all levels.
        """
        levels, memory = self.encode(feature_maps, padding_masks, position_encoding)
        proposals = self._select_proposals(memory, levels)
        reference_points = proposals.boxes_cxcywh.detach()
        query = self.tgt_embed.weight.expand(len(memory), -1, -1)
        attention_mask = None
        if extra_queries is not None:
            query = torch.cat((extra_queries.content, query), dim=1)
            reference_points = torch.cat((extra_queries.reference_points, reference_points), dim=1)
            attention_mask = extra_queries.attention_mask
        decoded = self.decoder(query, None, reference_points, memory, levels, attention_mask)
        return TransformerOutput(decoded.hidden, reference_points, decoded.boxes_cxcywh, proposals)

    def _select_proposals(self, memory: Tensor, levels: LevelGeometry) -> EncoderProposals:
        """Returns the best num_queries proposals, by their best class.

        Only these have a loss, so that the scores of all are computed without gradients, and their boxes not at all.
        """
        anchors, valid = pixel_proposals(levels)
        features = self.enc_output_norm(self.enc_output(torch.where(valid.unsqueeze(-1), memory, 0.0)))
        with torch.autocast(memory.device.type, enabled=False):
            features = features.float()
            with torch.no_grad():
                scores = self.enc_out_class_embed(features).amax(-1)
            best = best_proposals(scores, self.num_queries).unsqueeze(-1)
            features = features.gather(1, best.expand(-1, -1, self.d_model))
            boxes_cxcywh = (self.enc_out_bbox_embed(features) + anchors.gather(1, best.expand(-1, -1, 4))).sigmoid()
            return EncoderProposals(self.enc_out_class_embed(features), boxes_cxcywh, class_agnostic=False)


class Dino(nn.Module):
    """Detects objects with a backbone, a deformable transformer and one class and one box head for all decoder layers.

    State-dict keys equal those of the published checkpoints: the shared heads stand there under every layer's name.
    The encoder's proposals have heads of their own. In training, noised targets are decoded besides.
    """

    def __init__(
        self,
        *,
        backbone: Backbone,
        position_encoding: SinePositionEncoding,
        transformer: DinoTransformer,
        denoising: ContrastiveDenoising,
        graphs: TrainingGraphs,
        num_classes: int,
        weights: str | None,
    ) -> None:
        """Creates projections, heads and label embedding around backbone and transformer.

        Args:
            backbone: makes the feature maps.
            position_encoding: encodes the positions of each level in the transformer's width.
            transformer: encoder and decoder.
            denoising: noises the targets in training.
            graphs: replays the whole model in training where it is to be captured, but for the noising of the targets.
            num_classes: number of contiguous classes.
            weights: checkpoint to start from, see `load_weights`; None starts from the initialisation.

        Raises:
            ValueError: if the widths do not fit, or the checkpoint does not.
        """
        super().__init__()
        check_sizes(transformer, position_encoding, num_classes)
        width, num_layers = transformer.d_model, transformer.num_decoder_layers
        self.num_classes = num_classes
        self.denoising = denoising
        self.graphs = graphs
        self.backbone = nn.ModuleList([backbone, position_encoding])
        self.input_proj = input_projections(backbone.channels, width, transformer.num_feature_levels)
        self.transformer = transformer
        # One row more than there are classes, as published; nothing reads the last one.
        self.label_enc = nn.Embedding(num_classes + 1, width)
        class_embed, bbox_embed = class_head(width, num_classes), box_head(width)
        self.class_embed = nn.ModuleList([class_embed] * num_layers)
        self.bbox_embed = nn.ModuleList([bbox_embed] * num_layers)
        self.transformer.decoder.class_embed = self.class_embed
        self.transformer.decoder.bbox_embed = self.bbox_embed
        self.transformer.enc_out_class_embed = copy.deepcopy(class_embed)
        self.transformer.enc_out_bbox_embed = copy.deepcopy(bbox_embed)
        if weights is not None:
            load_weights(self, weights)

    def forward(
        self, batch: ImageBatch, targets: Targets | None = None, generator: torch.Generator | None = None
    ) -> DetectorOutput:
        """Detects objects.

        Args:
            batch: normalised images with their padding.
            targets: ground truth to be noised, read in training mode only; without it there is no denoising.
            generator: source of the noise, on the images' device; None takes the device's own.

        Returns:
            Logits and boxes of every decoder layer, the encoder's best proposals, and in training the denoising part.

        Notes:
            Never waits for the device. Logits and boxes are float32 under any autocast.
        """
        noised = None
        if self.training and targets is not None:
            noised = self.denoising.make_queries(targets, self.num_classes, generator)
        output = self.graphs.run(self, self._detect, (batch, None if noised is None else noised.queries))
        return output if noised is None else self._split(output, noised)

    def _detect(self, inputs: tuple[ImageBatch, DenoisingQueries | None]) -> DetectorOutput:
        """Decodes noised targets, if there are any, and after them the own queries."""
        batch, noised = inputs
        extra_queries = None if noised is None else self._embed(noised)
        levels = feature_levels(self.backbone[0], self.input_proj, batch)
        decoded = self.transformer(*levels, self.backbone[1], extra_queries)
        return DetectorOutput(classify(self.class_embed, decoded.hidden), decoded.boxes_cxcywh, decoded.proposals)

    def _split(self, output: DetectorOutput, noised: NoisedTargets) -> DetectorOutput:
        """Splits predictions for all queries into those for noised targets and own ones; leaves the padding out."""
        num_matched, known = self.transformer.num_queries, noised.num_queries
        sizes = (known, noised.queries.labels.shape[1] - known, num_matched)
        known_logits, _, logits = output.logits.split(sizes, dim=2)
        known_boxes, _, boxes_cxcywh = output.boxes_cxcywh.split(sizes, dim=2)
        denoising = DenoisingOutput(
            known_logits, known_boxes, noised.batch, noised.query, noised.target, noised.num_groups
        )
        return DetectorOutput(logits, boxes_cxcywh, output.proposals, denoising)

    def _embed(self, noised: DenoisingQueries) -> ExtraQueries:
        """Turns noised labels and boxes into queries; padding has no content."""
        content = self.label_enc(noised.labels).masked_fill(noised.padding_mask.unsqueeze(-1), 0.0)
        reference_points = inverse_sigmoid(noised.boxes_cxcywh, self.transformer.inverse_sigmoid_eps).sigmoid()
        return ExtraQueries(content, reference_points, noised.attention_mask(self.transformer.num_queries))
