"""The deformable encoder: every pixel of every level attends to a few points of all levels."""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from models.layers.linear import Linear, linear_relu_dropout
from models.layers.ms_deform_attn import MSDeformAttn
from models.layers.residual_norm import ResidualNorm
from models.structures import FeatureLevels


class DeformableEncoderLayer(nn.Module):
    """Deformable self-attention and a feed-forward block, each followed by residual and LayerNorm."""

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
        self.self_attn = MSDeformAttn(
            d_model=d_model,
            num_heads=num_heads,
            num_levels=num_levels,
            num_points=num_points,
            backend=backend,
            fused=fused,
        )
        self.dropout = dropout
        self.norm1 = ResidualNorm(d_model, dropout=dropout, fused=fused_norm)
        self.linear1 = Linear(d_model, dim_feedforward)
        self.linear2 = Linear(dim_feedforward, d_model)
        self.norm2 = ResidualNorm(d_model, dropout=dropout, fused=fused_norm)

    def forward(self, features: Tensor, reference_points: Tensor, levels: FeatureLevels) -> Tensor:
        """Updates the features.

        Args:
            features: float [B, S, C], output of the layer before.
            reference_points: float32 [B, S, L, 2] (x, y), see `pixel_centers`.
            levels: positions, padding and shapes of the levels; its features are not read.

        Returns:
            float [B, S, C], in the dtype of the features.
        """
        geometry = levels.geometry
        attended = self.self_attn(
            features + levels.positions, reference_points, features, geometry.spatial_shapes, geometry.padding_mask
        )
        features = self.norm1(features, attended, features.dtype)
        transformed = self.linear2(linear_relu_dropout(self.linear1, features, self.dropout, self.training))
        return self.norm2(features, transformed, features.dtype)


class DeformableEncoder(nn.Module):
    """A stack of encoder layers."""

    def __init__(self, *, layers: list[DeformableEncoderLayer], gradient_checkpointing: bool) -> None:
        """Creates the stack.

        Args:
            layers: the layers, first to last.
            gradient_checkpointing: whether training recomputes each layer in the backward pass to save memory.
        """
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.gradient_checkpointing = gradient_checkpointing

    def forward(self, levels: FeatureLevels) -> Tensor:
        """Encodes the feature levels, returning float [B, S, C]."""
        reference_points = pixel_centers(levels.geometry.spatial_shapes, levels.geometry.valid_ratios)
        features = levels.features
        for layer in self.layers:
            if self.gradient_checkpointing and self.training:
                features = checkpoint(layer, features, reference_points, levels, use_reentrant=False)
            else:
                features = layer(features, reference_points, levels)
        return features


def pixel_centers(spatial_shapes: tuple[tuple[int, int], ...], valid_ratios: Tensor) -> Tensor:
    """Places the centre of every pixel on every level.

    A centre keeps its position relative to the unpadded image, so it moves with each level's valid ratio.

    Args:
        spatial_shapes: L host pairs (h, w).
        valid_ratios: float32 [B, L, 2] (x, y).

    Returns:
        float32 [B, S, L, 2] (x, y); 0..1 spans the padded level.
    """
    centers = []
    for level, (height, width) in enumerate(spatial_shapes):
        y = torch.arange(0.5, height, dtype=torch.float32, device=valid_ratios.device)
        x = torch.arange(0.5, width, dtype=torch.float32, device=valid_ratios.device)
        ratio_x, ratio_y = valid_ratios[:, level, None].unbind(-1)
        rows = (y / (ratio_y * height)).unsqueeze(2).expand(-1, -1, width)
        columns = (x / (ratio_x * width)).unsqueeze(1).expand(-1, height, -1)
        centers.append(torch.stack((columns, rows), dim=-1).flatten(1, 2))
    return torch.cat(centers, dim=1).unsqueeze(2) * valid_ratios.unsqueeze(1)
