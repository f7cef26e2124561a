"""Reduction of the Hopper path: a bucket of records becomes a window of the gradient of value, on the tensor cores.

Legend: B batch, Q queries, S rows of value, M heads, D channels a head.
One program, a single warp, takes a bucket and 32 channels. For 32 records at a time

    window[32 pixels, 32 channels] += W[32 pixels, 32 records] @ upstream gradient[32 records, 32 channels]

in float32, where column n of W holds the bilinear weights of record n in the dtype of value: the hat function of its
distance from each pixel along x, times that along y, times its attention weight. Nothing goes through shared memory:
each lane computes the elements of W that it holds as A operand of the product. For float32 see `reduce_float32`.

    lane 4g + t    as record lane: record g of eight; its weight for row t of the window; 16-byte chunk t of its
                   gradient row: channels 8t .. 8t + 7
                   in W: column g of the window, records 2t and 2t + 1 of eight; all four rows of it, a register each
                   in the sums: column g of the window, channels 8t + 2j, 8t + 2j + 1 in n-block j

From record lanes to W, numbers travel by the tensor core too: see `weigh_records`. A register of a gradient row is an
8 x 8 matrix (record, channel), its transpose half of a B operand. Pixels of the window outside the level get sums like
any other, and are not written.
"""

import triton
import triton.language as tl

from msda_op.triton.hopper.backward import RECORD_SCALE
from msda_op.triton.hopper.buckets import WINDOW_FIELDS, count_buckets
from msda_op.triton.hopper.primitives import (
    add_floats4,
    load_words4,
    multiply_matrices,
    multiply_short_matrices,
    pack_halves,
    shuffle_xor,
    transpose_matrix,
)
from msda_op.triton.hopper.reduce_float32 import sum_float_records

# Pairs of bfloat16: both halves of a number times 1, 1/2048 or -1/2048; and 1 beside 0.
PICK = tl.constexpr(0x3F803F80)
PICK_PIXELS = tl.constexpr(0x3A003A00)
PICK_MINUS_PIXELS = tl.constexpr(0xBA00BA00 - (1 << 32))
ONE = tl.constexpr(0x3F80)


