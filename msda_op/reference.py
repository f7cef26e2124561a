"""Multi-scale deformable attention in plain PyTorch: any float dtype, any device, differentiable more than once."""

import torch
from torch import Tensor

from msda_op.bilinear import bilinear_sample
from msda_op.levels import HostShapes, level_starts
from msda_op.options import DEFAULT_OPTIONS, Options, locations_as_bqhlp2, value_as_blnc

FAR_OUTSIDE = -3.0
"""In `grid_sample`'s coordinates, where the plane spans -1..1: beyond the reach of every pixel."""


def ms_deform_attn_reference(
    value: Tensor,
    spatial_shapes: HostShapes,
    sampling_locations: Tensor,
    attention_weights: Tensor,
    options: Options = DEFAULT_OPTIONS,
) -> Tensor:
    """Sums bilinear samples of all levels, weighted by the attention (arXiv 2010.04159, eq. 3, without projections).

    output[b, q, m] = sum_l sum_k attention_weights[b, q, m, l, k] * bilinear(value_l[b, :, m], location[b, q, m, l, k])

    Args:
        value: `[B, S, M, D]`, any float dtype; levels one after the other, row-major; or as `options` say.
        spatial_shapes: L pairs (h, w).
        sampling_locations: `[B, Q, M, L, K, 2]` (x, y), 0..1 spans the padded level; or as `options` say.
        attention_weights: `[B, Q, M, L, K]`, any float dtype.
        options: conventions and layouts.

    Returns:
        `[B, Q, M*D]` in the dtype of `value`; the arithmetic runs in the widest dtype given, at least float32.

    Notes:
        Differentiable any number of times in all three tensors. NaN samples nothing, and infinity nothing but a border.
    """
    value = value_as_blnc(value, options.value_layout)
    sampling_locations = locations_as_bqhlp2(sampling_locations, options.sampling_locations_layout)
    batch, _, num_heads, head_dim = value.shape
    num_queries, num_points = sampling_locations.shape[1], sampling_locations.shape[4]
    dtype = torch.promote_types(torch.promote_types(value.dtype, sampling_locations.dtype), attention_weights.dtype)
    dtype = torch.promote_types(dtype, torch.float32)

    locations = sampling_locations.to(dtype)
    output = value.new_zeros((batch * num_heads, head_dim, num_queries), dtype=dtype)
    for level, (start, (h, w)) in enumerate(zip(level_starts(spatial_shapes), spatial_shapes, strict=True)):
        plane = value[:, start : start + h * w].to(dtype).permute(0, 2, 3, 1)
        plane = plane.reshape(batch * num_heads, head_dim, h, w)
        placed = locations[:, :, :, level].transpose(1, 2).reshape(batch * num_heads, num_queries, num_points, 2)
        weights = attention_weights[:, :, :, level].to(dtype).transpose(1, 2)
        weights = weights.reshape(batch * num_heads, num_queries, num_points)
        output = output + _weighted_samples(plane, placed, weights, options)
    output = output.view(batch, num_heads * head_dim, num_queries).transpose(1, 2)
    return output.to(value.dtype).contiguous()


def _weighted_samples(plane: Tensor, locations: Tensor, weights: Tensor, options: Options) -> Tensor:
    """Samples `[B*M, D, h, w]` at `[B*M, Q, K, 2]` (x, y) and sums with weights `[B*M, Q, K]` to `[B*M, D, Q]`.

    What samples nothing is moved far outside with weight 0, for `grid_sample` alone would let NaN through, and give a
    slope to locations exactly one pixel outside.
    """
    h, w = plane.shape[2:]
    x, y = locations.unbind(-1)
    reaches = _reaches(x, w, options) & _reaches(y, h, options)
    grid = torch.where(reaches[..., None], 2 * locations - 1, FAR_OUTSIDE)
    samples = bilinear_sample(plane, grid, options.padding_mode, options.align_corners)
    return (samples * torch.where(reaches, weights, 0.0)[:, None]).sum(-1)


def _reaches(location: Tensor, size: int, options: Options) -> Tensor:
    coordinate = location * (size - 1) if options.align_corners else location * size - 0.5
    if options.padding_mode == "border":
        return ~coordinate.isnan()
    return (coordinate > -1) & (coordinate < size)


def attention_weights_from_logits(attention_logits: Tensor) -> Tensor:
    """Returns the softmax over all L*K logits `[B, Q, M, L, K]` of a query and head, in at least float32."""
    dtype = torch.promote_types(attention_logits.dtype, torch.float32)
    return attention_logits.to(dtype).flatten(3).softmax(-1).view(attention_logits.shape)
