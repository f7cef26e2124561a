"""Backward kernel.

Legend: B batch, Q queries, S rows of value, M heads, D channels a head, L levels, K points.
One program computes the gradients of the samples of [item, BLOCK_Q queries, head] and adds their share to grad_value.
Only grad_value is atomic (relaxed, in any order): queries share pixels. A gradient whose pointer is None
is not computed.
"""

import triton
import triton.language as tl

from msda_op.triton.boundary import (
    load_reference,
    offset_to_shift,
    softmax_statistics,
    store_logit_gradient,
    store_reference_gradient,
)
from msda_op.triton.sampling import (
    load_level,
    load_pairs,
    load_rows,
    locate,
    split_program_id,
    store_pairs,
    value_strides,
)


@triton.jit
def add_rows(grad_value, offsets, inside, channel_mask, rows):
    """Adds rows [BLOCK_Q, BLOCK_K, BLOCK_D] of one corner to the value gradient."""
    rows = rows.to(grad_value.dtype.element_ty)
    tl.atomic_add(grad_value + offsets, rows, mask=inside[:, :, None] & channel_mask, sem="relaxed")


@triton.jit(do_not_specialize=["num_queries", "value_length"])
def backward_kernel(
    grad_output,  # [B, Q, M, D]
    value,  # [B, S, M, D], or [B, M, S, D] where HEAD_MAJOR
    spatial_shapes,  # [L, 2] (h, w)
    level_start_index,  # [L]
    points,  # locations [B, Q, M, L, K, 2] (x, y), or [B, 2, Q, M, L, K] where PAIR_FIRST; offsets where fused
    scores,  # attention weights [B, Q, M, L, K]; logits where fused
    reference_points,  # [B, Q, L, NUM_COORDINATES] where fused, else None
    grad_value,  # [NUM_BUFFERS, *value.shape], added to
    grad_points,  # as points
    grad_scores,  # as scores
    grad_reference,  # [B, Q, M, L, NUM_COORDINATES] float32, each head's share
    num_queries,
    value_length,
    buffer_stride,
    M: tl.constexpr,
    D: tl.constexpr,
    L: tl.constexpr,
    K: tl.constexpr,
    HEAD_MAJOR: tl.constexpr,
    PAIR_FIRST: tl.constexpr,
    BORDER: tl.constexpr,
    ALIGN_CORNERS: tl.constexpr,
    NUM_COORDINATES: tl.constexpr,
    NUM_BUFFERS: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    item, head, queries = split_program_id(num_queries, M, BLOCK_Q)
    point = tl.arange(0, BLOCK_K)
    channels = tl.arange(0, BLOCK_D)
    query_mask = queries < num_queries
    sample_mask = query_mask[:, None] & (point < K)[None, :]
    channel_mask = (channels < D)[None, None, :]

    num_samples = num_queries * (M * L * K)
    row_stride, head_stride = value_strides(value_length, M, D, HEAD_MAJOR)
    first_value = item * value_length * (M * D) + head * head_stride
    first_sample = item * num_samples
    value += first_value
    points += 2 * first_sample
    scores += first_sample
    if NUM_BUFFERS > 1:  # neighbouring tiles, which share most pixels, add to different buffers
        first_value += (tl.program_id(0) % NUM_BUFFERS).to(tl.int64) * buffer_stride

    rows = queries * M + head
    upstream = tl.load(
        grad_output + item * num_queries * (M * D) + rows[:, None] * D + channels[None, :],
        mask=query_mask[:, None] & (channels < D)[None, :],
        other=0.0,
    ).to(tl.float32)[:, None, :]
    if NUM_COORDINATES > 0:
        reference_points += item * num_queries * (L * NUM_COORDINATES)
        largest, total = softmax_statistics(scores, rows, query_mask, L, K, BLOCK_L, BLOCK_K)
        grad_weights = tl.zeros([BLOCK_Q, BLOCK_L, BLOCK_K], tl.float32)

    for level in range(L):
        height, width, start = load_level(spatial_shapes, level_start_index, level)
        samples = (rows[:, None] * L + level) * K + point[None, :]
        point_x, point_y = load_pairs(points, samples, sample_mask, num_samples, PAIR_FIRST)
        weight = tl.load(scores + samples, mask=sample_mask, other=0.0).to(tl.float32)
        x, y = point_x, point_y
        if NUM_COORDINATES > 0:
            weight = tl.exp(weight - largest[:, None]) / total[:, None]
            centre_x, extent_x = load_reference(reference_points, queries, level, query_mask, 0, L, NUM_COORDINATES)
            centre_y, extent_y = load_reference(reference_points, queries, level, query_mask, 1, L, NUM_COORDINATES)
            x = centre_x + offset_to_shift(point_x, extent_x, width, K, NUM_COORDINATES)
            y = centre_y + offset_to_shift(point_y, extent_y, height, K, NUM_COORDINATES)
        left, x_fraction, left_inside, right_inside, slope_x = locate(x, width, BORDER, ALIGN_CORNERS)
        top, y_fraction, top_inside, bottom_inside, slope_y = locate(y, height, BORDER, ALIGN_CORNERS)

        top_left = (start + top * width + left)[:, :, None] * row_stride + channels[None, None, :]
        bottom_left = top_left + width * row_stride
        inside_00 = top_inside & left_inside
        inside_01 = top_inside & right_inside
        inside_10 = bottom_inside & left_inside
        inside_11 = bottom_inside & right_inside

        if (grad_points is not None) or (grad_scores is not None) or (grad_reference is not None):
            # The four corners dotted with the upstream gradient: what is left of a sample are scalars.
            dot_00 = tl.sum(load_rows(value, top_left, inside_00, channel_mask) * upstream, axis=2)
            dot_01 = tl.sum(load_rows(value, top_left + row_stride, inside_01, channel_mask) * upstream, axis=2)
            dot_10 = tl.sum(load_rows(value, bottom_left, inside_10, channel_mask) * upstream, axis=2)
            dot_11 = tl.sum(load_rows(value, bottom_left + row_stride, inside_11, channel_mask) * upstream, axis=2)
            dot_top = dot_00 + x_fraction * (dot_01 - dot_00)
            dot_bottom = dot_10 + x_fraction * (dot_11 - dot_10)
            grad_weight = dot_top + y_fraction * (dot_bottom - dot_top)
            rise_x = (1 - y_fraction) * (dot_01 - dot_00) + y_fraction * (dot_11 - dot_10)
            grad_x = weight * slope_x * rise_x
            grad_y = weight * slope_y * (dot_bottom - dot_top)

            if NUM_COORDINATES > 0:
                level_of_tile = tl.arange(0, BLOCK_L)[None, :, None] == level
                grad_weights = tl.where(level_of_tile, grad_weight[:, None, :], grad_weights)
                if grad_reference is not None:
                    places = grad_reference + ((item * num_queries * M + rows) * L + level) * NUM_COORDINATES
                    store_reference_gradient(places, query_mask, grad_x, point_x, 0, K, NUM_COORDINATES)
                    store_reference_gradient(places, query_mask, grad_y, point_y, 1, K, NUM_COORDINATES)
                grad_x = offset_to_shift(grad_x, extent_x, width, K, NUM_COORDINATES)
                grad_y = offset_to_shift(grad_y, extent_y, height, K, NUM_COORDINATES)
            elif grad_scores is not None:
                grad_weight = grad_weight.to(grad_scores.dtype.element_ty)
                tl.store(grad_scores + first_sample + samples, grad_weight, mask=sample_mask)
            if grad_points is not None:
                store_pairs(
                    grad_points + 2 * first_sample, samples, sample_mask, grad_x, grad_y, num_samples, PAIR_FIRST
                )

        # Last, so that nothing of the dot products stays in registers across the adds: below sm_90 it would spill.
        if grad_value is not None:
            gradient = grad_value + first_value
            share_top = weight * (1 - y_fraction)
            share_bottom = weight * y_fraction
            share_00 = upstream * (share_top * (1 - x_fraction))[:, :, None]
            share_01 = upstream * (share_top * x_fraction)[:, :, None]
            share_10 = upstream * (share_bottom * (1 - x_fraction))[:, :, None]
            share_11 = upstream * (share_bottom * x_fraction)[:, :, None]
            add_rows(gradient, top_left, inside_00, channel_mask, share_00)
            add_rows(gradient, top_left + row_stride, inside_01, channel_mask, share_01)
            add_rows(gradient, bottom_left, inside_10, channel_mask, share_10)
            add_rows(gradient, bottom_left + row_stride, inside_11, channel_mask, share_11)

    if NUM_COORDINATES > 0 and grad_scores is not None:
        store_logit_gradient(
            grad_scores + first_sample,
            scores,
            grad_weights,
            largest,
            total,
            rows,
            query_mask,
            L,
            K,
            BLOCK_L,
            BLOCK_K,
        )
