"""The definition of multi-scale deformable attention: plain loops over Python floats, nothing clever, very slow.

Pixel i of a level of size n has its centre at coordinate i. Location 0..1 spans the level from -0.5 to n - 0.5, or from
0 to n - 1 with align_corners. Padding "zeros": outside the level value is zero, and a location that is infinite or a
whole pixel outside samples nothing. Padding "border": a coordinate outside 0..n - 1 is moved to the nearer end, where
its slope is zero. A location that is NaN samples nothing.
"""

import math
from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor

from msda_op.levels import HostShapes, level_starts
from msda_op.options import DEFAULT_OPTIONS, Options, locations_as_bqhlp2, value_as_blnc


def ms_deform_attn_naive(
    value: Tensor,
    spatial_shapes: HostShapes,
    sampling_locations: Tensor,
    attention_weights: Tensor,
    options: Options = DEFAULT_OPTIONS,
) -> Tensor:
    """Sums bilinear samples of all levels, weighted by the attention (arXiv 2010.04159, eq. 3, without projections).

    Args:
        value: `[B, S, M, D]`, levels one after the other, row-major; or as `options` say.
        spatial_shapes: L pairs (h, w).
        sampling_locations: `[B, Q, M, L, K, 2]` (x, y); or as `options` say.
        attention_weights: `[B, Q, M, L, K]`.
        options: conventions and layouts.

    Returns:
        `[B, Q, M*D]` float64, without gradient.
    """
    value = value_as_blnc(value, options.value_layout)
    batch, _, num_heads, head_dim = value.shape
    num_queries = attention_weights.shape[1]
    rows, weights = value.double().tolist(), attention_weights.double().tolist()
    output = torch.zeros(batch, num_queries, num_heads, head_dim, dtype=torch.float64)
    for (b, q, m, level, k), corners in _samples(spatial_shapes, sampling_locations, options):
        for row, share, _, _ in corners:
            for d in range(head_dim):
                output[b, q, m, d] += weights[b][q][m][level][k] * share * rows[b][row][m][d]
    return output.flatten(2)


def ms_deform_attn_naive_gradients(
    grad_output: Tensor,
    value: Tensor,
    spatial_shapes: HostShapes,
    sampling_locations: Tensor,
    attention_weights: Tensor,
    options: Options = DEFAULT_OPTIONS,
) -> tuple[Tensor, Tensor, Tensor]:
    """Differentiates `ms_deform_attn_naive` by hand; between pixels the slope is that towards the upper neighbour.

    Args:
        grad_output: `[B, Q, M*D]`, upstream gradient; the others as in `ms_deform_attn_naive`.

    Returns:
        Gradients of value, locations and weights, float64, shaped as they are.
    """
    grad_value = torch.zeros(value.shape, dtype=torch.float64)
    grad_locations = torch.zeros(sampling_locations.shape, dtype=torch.float64)
    grad_weights = torch.zeros(attention_weights.shape, dtype=torch.float64)
    add_value = value_as_blnc(grad_value, options.value_layout)
    add_locations = locations_as_bqhlp2(grad_locations, options.sampling_locations_layout)
    value = value_as_blnc(value, options.value_layout)
    num_heads, head_dim = value.shape[2:]
    upstream = grad_output.double().unflatten(2, (num_heads, head_dim)).tolist()
    rows, weights = value.double().tolist(), attention_weights.double().tolist()
    for (b, q, m, level, k), corners in _samples(spatial_shapes, sampling_locations, options):
        weight = weights[b][q][m][level][k]
        for row, share, slope_x, slope_y in corners:
            dot = 0.0
            for d in range(head_dim):
                add_value[b, row, m, d] += weight * share * upstream[b][q][m][d]
                dot += upstream[b][q][m][d] * rows[b][row][m][d]
            grad_weights[b, q, m, level, k] += share * dot
            add_locations[b, q, m, level, k, 0] += weight * slope_x * dot
            add_locations[b, q, m, level, k, 1] += weight * slope_y * dot
    return grad_value, grad_locations, grad_weights


def _samples(
    spatial_shapes: HostShapes, sampling_locations: Tensor, options: Options
) -> Iterator[tuple[tuple[int, int, int, int, int], list[tuple[int, float, float, float]]]]:
    """Yields every sample's index (b, q, m, level, k) with its corners in `value`."""
    standard = locations_as_bqhlp2(sampling_locations, options.sampling_locations_layout)
    locations = standard.double().tolist()
    starts = level_starts(spatial_shapes)
    for b, q, m, level, k in product(*map(range, standard.shape[:-1])):
        x, y = locations[b][q][m][level][k]
        corners = _corners(x, y, *spatial_shapes[level], options)
        yield (b, q, m, level, k), [(starts[level] + pixel, *shares) for pixel, shares in corners]


def _corners(x: float, y: float, h: int, w: int, options: Options) -> Iterator[tuple[int, tuple[float, float, float]]]:
    """Yields pixel and (bilinear share, d share / dx, d share / dy) of the up to four pixels around a location."""
    column, scale_x = _coordinate(x, w, options)
    row, scale_y = _coordinate(y, h, options)
    if not (-1 < column < w and -1 < row < h):
        return
    left, top = math.floor(column), math.floor(row)
    for i, j in product((top, top + 1), (left, left + 1)):
        if 0 <= i < h and 0 <= j < w:
            share_y, share_x = 1 - abs(row - i), 1 - abs(column - j)
            slope_y, slope_x = (-scale_y if i == top else scale_y), (-scale_x if j == left else scale_x)
            yield i * w + j, (share_y * share_x, slope_x * share_y, slope_y * share_x)


def _coordinate(location: float, size: int, options: Options) -> tuple[float, float]:
    """Returns the coordinate of a location along an axis, and its derivative."""
    scale = size - 1 if options.align_corners else size
    coordinate = location * scale if options.align_corners else location * scale - 0.5
    if options.padding_mode == "zeros" or 0 < coordinate < size - 1 or math.isnan(coordinate):
        return coordinate, scale
    return min(max(coordinate, 0.0), size - 1.0), 0.0