@triton.jit
def split_float(x):
    """Returns a float32 as two bfloat16, its first 8 bits and what is left of it: 16 bits of it in all."""
    high = (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    return pack_halves(high, x - high, tl.bfloat16)


@triton.jit
def load_record(records, index, size, nothing):
    """Returns the two words of a record, or those of `nothing` beyond the end of the bucket."""
    record = tl.load(records + index, mask=index < size, other=nothing)
    return record.to(tl.int32), (record >> 32).to(tl.int32)


@triton.jit
def weigh_records(words, g, t, dtype: tl.constexpr):
    """Returns what the lane holds of W for eight records: pairs (record 2t, record 2t + 1) of pixel g of rows 0 .. 3.

    Record lanes know x, and the weight of row t. Either is split into two bfloat16, so that it takes two rows (2t and
    2t + 1) of an 8 x 8 matrix whose columns are the records. Products with matrices that pick two rows and add them up
    spread them over the warp without loss, in float32. The weight of column g is the lesser of two lines, x - g rising
    to 1 and g + 2 - x falling from there, or 0; a row of ones among those of x gives the lines their constants.
    """
    attention = words[0].to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    y = (words[1] & 0x7FFF).to(tl.float32)
    distance = tl.fma(y, 1.0 / RECORD_SCALE, -1.0 - t.to(tl.float32))
    row_weight = split_float(attention * tl.maximum(1 - tl.abs(distance), 0.0))
    x = split_float(((words[0] >> 16) & 0xFFFF).to(tl.float32))
    x = tl.where(t == 0, x, ONE)

    zero = g * 0.0
    row0 = tl.where(t == 0, PICK, 0)
    row1 = tl.where(t == 1, PICK, 0)
    row2 = tl.where(t == 2, PICK, 0)
    row3 = tl.where(t == 3, PICK, 0)
    first0, second0, first1, second1 = multiply_short_matrices(row0, row1, row_weight, zero, zero, zero, zero)
    first2, second2, first3, second3 = multiply_short_matrices(row2, row3, row_weight, zero, zero, zero, zero)
    column = g.to(tl.float32)
    falling = tl.where(t == 0, PICK_MINUS_PIXELS, tl.where(t == 1, pack_halves(column + 2, zero, tl.bfloat16), 0))
    rising = tl.where(t == 0, PICK_PIXELS, tl.where(t == 1, pack_halves(-column, zero, tl.bfloat16), 0))
    fall0, fall1, rise0, rise1 = multiply_short_matrices(falling, rising, x, zero, zero, zero, zero)
    first = tl.maximum(tl.minimum(fall0, rise0), 0.0)
    second = tl.maximum(tl.minimum(fall1, rise1), 0.0)
    return (
        pack_halves(first0 * first, second0 * second, dtype),
        pack_halves(first1 * first, second1 * second, dtype),
        pack_halves(first2 * first, second2 * second, dtype),
        pack_halves(first3 * first, second3 * second, dtype),
    )


@triton.jit
def transpose_rows(rows):
    """Transposes the four 8 x 8 matrices of a loaded chunk."""
    return (
        transpose_matrix(rows[0]),
        transpose_matrix(rows[1]),
        transpose_matrix(rows[2]),
        transpose_matrix(rows[3]),
    )


@triton.jit
def multiply_block(a0, a1, a2, a3, b_upper, b_lower, sums, dtype: tl.constexpr):
    """Adds 16 records to 16 pixels: one A operand of W times four B operands (n-blocks of 8 channels)."""
    s0, s1, s2, s3 = sums
    return (
        multiply_matrices(a0, a1, a2, a3, b_upper[0], b_lower[0], s0[0], s0[1], s0[2], s0[3], dtype),
        multiply_matrices(a0, a1, a2, a3, b_upper[1], b_lower[1], s1[0], s1[1], s1[2], s1[3], dtype),
        multiply_matrices(a0, a1, a2, a3, b_upper[2], b_lower[2], s2[0], s2[1], s2[2], s2[3], dtype),
        multiply_matrices(a0, a1, a2, a3, b_upper[3], b_lower[3], s3[0], s3[1], s3[2], s3[3], dtype),
    )


@triton.jit
def add_records(words0, words1, gradient0, gradient1, upper_sums, lower_sums, g, t, dtype: tl.constexpr):
    """Adds twice eight records to the upper and the lower two rows of the window."""
    w0, w1, w2, w3 = weigh_records(words0, g, t, dtype)
    v0, v1, v2, v3 = weigh_records(words1, g, t, dtype)
    b_upper = transpose_rows(gradient0)
    b_lower = transpose_rows(gradient1)
    return (
        multiply_block(w0, w1, v0, v1, b_upper, b_lower, upper_sums, dtype),
        multiply_block(w2, w3, v2, v3, b_upper, b_lower, lower_sums, dtype),
    )


@triton.jit
def trade_sectors(sums, half: tl.constexpr, on_odd):
    """Returns the eight channels of one pixel row of a block, traded between lanes t and t ^ 1.

    A lane holds channels 8t .. 8t + 7. Written as they stand, 16 bytes at a time, they would touch each 32-byte sector
    twice. After the trade the first four of both lanes are one sector (channels 8t .. 8t + 7 of the even lane), and the
    last four the other.
    """
    a0 = sums[0][2 * half]
    a1 = sums[0][2 * half + 1]
    a2 = sums[1][2 * half]
    a3 = sums[1][2 * half + 1]
    b0 = sums[2][2 * half]
    b1 = sums[2][2 * half + 1]
    b2 = sums[3][2 * half]
    b3 = sums[3][2 * half + 1]
    r0 = shuffle_xor(tl.where(on_odd, a0, b0), 1)
    r1 = shuffle_xor(tl.where(on_odd, a1, b1), 1)
    r2 = shuffle_xor(tl.where(on_odd, a2, b2), 1)
    r3 = shuffle_xor(tl.where(on_odd, a3, b3), 1)
    first = (tl.where(on_odd, r0, a0), tl.where(on_odd, r1, a1), tl.where(on_odd, r2, a2), tl.where(on_odd, r3, a3))
    last = (tl.where(on_odd, b0, r0), tl.where(on_odd, b1, r1), tl.where(on_odd, b2, r2), tl.where(on_odd, b3, r3))
    return first, last


@triton.jit
def sum_records(records, size, grad_output, lane, QUERY_STRIDE: tl.constexpr):
    """Returns the upper and the lower two rows of the window of at least one record."""
    dtype: tl.constexpr = grad_output.dtype.element_ty
    g = lane >> 2
    t = lane & 3
    gradient_rows = grad_output + t * 8
    words = records.to(tl.pointer_type(tl.int64), bitcast=True)
    zero = lane * 0.0
    none = (zero, zero, zero, zero)
    upper_sums = (none, none, none, none)
    lower_sums = (none, none, none, none)
    # What weighs nothing has its gradient from the bucket too: a row that is not finite must not leave its windows.
    nothing = tl.load(words) & -65536
    words0 = load_record(words, g, size, nothing)
    words1 = load_record(words, g + 8, size, nothing)
    words2 = load_record(words, g + 16, size, nothing)
    words3 = load_record(words, g + 24, size, nothing)
    for first in range(0, size, 32):
        gradient0 = load_words4(gradient_rows + ((words0[1] >> 15) & 0x1FFFF) * QUERY_STRIDE)
        gradient1 = load_words4(gradient_rows + ((words1[1] >> 15) & 0x1FFFF) * QUERY_STRIDE)
        gradient2 = load_words4(gradient_rows + ((words2[1] >> 15) & 0x1FFFF) * QUERY_STRIDE)
        gradient3 = load_words4(gradient_rows + ((words3[1] >> 15) & 0x1FFFF) * QUERY_STRIDE)
        record = first + 32 + g
        next0 = load_record(words, record, size, nothing)
        next1 = load_record(words, record + 8, size, nothing)
        next2 = load_record(words, record + 16, size, nothing)
        next3 = load_record(words, record + 24, size, nothing)
        upper_sums, lower_sums = add_records(words0, words1, gradient0, gradient1, upper_sums, lower_sums, g, t, dtype)
        upper_sums, lower_sums = add_records(words2, words3, gradient2, gradient3, upper_sums, lower_sums, g, t, dtype)
        words0 = next0
        words1 = next1
        words2 = next2
        words3 = next3
    return upper_sums, lower_sums


@triton.jit
def reduce_run(
    records,  # of one item and head, at the first of the run
    size,  # of the run, at least 1
    grad_output,  # [Q, M, D] of the item, at the head and the first of 32 channels; bfloat16, float16 or float32
    window_row,  # row of `windows`, see buckets.plan_kernel
    target,  # grad_value of the item and head, at the first channel; float32
    PIXEL_STRIDE: tl.constexpr,
    QUERY_STRIDE: tl.constexpr,
):
    """Adds a run of records of one tile to 32 channels of the gradient of value."""
    lane = tl.arange(0, 32)
    g = lane >> 2
    t = lane & 3
    columns = tl.load(window_row + 2)
    rows = tl.load(window_row + 3)
    if grad_output.dtype.element_ty == tl.float32:
        upper_sums, lower_sums = sum_float_records(records, size, grad_output, lane, QUERY_STRIDE)
    else:
        upper_sums, lower_sums = sum_records(records, size, grad_output, lane, QUERY_STRIDE)

    on_odd = (t & 1) != 0
    corner = target + (tl.load(window_row) + g) * PIXEL_STRIDE + (t >> 1) * 16 + (t & 1) * 4
    row_stride = tl.load(window_row + 1) * PIXEL_STRIDE
    for half in tl.static_range(2):
        exists = (g < columns) & (half < rows)
        front, back = trade_sectors(upper_sums, half, on_odd)
        upper = corner + half * row_stride
        add_floats4(upper, front[0], front[1], front[2], front[3], exists)
        add_floats4(upper + 8, back[0], back[1], back[2], back[3], exists)
        exists = (g < columns) & (half + 2 < rows)
        front, back = trade_sectors(lower_sums, half, on_odd)
        lower = corner + (half + 2) * row_stride
        add_floats4(lower, front[0], front[1], front[2], front[3], exists)
        add_floats4(lower + 8, back[0], back[1], back[2], back[3], exists)


@triton.jit(do_not_specialize=["num_queries", "batch_stride", "head_stride", "bound", "capacity", "programs", "colour"])
def reduce_kernel(
    bins,  # [L + 1, 3], see buckets.plan_kernel
    windows,  # [bound, WINDOW_FIELDS], see there
    starts,  # [B, M, bound + 1] int32
    records,  # [B, M, capacity, 2, or 4 where grad_output is float32] int32
    grad_output,  # [B, Q, M, D], bfloat16, float16 or float32
    target,  # grad_value in float32, by its strides, zeroed
    num_queries,
    batch_stride,
    head_stride,
    bound,
    capacity,
    programs,  # of an item and head
    colour,  # of the tiles to take; not read unless COLOURED
    PIXEL_STRIDE: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    L: tl.constexpr,
    COLOURED: tl.constexpr,
):
    """Adds bucket after bucket; COLOURED, tile after tile of one colour, the buckets of a tile in one run."""
    CHUNKS: tl.constexpr = D // 32
    RECORD_WORDS: tl.constexpr = 4 if grad_output.dtype.element_ty == tl.float32 else 2
    program = tl.program_id(0) // CHUNKS
    channel = tl.program_id(0) % CHUNKS * 32
    plane = (program // programs).to(tl.int64)
    item = plane // M
    head = plane % M
    starts += plane * (bound + 1)
    records += plane * capacity * RECORD_WORDS
    grad_output += item * num_queries * (M * D) + head * D + channel
    target += item * batch_stride + head * head_stride + channel
    for bucket in range(program % programs, count_buckets(bins, L), programs):
        window_row = windows + bucket * WINDOW_FIELDS
        count = 1
        if COLOURED:
            count = tl.where(tl.load(window_row + 4) == colour, tl.load(window_row + 5), 0)
        start = tl.load(starts + bucket)
        size = tl.load(starts + bucket + count) - start
        if size > 0:
            reduce_run(records + start * RECORD_WORDS, size, grad_output, window_row, target, PIXEL_STRIDE, M * D)
