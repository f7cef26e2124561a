"""Multi-scale deformable attention in plain PyTorch: any float dtype, any device, differentiable more than once."""

import torch
from torch import Tensor

from msda_op.bilinear import bilinear_sample
from msda_op.levels import HostShapes, level_starts


def ms_deform_attn_reference(
    value: Tensor, spatial_shapes: HostShapes, sampling_locations: Tensor, attention_weights: Tensor
) -> Tensor:
    """Sums bilinear samples of all levels, weighted by the attention (arXiv 2010.04159, eq. 3, without projections).

    output[b, q, m] = sum_l sum_k attention_weights[b, q, m, l, k] * bilinear(value_l[b, :, m], location[b, q, m, l, k])

    Args:
        value: `[B, S, M, D]`, any float dtype; levels one after the other, row-major.
        spatial_shapes: L pairs (h, w).
        sampling_locations: `[B, Q, M, L, K, 2]` (x, y), 0..1 spans the padded level; outside it value is zero.
        attention_weights: `[B, Q, M, L, K]`, any float dtype.

    Returns:
        `[B, Q, M*D]` in the dtype of `value`; the arithmetic runs in the widest dtype given, at least float32.

    Notes:
        Differentiable any number of times in all three tensors. NaN and infinite locations sample nothing.
    """
    batch, _, num_heads, head_dim = value.shape
    num_queries, num_points = sampling_locations.shape[1], sampling_locations.shape[4]
    dtype = torch.promote_types(torch.promote_types(value.dtype, sampling_locations.dtype), attention_weights.dtype)
    dtype = torch.promote_types(dtype, torch.float32)

    locations = sampling_locations.to(dtype)
    output = value.new_zeros((batch * num_heads, head_dim, num_queries), dtype=dtype)
    for level, (start, (h, w)) in enumerate(zip(level_starts(spatial_shapes), spatial_shapes, strict=True)):
        plane = value[:, start : start + h * w].to(dtype).permute(0, 2, 3, 1)
        plane = plane.reshape(batch * num_heads, head_dim, h, w)
        grid = _sampling_grid(locations[:, :, :, level], h, w)
        grid = grid.transpose(1, 2).reshape(batch * num_heads, num_queries, num_points, 2)
        weights = attention_weights[:, :, :, level].to(dtype).transpose(1, 2)
        samples = bilinear_sample(plane, grid)
        output = output + (samples * weights.reshape(batch * num_heads, 1, num_queries, num_points)).sum(-1)
    output = output.view(batch, num_heads * head_dim, num_queries).transpose(1, 2)
    return output.to(value.dtype).contiguous()


def _sampling_grid(locations: Tensor, h: int, w: int) -> Tensor:
    """Returns locations `[..., 2]` in the -1..1 of `grid_sample`; what samples nothing goes to a point well outside.

    `grid_sample` alone would let NaN through, and give a slope to locations exactly one pixel outside.
    """
    x, y = locations.unbind(-1)
    reaches = _reaches(x, w) & _reaches(y, h)
    return torch.where(reaches[..., None], 2 * locations - 1, -3.0)


def _reaches(location: Tensor, size: int) -> Tensor:
    coordinate = location * size - 0.5
    return (coordinate > -1) & (coordinate < size)
