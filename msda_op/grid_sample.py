"""`torch.nn.functional.grid_sample` through the op: one level, one point a query, weight 1."""

import torch
from torch import Tensor

from msda_op.api import ms_deform_attn

# Channels that the kernels keep in one tile.
_LARGEST_HEAD_DIM = 256


def grid_sample(
    input: Tensor,
    grid: Tensor,
    mode: str = "bilinear",
    padding_mode: str = "zeros",
    align_corners: bool = False,
    *,
    fp32_grad_accum: bool | None = None,
    deterministic: bool | None = None,
    backend: str = "auto",
) -> Tensor:
    """Samples feature maps bilinearly at the positions of a grid.

    Args:
        input: `[B, C, H, W]`, float32, float16, bfloat16 or (reference only) float64.
        grid: `[B, height, width, 2]` (x, y), float32 (or float64 with a float64 input); -1..1 spans the map; NaN
            samples nothing.
        mode: "bilinear".
        padding_mode: "zeros" or "border".
        align_corners: whether -1 and 1 are the centres of the outermost pixels, instead of their outer edges.
        fp32_grad_accum: as in `ms_deform_attn`.
        deterministic: as in `ms_deform_attn`.
        backend: as in `ms_deform_attn`.

    Returns:
        `[B, C, height, width]` in the dtype of `input`.

    Raises:
        ValueError: if an argument breaks a rule.
        RuntimeError: if the backend cannot run here.

    Notes:
        Differentiable in both tensors, as `ms_deform_attn` is. Unlike `torch.nn.functional.grid_sample`, positions are
        float32 for half-precision maps, and a location a whole pixel outside has no gradient under zero padding.
    """
    if mode != "bilinear":
        raise ValueError(f"mode must be 'bilinear', got {mode!r}; use torch.nn.functional.grid_sample for others")
    if input.dim() != 4:
        raise ValueError(f"input must have 4 dimensions [B, C, H, W], got shape {tuple(input.shape)}; reshape it")
    if grid.dim() != 4 or grid.shape[0] != input.shape[0] or grid.shape[3] != 2:
        raise ValueError(
            f"grid must be [B={input.shape[0]}, height, width, 2], got shape {tuple(grid.shape)}; give (x, y) positions"
        )
    batch, channels, h, w = input.shape
    _, height, width, _ = grid.shape
    head_dim = max(size for size in range(1, min(channels, _LARGEST_HEAD_DIM) + 1) if channels % size == 0)
    num_heads = channels // head_dim
    value = (
        input.view(batch, num_heads, head_dim, h * w)
        if input.is_contiguous()
        else input.unflatten(1, (num_heads, head_dim)).flatten(3)
    )
    locations = ((grid + 1) / 2).flatten(1, 2)[:, :, None, None, None].expand(-1, -1, num_heads, -1, -1, -1)
    sampled = ms_deform_attn(
        value.transpose(2, 3),
        ((h, w),),
        None,
        locations,
        torch.ones_like(locations[..., 0]),
        padding_mode=padding_mode,
        align_corners=align_corners,
        value_layout="BNLC",
        fp32_grad_accum=fp32_grad_accum,
        deterministic=deterministic,
        backend=backend,
    )
    return sampled.transpose(1, 2).unflatten(2, (height, width))
