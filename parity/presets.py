"""Sizes of real training on which the op is timed and compiled, and inputs that sample as a trained model does."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from parity.cases import OpInputs

# Offsets of a trained model scatter by about this many pixels around the directions they were initialised to.
_SPREAD_PIXELS = 1.5


@dataclass(frozen=True)
class Preset:
    """Sizes of one call of the op.

    Args:
        name: as on the command line.
        spatial_shapes: L pairs (h, w).
        num_queries: Q; as many as value has rows where each pixel is a query (an encoder).
        num_heads: M.
        head_dim: D.
        num_points: K.
    """

    name: str
    spatial_shapes: tuple[tuple[int, int], ...]
    num_queries: int
    num_heads: int = 8
    head_dim: int = 32
    num_points: int = 4

    @property
    def value_length(self) -> int:
        """S, the rows of value."""
        return sum(h * w for h, w in self.spatial_shapes)


_LEVELS_800x1333 = ((100, 167), (50, 84), (25, 42), (13, 21))
_LEVELS_1333x2000 = ((167, 250), (84, 125), (42, 63), (21, 32))

PRESETS = {
    preset.name: preset
    for preset in (
        Preset("encoder", _LEVELS_800x1333, num_queries=22223),
        Preset("decoder", _LEVELS_800x1333, num_queries=300),
        Preset("dino", _LEVELS_800x1333, num_queries=1100),  # 900 queries and 200 for denoising
        Preset("large", _LEVELS_1333x2000, num_queries=55568),
    )
}


def make_preset_inputs(preset: Preset, batch: int, dtype: torch.dtype, device: torch.device, seed: int) -> OpInputs:
    """Draws inputs of a preset on `device`; equal seeds give equal numbers on equal devices.

    A query samples around its reference point: the pixel it stands for in an encoder, anywhere in a decoder. Offsets
    are the published initialisation (one direction a head, one pixel further with each point, arXiv 2010.04159,
    appendix A.4) with a normal spread of 1.5 pixels.

    Args:
        preset: sizes.
        batch: B.
        dtype: dtype of value, attention weights and upstream gradient; locations are float32 (float64 for float64).
        device: where to draw.
        seed: of the generator.
    """
    generator = torch.Generator(device).manual_seed(seed)
    b, q, m, d, k = batch, preset.num_queries, preset.num_heads, preset.head_dim, preset.num_points
    num_levels = len(preset.spatial_shapes)
    location_dtype = torch.float64 if dtype == torch.float64 else torch.float32

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=location_dtype, device=device)

    if q == preset.value_length:
        reference_points = torch.cat([_pixel_centres(h, w, location_dtype, device) for h, w in preset.spatial_shapes])
        reference_points = reference_points.expand(b, q, 2)
    else:
        reference_points = torch.rand(b, q, 2, generator=generator, dtype=location_dtype, device=device)
    offsets = normal(b, q, m, num_levels, k, 2) * _SPREAD_PIXELS + _initial_offsets(m, k, location_dtype, device)
    sizes_wh = torch.tensor([(w, h) for h, w in preset.spatial_shapes], dtype=location_dtype, device=device)
    locations = reference_points[:, :, None, None, None] + offsets / sizes_wh[:, None]
    weights = normal(b, q, m, num_levels * k).softmax(-1).view(b, q, m, num_levels, k)
    return OpInputs(
        normal(b, preset.value_length, m, d).to(dtype),
        preset.spatial_shapes,
        locations,
        weights.to(dtype),
        normal(b, q, m * d).to(dtype),
    )


def _pixel_centres(h: int, w: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns the centres `[h*w, 2]` (x, y) of a level's pixels, row-major, in 0..1."""
    y, x = torch.meshgrid(
        (torch.arange(h, dtype=dtype, device=device) + 0.5) / h,
        (torch.arange(w, dtype=dtype, device=device) + 0.5) / w,
        indexing="ij",
    )
    return torch.stack((x, y), -1).view(-1, 2)


def _initial_offsets(num_heads: int, num_points: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns offsets in pixels `[M, 1, K, 2]`: head i looks along angle 2 pi i / M, point k goes k + 1 pixels far."""
    angle = torch.arange(num_heads, dtype=dtype, device=device) * (2 * math.pi / num_heads)
    direction = torch.stack((angle.cos(), angle.sin()), -1)
    direction = direction / direction.abs().amax(-1, keepdim=True)
    distance = torch.arange(1, num_points + 1, dtype=dtype, device=device)
    return direction[:, None, None, :] * distance[:, None]
