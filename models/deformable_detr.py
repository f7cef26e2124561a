"""Deformable-DETR (arXiv 2010.04159): base, with box refinement, and two-stage."""

import copy
import math

import torch
from torch import Tensor, nn

from models.backbone import Backbone
from models.checkpoints import load_weights
from models.cuda_graphs import TrainingGraphs
from models.decoder import predict_boxes
from models.deformable_transformer import DeformableTransformer, EncoderDecoder
from models.layers.group_norm import NormedConvolution
from models.layers.mlp import MLP
from models.position_encoding import SinePositionEncoding
from models.structures import DetectorOutput, ImageBatch, Targets
from models.weight_casts import casting_weights

NORM_GROUPS = 32
PRIOR_PROBABILITY = 0.01
INITIAL_SIZE_LOGIT = -2.0
NUM_BOX_LAYERS = 3


class DeformableDetr(nn.Module):
    """Detects objects with a backbone, a deformable transformer and one class and box head a decoder layer.

    State-dict keys equal those of the published checkpoints. Heads are shared by all layers unless boxes are refined.
    A two-stage model has one more pair of heads, the last, which scores the encoder's proposals.
    """

    def __init__(
        self,
        *,
        backbone: Backbone,
        position_encoding: SinePositionEncoding,
        transformer: DeformableTransformer,
        graphs: TrainingGraphs,
        num_classes: int,
        box_refine: bool,
        weights: str | None,
    ) -> None:
        """Creates projections and heads around backbone and transformer.

        Args:
            backbone: makes the feature maps.
            position_encoding: encodes the positions of each level in the transformer's width.
            transformer: encoder and decoder; its settings say how many levels and queries there are, and whether the
                model is two-stage.
            graphs: replays the whole model in training where it is to be captured.
            num_classes: number of contiguous classes.
            box_refine: whether each decoder layer refines the boxes of the layer before.
            weights: checkpoint to start from, see `load_weights`; None starts from the initialisation.

        Raises:
            ValueError: if a two-stage transformer comes without box_refine, the widths do not fit, or the checkpoint
                does not.
        """
        super().__init__()
        if transformer.two_stage and not box_refine:
            raise ValueError("box_refine must be true with two_stage, got false; the proposals are boxes to be refined")
        check_sizes(transformer, position_encoding, num_classes)
        self.graphs = graphs
        self.two_stage = transformer.two_stage
        self.backbone = nn.ModuleList([backbone, position_encoding])
        self.input_proj = input_projections(backbone.channels, transformer.d_model, transformer.num_feature_levels)
        self.transformer = transformer
        if not self.two_stage:
            self.query_embed = nn.Embedding(transformer.num_queries, 2 * transformer.d_model)
        self.class_embed, self.bbox_embed = self._detection_heads(num_classes, box_refine)
        if box_refine:
            self.transformer.decoder.bbox_embed = self.bbox_embed
        if self.two_stage:
            self.transformer.decoder.class_embed = self.class_embed
        if weights is not None:
            load_weights(self, weights)

    def forward(self, batch: ImageBatch, targets: Targets | None = None) -> DetectorOutput:
        """Detects objects.

        Args:
            batch: normalised images with their padding.
            targets: not read; there for detectors that learn from noised targets and are called in the same way.

        Returns:
            Logits and boxes of every decoder layer, and the proposals of a two-stage encoder.

        Notes:
            Never waits for the device. Logits and boxes are float32 under any autocast.
        """
        return self.graphs.run(self, self._detect, batch)

    def _detect(self, batch: ImageBatch) -> DetectorOutput:
        query_embed = None if self.two_stage else self.query_embed.weight
        levels = feature_levels(self.backbone[0], self.input_proj, batch)
        decoded = self.transformer(*levels, self.backbone[1], query_embed)
        boxes_cxcywh = decoded.boxes_cxcywh
        if boxes_cxcywh is None:
            boxes_cxcywh = predict_boxes(
                self.bbox_embed[0], decoded.hidden, decoded.reference_points, self.transformer.decoder.refine
            )
        return DetectorOutput(classify(self.class_embed, decoded.hidden), boxes_cxcywh, decoded.proposals)

    def _detection_heads(self, num_classes: int, box_refine: bool) -> tuple[nn.ModuleList, nn.ModuleList]:
        heads = (class_head(self.transformer.d_model, num_classes), box_head(self.transformer.d_model))
        count = self.transformer.num_decoder_layers + int(self.two_stage)
        class_heads, box_heads = (
            nn.ModuleList(copy.deepcopy(head) if box_refine else head for _ in range(count)) for head in heads
        )
        if not self.two_stage:
            nn.init.constant_(box_heads[0].get_parameter(f"layers.{NUM_BOX_LAYERS - 1}.bias")[2:], INITIAL_SIZE_LOGIT)
        return class_heads, box_heads


