"""Forward kernel.

Legend: B batch, Q queries, S rows of value, M heads, D channels a head, L levels, K points.
One program computes output[item, BLOCK_Q queries, head, all D channels]. Nothing is atomic.
"""

import triton
import triton.language as tl

from msda_op.triton.boundary import load_reference, offset_to_shift, softmax_statistics
from msda_op.triton.sampling import load_level, load_pairs, load_rows, locate, split_program_id, value_strides


@triton.jit(do_not_specialize=["num_queries", "value_length"])
def forward_kernel(
    value,  # [B, S, M, D], or [B, M, S, D] where HEAD_MAJOR
    spatial_shapes,  # [L, 2] (h, w)
    level_start_index,  # [L]
    points,  # locations [B, Q, M, L, K, 2] (x, y), or [B, 2, Q, M, L, K] where PAIR_FIRST; offsets where fused
    scores,  # attention weights [B, Q, M, L, K]; logits where fused
    reference_points,  # [B, Q, L, NUM_COORDINATES] where fused, else None
    output,  # [B, Q, M, D]
    num_queries,
    value_length,
    M: tl.constexpr,
    D: tl.constexpr,
    L: tl.constexpr,
    K: tl.constexpr,
    HEAD_MAJOR: tl.constexpr,
    PAIR_FIRST: tl.constexpr,
    BORDER: tl.constexpr,
    ALIGN_CORNERS: tl.constexpr,
    NUM_COORDINATES: tl.constexpr,
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
    value += item * value_length * (M * D) + head * head_stride
    points += item * num_samples * 2
    scores += item * num_samples
    output += item * num_queries * (M * D)

    rows = queries * M + head
    if NUM_COORDINATES > 0:
        reference_points += item * num_queries * (L * NUM_COORDINATES)
        largest, total = softmax_statistics(scores, rows, query_mask, L, K, BLOCK_L, BLOCK_K)
    accumulator = tl.zeros([BLOCK_Q, BLOCK_K, BLOCK_D], tl.float32)
    for level in range(L):
        height, width, start = load_level(spatial_shapes, level_start_index, level)
        samples = (rows[:, None] * L + level) * K + point[None, :]
        x, y = load_pairs(points, samples, sample_mask, num_samples, PAIR_FIRST)
        weight = tl.load(scores + samples, mask=sample_mask, other=0.0).to(tl.float32)
        if NUM_COORDINATES > 0:
            weight = tl.exp(weight - largest[:, None]) / total[:, None]
            centre_x, extent_x = load_reference(reference_points, queries, level, query_mask, 0, L, NUM_COORDINATES)
            centre_y, extent_y = load_reference(reference_points, queries, level, query_mask, 1, L, NUM_COORDINATES)
            x = centre_x + offset_to_shift(x, extent_x, width, K, NUM_COORDINATES)
            y = centre_y + offset_to_shift(y, extent_y, height, K, NUM_COORDINATES)
        left, x_fraction, left_inside, right_inside, _ = locate(x, width, BORDER, ALIGN_CORNERS)
        top, y_fraction, top_inside, bottom_inside, _ = locate(y, height, BORDER, ALIGN_CORNERS)

        top_left = (start + top * width + left)[:, :, None] * row_stride + channels[None, None, :]
        bottom_left = top_left + width * row_stride
        value_00 = load_rows(value, top_left, top_inside & left_inside, channel_mask)
        value_01 = load_rows(value, top_left + row_stride, top_inside & right_inside, channel_mask)
        value_10 = load_rows(value, bottom_left, bottom_inside & left_inside, channel_mask)
        value_11 = load_rows(value, bottom_left + row_stride, bottom_inside & right_inside, channel_mask)

        weight_top = weight * (1 - y_fraction)
        weight_bottom = weight * y_fraction
        accumulator += value_00 * (weight_top * (1 - x_fraction))[:, :, None]
        accumulator += value_01 * (weight_top * x_fraction)[:, :, None]
        accumulator += value_10 * (weight_bottom * (1 - x_fraction))[:, :, None]
        accumulator += value_11 * (weight_bottom * x_fraction)[:, :, None]

    result = tl.sum(accumulator, axis=1).to(output.dtype.element_ty)
    output_mask = query_mask[:, None] & (channels < D)[None, :]
    tl.store(output + rows[:, None] * D + channels[None, :], result, mask=output_mask)
