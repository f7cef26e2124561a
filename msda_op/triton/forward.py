"""Forward kernel.

Legend: B batch, Q queries, S rows of value, M heads, D channels a head, L levels, K points.
One program computes output[item, BLOCK_Q queries, head, all D channels]. Nothing is atomic.
"""

import triton
import triton.language as tl

from msda_op.triton.sampling import OUTSIDE, load_level, load_rows, locate, split_program_id


@triton.jit(do_not_specialize=["num_queries", "value_length"])
def forward_kernel(
    value,  # [B, S, M, D]
    spatial_shapes,  # [L, 2] (h, w)
    level_start_index,  # [L]
    sampling_locations,  # [B, Q, M, L, K, 2] (x, y) float32
    attention_weights,  # [B, Q, M, L, K]
    output,  # [B, Q, M, D]
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

    value += item * value_length * (M * D)
    sampling_locations += item * num_queries * (M * L * K * 2)
    attention_weights += item * num_queries * (M * L * K)
    output += item * num_queries * (M * D)

    rows = queries * M + head
    accumulator = tl.zeros([BLOCK_Q, BLOCK_K, BLOCK_D], tl.float32)
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
        value_00 = load_rows(value, top_left, top_inside & left_inside, channel_mask)
        value_01 = load_rows(value, top_left + M * D, top_inside & right_inside, channel_mask)
        value_10 = load_rows(value, bottom_left, bottom_inside & left_inside, channel_mask)
        value_11 = load_rows(value, bottom_left + M * D, bottom_inside & right_inside, channel_mask)

        weight_top = weight * (1 - y_fraction)
        weight_bottom = weight * y_fraction
        accumulator += value_00 * (weight_top * (1 - x_fraction))[:, :, None]
        accumulator += value_01 * (weight_top * x_fraction)[:, :, None]
        accumulator += value_10 * (weight_bottom * (1 - x_fraction))[:, :, None]
        accumulator += value_11 * (weight_bottom * x_fraction)[:, :, None]

    result = tl.sum(accumulator, axis=1).to(output.dtype.element_ty)
    output_mask = query_mask[:, None] & (channels < D)[None, :]
    tl.store(output + rows[:, None] * D + channels[None, :], result, mask=output_mask)
