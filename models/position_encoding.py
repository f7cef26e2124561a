"""Sine encodings of positions, always computed in float32."""

import math

import torch
from torch import Tensor

from models.compilation import Region
from models.layers.residual_blocks import can_fuse
from models.structures import LevelGeometry

FULL_TURN = 2 * math.pi
NORMALIZATION_EPS = 1e-6


def sine_embedding(angles: Tensor, channels: int, temperature: float) -> Tensor:
    """Encodes numbers by sines and cosines of falling frequency.

    Channel 2i is sin(a / temperature^(2i / channels)), channel 2i + 1 the cosine of the same (arXiv 1706.03762, 3.5).

    Args:
        angles: float [...], radians.
        channels: even number of channels of one number's encoding.
        temperature: ratio of the longest wavelength to the shortest.

    Returns:
        float32 [..., channels].
    """
    index = torch.arange(channels, dtype=torch.float32, device=angles.device)
    wavelengths = temperature ** (2 * (index // 2) / channels)
    phases = angles.float().unsqueeze(-1) / wavelengths
    return torch.stack((phases[..., 0::2].sin(), phases[..., 1::2].cos()), dim=-1).flatten(-2)


class SinePositionEncoding(Region):
    """Encodes the row and the column of each pixel, normalised by the unpadded size of its image.

    Attributes:
        fused: whether `embed_levels` may take Triton kernels.
    """

    fused: bool = True

    def __init__(self, *, channels: int, temperature: float, offset: float) -> None:
        """Creates the encoding.

        Args:
            channels: channels in all, half for the row and half for the column; a multiple of 4.
            temperature: see `sine_embedding`.
            offset: added to the one-based row and column; -0.5 addresses pixel centres.

        Raises:
            ValueError: if channels is not a positive multiple of 4.
        """
        super().__init__()
        if channels <= 0 or channels % 4:
            raise ValueError(f"channels must be a positive multiple of 4, got {channels}; change the model's width")
        self.channels = channels
        self.temperature = temperature
        self.offset = offset

    def compute(self, padding_mask: Tensor) -> Tensor:  # type: ignore[override]
        """Encodes the positions of a feature level.

        Args:
            padding_mask: bool [B, H, W], True = padding.

        Returns:
            float32 [B, channels, H, W], row channels first.
        """
        valid = ~padding_mask
        rows = valid.cumsum(1, dtype=torch.int32).float()
        columns = valid.cumsum(2, dtype=torch.int32).float()
        row_angles = (rows + self.offset) / (rows[:, -1:, :] + NORMALIZATION_EPS) * FULL_TURN
        column_angles = (columns + self.offset) / (columns[:, :, -1:] + NORMALIZATION_EPS) * FULL_TURN
        angles = torch.stack((row_angles, column_angles), dim=-1)
        return sine_embedding(angles, self.channels // 2, self.temperature).flatten(-2).permute(0, 3, 1, 2)

    def embed_levels(self, geometry: LevelGeometry, level_embed: Tensor, dtype: torch.dtype) -> Tensor:
        """Encodes the positions of all levels and adds their embeddings.

        Where `can_fuse` says so, kernels write the result; elsewhere the same is composed level by level.

        Args:
            geometry: shapes and padding of the L levels.
            level_embed: float [L, channels].
            dtype: dtype of the result.

        Returns:
            dtype [B, S, channels], rounded once.
        """
        if self.fused and can_fuse(level_embed):
            from models.layers.fused_positions import embed_positions  # Triton, which is not installed everywhere

            settings = (self.temperature, self.offset, NORMALIZATION_EPS, dtype)
            return embed_positions(geometry.padding_mask, geometry.spatial_shapes, level_embed, *settings)
        masks = geometry.padding_mask.split([height * width for height, width in geometry.spatial_shapes], dim=1)
        levels = zip(masks, geometry.spatial_shapes, level_embed, strict=True)
        encoded = [self(mask.unflatten(1, shape)).flatten(2).transpose(1, 2) + embed for mask, shape, embed in levels]
        return torch.cat(encoded, dim=1).to(dtype)
