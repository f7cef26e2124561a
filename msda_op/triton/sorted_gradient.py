"""Gradient of value in a fixed order of additions: the same bits in every run, without atomics.

Legend: B batch, Q queries, S rows of value, M heads, D channels a head, L levels, K points.
A *cell* is the square between four neighbouring pixel centres; a level of h x w pixels has (h + 1) x (w + 1) of them,
the outer ones between the level and its padding. Three steps:

1. `cell_kernel` writes the number of the cell of every sample (last of all where a sample reaches no pixel);
2. a stable sort (`torch.sort`) brings the samples of a cell together, in the order of the samples;
3. `gather_kernel`: one program computes grad_value[item, row, head, all D channels] from the samples of the four cells
   around its pixel, cell by cell, BLOCK_I samples at a time. Sums are in float32 and rounded once.

Every float sum runs inside one program, over samples whose order depends on the inputs of its item and head alone: the
result is the same in every run and at every position in the batch, and a non-finite upstream row reaches only the
pixels that its samples touch. 4 * S numbers are set aside for the cells of an item and head, as
(h + 1) * (w + 1) <= 4 * h * w: level sizes in device memory need not be read.
"""

import triton
import triton.language as tl

from msda_op.triton.sampling import load_level, load_pairs, locate, value_strides


@triton.jit(do_not_specialize=["num_queries", "value_length", "no_cell"])
def cell_kernel(
    spatial_shapes,  # [L, 2] (h, w)
    level_start_index,  # [L]
    locations,  # [B, Q, M, L, K, 2] (x, y), or [B, 2, Q, M, L, K] where PAIR_FIRST
    cells,  # [B, Q, M, L, K] int32 or int64
    num_queries,
    value_length,
    no_cell,  # number for samples that reach no pixel
    M: tl.constexpr,
    L: tl.constexpr,
    K: tl.constexpr,
    PAIR_FIRST: tl.constexpr,
    BORDER: tl.constexpr,
    ALIGN_CORNERS: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    num_samples = num_queries * (M * L * K)
    blocks = tl.cdiv(num_samples, BLOCK_I)
    program = tl.program_id(0)
    item = (program // blocks).to(tl.int64)
    samples = program % blocks * BLOCK_I + tl.arange(0, BLOCK_I)
    mask = samples < num_samples
    head = samples // (L * K) % M
    height, width, start = load_level(spatial_shapes, level_start_index, samples // K % L)
    x, y = load_pairs(locations + 2 * item * num_samples, samples, mask, num_samples, PAIR_FIRST)
    left, _, left_inside, right_inside, _ = locate(x, width, BORDER, ALIGN_CORNERS)
    top, _, top_inside, bottom_inside, _ = locate(y, height, BORDER, ALIGN_CORNERS)
    reaches = (left_inside | right_inside) & (top_inside | bottom_inside)
    cell = (item * M + head) * value_length * 4 + 4 * start + (top + 1) * (width + 1) + left + 1
    number = tl.where(reaches, cell, no_cell).to(cells.dtype.element_ty)
    tl.store(cells + item * num_samples + samples, number, mask=mask)


@triton.jit(do_not_specialize=["num_queries", "value_length"])
def gather_kernel(
    grad_output,  # [B, Q, M, D]
    spatial_shapes,  # [L, 2] (h, w)
    level_start_index,  # [L]
    locations,  # [B, Q, M, L, K, 2] (x, y), or [B, 2, Q, M, L, K] where PAIR_FIRST
    attention_weights,  # [B, Q, M, L, K]
    order,  # [B*Q*M*L*K] int64, the samples sorted by cell
    cell_starts,  # [B*M*4*S + 1], place in `order` of the first sample of each cell
    grad_value,  # [B, S, M, D], or [B, M, S, D] where HEAD_MAJOR
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
    BLOCK_I: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    program = tl.program_id(0)
    row = program % value_length
    head = program // value_length % M
    item = (program // value_length // M).to(tl.int64)
    channels = tl.arange(0, BLOCK_D)
    num_samples = num_queries * (M * L * K)
    grad_output += item * num_queries * (M * D) + head * D

    height, width, start = load_level(spatial_shapes, level_start_index, 0)
    for level in range(1, L):
        next_height, next_width, next_start = load_level(spatial_shapes, level_start_index, level)
        in_level = (row >= next_start) & (row < next_start + next_height * next_width)
        height = tl.where(in_level, next_height, height)
        width = tl.where(in_level, next_width, width)
        start = tl.where(in_level, next_start, start)
    pixel_y = (row - start) // width
    pixel_x = (row - start) % width
    first_cell = (item * M + head) * value_length * 4 + 4 * start

    accumulator = tl.zeros([BLOCK_I, BLOCK_D], tl.float32)
    for corner in range(4):
        cell = first_cell + (pixel_y + corner // 2) * (width + 1) + pixel_x + corner % 2
        end = tl.load(cell_starts + cell + 1)
        for position in range(tl.load(cell_starts + cell), end, BLOCK_I):
            places = position + tl.arange(0, BLOCK_I)
            mask = places < end
            samples = (tl.load(order + places, mask=mask, other=0) - item * num_samples).to(tl.int32)
            x, y = load_pairs(locations + 2 * item * num_samples, samples, mask, num_samples, PAIR_FIRST)
            weight = tl.load(attention_weights + item * num_samples + samples, mask=mask, other=0.0).to(tl.float32)
            left, x_fraction, _, _, _ = locate(x, width, BORDER, ALIGN_CORNERS)
            top, y_fraction, _, _, _ = locate(y, height, BORDER, ALIGN_CORNERS)
            share_x = tl.where(left == pixel_x, 1 - x_fraction, x_fraction)
            share_y = tl.where(top == pixel_y, 1 - y_fraction, y_fraction)
            rows = samples // (M * L * K) * (M * D)
            upstream = tl.load(
                grad_output + rows[:, None] + channels[None, :],
                mask=mask[:, None] & (channels < D)[None, :],
                other=0.0,
            ).to(tl.float32)
            accumulator += upstream * tl.where(mask, weight * share_y * share_x, 0.0)[:, None]

    row_stride, head_stride = value_strides(value_length, M, D, HEAD_MAJOR)
    grad_value += item * value_length * (M * D) + head * head_stride + row * row_stride
    result = tl.sum(accumulator, axis=0).to(grad_value.dtype.element_ty)
    tl.store(grad_value + channels, result, mask=channels < D)