def class_head(d_model: int, num_classes: int) -> nn.Linear:
    """Makes a class head, [..., d_model] -> [..., num_classes], that finds every class with probability 0.01."""
    head = nn.Linear(d_model, num_classes)
    nn.init.constant_(head.bias, -math.log((1 - PRIOR_PROBABILITY) / PRIOR_PROBABILITY))
    return head


def box_head(d_model: int) -> MLP:
    """Makes a box head, [..., d_model] -> [..., 4], that leaves every box where it is."""
    head = MLP(in_features=d_model, hidden_features=d_model, out_features=4, num_layers=NUM_BOX_LAYERS)
    nn.init.zeros_(head.layers[-1].get_parameter("weight"))
    nn.init.zeros_(head.layers[-1].get_parameter("bias"))
    return head


def classify(class_embed: nn.ModuleList, hidden: Tensor) -> Tensor:
    """Computes the logits of every decoder layer, in float32 under any autocast.

    Args:
        class_embed: the class head of each layer, or one head under all names.
        hidden: float [n, B, Q, C].

    Returns:
        float32 [n, B, Q, num_classes].
    """
    with torch.autocast(hidden.device.type, enabled=False):
        if class_embed[0] is class_embed[-1]:
            return class_embed[0](hidden.float())
        return torch.stack([class_embed[index](state) for index, state in enumerate(hidden.float())])


def feature_levels(
    backbone: nn.Module, input_proj: nn.ModuleList, batch: ImageBatch
) -> tuple[list[Tensor], list[Tensor]]:
    """Makes the transformer's input.

    Args:
        backbone: makes the feature maps.
        input_proj: the module that each level comes from: one for each map of the backbone, and one for each level
            beyond, which reads the last map or the level before.
        batch: normalised images with their padding.

    Returns:
        L feature maps float [B, C, H_l, W_l], finest first; their padding masks bool [B, H_l, W_l], True = padding.
    """
    maps = backbone(batch.images)
    with casting_weights(input_proj):
        features = [project(level) for project, level in zip(input_proj[: len(maps)], maps, strict=True)]
        coarser = maps[-1]
        for project in input_proj[len(maps) :]:
            coarser = project(coarser)
            features.append(coarser)
    return features, [_resize_mask(batch.padding_mask, level) for level in features]


def check_sizes(transformer: EncoderDecoder, position_encoding: SinePositionEncoding, num_classes: int) -> None:
    """Checks that the parts of a detector fit together.

    Raises:
        ValueError: if the widths differ or don't divide into the groups of the norms, or there is no class.
    """
    if position_encoding.channels != transformer.d_model:
        raise ValueError(
            f"position_encoding.channels must equal d_model={transformer.d_model}, got {position_encoding.channels}; "
            "change one of them"
        )
    if transformer.d_model % NORM_GROUPS:
        raise ValueError(f"d_model must be a multiple of {NORM_GROUPS}, got {transformer.d_model}; change it")
    if num_classes < 1:
        raise ValueError(f"num_classes must be at least 1, got {num_classes}; give the number of object classes")


def input_projections(channels: tuple[int, ...], d_model: int, num_feature_levels: int) -> nn.ModuleList:
    """Makes a 1x1 convolution for each feature map and a 3x3 one of stride 2 for each level beyond, all normalised."""
    if len(channels) > num_feature_levels:
        raise ValueError(
            f"num_feature_levels must be at least the backbone's {len(channels)} maps, got {num_feature_levels}; "
            "give backbone and transformer the same number"
        )
    convolutions = [nn.Conv2d(width, d_model, kernel_size=1) for width in channels]
    for index in range(num_feature_levels - len(channels)):
        width = d_model if index else channels[-1]
        convolutions.append(nn.Conv2d(width, d_model, kernel_size=3, stride=2, padding=1))
    for convolution in convolutions:
        nn.init.xavier_uniform_(convolution.weight)
        nn.init.zeros_(convolution.get_parameter("bias"))
    return nn.ModuleList(NormedConvolution(conv, nn.GroupNorm(NORM_GROUPS, d_model)) for conv in convolutions)


def _resize_mask(padding_mask: Tensor, features: Tensor) -> Tensor:
    """Samples a mask, bool [B, H, W], at the resolution of features [B, C, H_l, W_l] by nearest neighbour."""
    resized = nn.functional.interpolate(padding_mask.unsqueeze(1).float(), size=features.shape[-2:])
    return resized.squeeze(1).bool()
