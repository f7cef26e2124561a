"""Backward kernel.

Legend: B batch, Q queries, S rows of value, M heads, D channels a head, L levels, K points.
One program computes the location and weight gradients of the samples of [item, BLOCK_Q queries, head] and adds their
share to grad_value. Only grad_value is atomic (float32, relaxed, in any order): queries share pixels.
"""

import triton
import triton.language as tl

from msda_op.triton.sampling import OUTSIDE, load_level, load_rows, locate, split_program_id


@triton.jit
def add_rows(grad_value, offsets, inside, channel_mask, rows):
    """Adds rows [BLOCK_Q, BLOCK_K, BLOCK_D] of one corner to the value gradient."""
    tl.atomic_add(grad_value + offsets, rows, mask=inside[:, :, None] & channel_mask, sem="relaxed")


@triton.jit(do_not_specialize=["num_queries", "value_length"])
def backward_kernel(
    grad_output,  # [B, Q, M, D]
    value,  # [B, S, M, D]
    spatial_shapes,  # [L, 2] (h, w)
    level_start_index,  # [L]
    sampling_locations,  # [B, Q, M, L, K, 2] (x, y) float32
    attention_weights,  # [B, Q, M, L, K]
    grad_value,  # [B, S, M, D] float32, zeroed; None where not asked for
    grad_locations,  # [B, Q, M, L, K, 2] float32; None where not asked for
    grad_weights,  # [B, Q, M, L, K]; None where not asked for
    num_queries,
    value_length,
    M: tl.constexpr,
    D: tl.constexpr,
    L: tl.constexpr,
    K: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    item, head, queries = split_program_id(num_queries, M, BLOCK_Q)
    points = tl.arange(0, BLOCK_K)
    channels = tl.arange(0, BLOCK_D)
    query_mask = queries < num_queries
    sample_mask = query_mask[:, None] & (points < K)[None, :]
    channel_mask = (channels < D)[None, None, :]

    first_sample = item * num_queries * (M * L * K)
    first_value = item * value_length * (M * D)
    value += first_value
    sampling_locations += 2 * first_sample
    attention_weights += first_sample

    rows = queries * M + head
    upstream = tl.load(
        grad_output + item * num_queries * (M * D) + rows[:, None] * D + channels[None, :],
        mask=query_mask[:, None] & (channels < D)[None, :],
        other=0.0,
    ).to(tl.float32)[:, None, :]

    for level in range(L):
        height, width, start = load_level(spatial_shapes, level_start_index, level)
        samples = (rows[:, None] * L + level) * K + points[None, :]
        x = tl.load(sampling_locations + 2 * samples, mask=sample_mask, other=OUTSIDE)
        y = tl.load(sampling_locations + 2 * samples + 1, mask=sample_mask, other=OUTSIDE)
        weight = tl.load(attention_weights + samples, mask=sample_mask, other=0.0).to(tl.float32)
        left, x_fraction, left_inside, right_inside = locate(x, width)
        top, y_fraction, top_inside, bottom_inside = locate(y, height)

        top_left = ((start + top * width + left) * M + head)[:, :, None] * D + channels[None, None, :]
        bottom_left = top_left + width * (M * D)
        inside_00 = top_inside & left_inside
        inside_01 = top_inside & right_inside
        inside_10 = bottom_inside & left_inside
        inside_11 = bottom_inside & right_inside

        if grad_value is not None:
            gradient = grad_value + first_value
            share_top = weight * (1 - y_fraction)
            share_bottom = weight * y_fraction
            share_00 = upstream * (share_top * (1 - x_fraction))[:, :, None]
            share_01 = upstream * (share_top * x_fraction)[:, :, None]
            share_10 = upstream * (share_bottom * (1 - x_fraction))[:, :, None]
            share_11 = upstream * (share_bottom * x_fraction)[:, :, None]
            add_rows(gradient, top_left, inside_00, channel_mask, share_00)
            add_rows(gradient, top_left + M * D, inside_01, channel_mask, share_01)
            add_rows(gradient, bottom_left, inside_10, channel_mask, share_10)
            add_rows(gradient, bottom_left + M * D, inside_11, channel_mask, share_11)

        if (grad_locations is not None) or (grad_weights is not None):
            # The four corners dotted with the upstream gradient: what is left of a sample are scalars.
            dot_00 = tl.sum(load_rows(value, top_left, inside_00, channel_mask) * upstream, axis=2)
            dot_01 = tl.sum(load_rows(value, top_left + M * D, inside_01, channel_mask) * upstream, axis=2)
            dot_10 = tl.sum(load_rows(value, bottom_left, inside_10, channel_mask) * upstream, axis=2)
            dot_11 = tl.sum(load_rows(value, bottom_left + M * D, inside_11, channel_mask) * upstream, axis=2)
            dot_top = dot_00 + x_fraction * (dot_01 - dot_00)
            dot_bottom = dot_10 + x_fraction * (dot_11 - dot_10)

            if grad_weights is not None:
                grad_weight = dot_top + y_fraction * (dot_bottom - dot_top)
                grad_weight = grad_weight.to(grad_weights.dtype.element_ty)
                tl.store(grad_weights + first_sample + samples, grad_weight, mask=sample_mask)
            if grad_locations is not None:
                slope_x = (1 - y_fraction) * (dot_01 - dot_00) + y_fraction * (dot_11 - dot_10)
                gradient_xy = grad_locations + 2 * first_sample + 2 * samples
                tl.store(gradient_xy, weight * width * slope_x, mask=sample_mask)
                tl.store(gradient_xy + 1, weight * height * (dot_bottom - dot_top), mask=sample_mask)
