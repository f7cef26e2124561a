"""Reduction of the Hopper path: a bucket of records becomes a window of the gradient of value, on the tensor cores.

Legend: B batch, Q queries, S rows of value, M heads, D channels a head.
One program, a single warp, takes 32 channels of one bucket after the other. For 32 records at a time

    window[32 pixels, 32 channels] += W[32 pixels, 32 records] @ upstream gradient[32 records, 32 channels]

in float32, where column n of W holds the four bilinear weights of record n in the dtype of value. W stands in shared
memory: lane n stores its four weights, two mma steps of 16 records read them back through ldmatrix, and lane n puts
zeros there again. Row p of W (pixel p = row * 8 + column of the window) has 64 bytes; its 16-byte quarters are
permuted by p >> 1 & 3, so that neighbouring rows of a column fall on different banks. For float32, which needs no
shared memory, see `reduce_float32`.

    lane 4g + t    as gather lane: record g of eight, 16-byte chunk t of its gradient row: channels 8t .. 8t + 7
                   in the sums: column g of the window, channels 8t + 2j, 8t + 2j + 1 in n-block j

A register of the gather lanes is an 8 x 8 matrix (record, channel), its transpose half of a B operand. Pixels of the
window outside the level get sums like any other, and are not written.
"""

import triton
import triton.language as tl

from msda_op.triton.hopper.backward import RECORD_SCALE
from msda_op.triton.hopper.buckets import WINDOW_FIELDS, WINDOW_H, WINDOW_W, count_buckets
from msda_op.triton.hopper.primitives import (
    add_floats4,
    allocate_window,
    clear_shared,
    load_matrices,
    load_words2,
    load_words4,
    multiply_matrices,
    pack_halves,
    shuffle,
    shuffle_xor,
    store_shared,
    store_words4,
    synchronize_warp,
    transpose_matrix,
)
from msda_op.triton.hopper.reduce_float32 import sum_float_records


@triton.jit
def shared_address(window, pixel, lane):
    """Returns where column `lane` of row `pixel` of W stands."""
    return window + pixel * 64 + (((lane >> 3) ^ ((pixel >> 1) & 3)) << 4) + (lane & 7) * 2


@triton.jit
def spread_record(word0, word1, counts, window, lane, dtype: tl.constexpr):
    """Returns the weights of a record as pairs (left, right), addresses of its upper pixels, and which lie inside."""
    attention = word0.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    x = (word0 >> 16) & 0xFFFF
    y = word1 & 0x7FFF
    column = x // RECORD_SCALE - 1
    row = y // RECORD_SCALE - 1
    fraction_x = (x & (RECORD_SCALE - 1)).to(tl.float32) * (1.0 / RECORD_SCALE)
    lower = attention * ((y & (RECORD_SCALE - 1)).to(tl.float32) * (1.0 / RECORD_SCALE))
    upper = attention - lower
    upper_right = upper * fraction_x
    lower_right = lower * fraction_x
    upper_pair = pack_halves(upper - upper_right, upper_right, dtype)
    lower_pair = pack_halves(lower - lower_right, lower_right, dtype)
    pixel = row * WINDOW_W + column
    left_inside = (column >= 0) & counts
    right_inside = (column < WINDOW_W - 1) & counts
    addresses = (shared_address(window, pixel, lane), shared_address(window, pixel + 1, lane))
    inside = (
        left_inside & (row >= 0),
        right_inside & (row >= 0),
        left_inside & (row < WINDOW_H - 1),
        right_inside & (row < WINDOW_H - 1),
    )
    return (upper_pair, lower_pair), addresses, inside


@triton.jit
def store_weights(pairs, addresses, inside):
    """Puts the four weights of each lane into its column of W; a row of the window is 8 * 64 bytes further."""
    store_shared(addresses[0], pairs[0], inside[0])
    store_shared(addresses[1], pairs[0] >> 16, inside[1])
    store_shared(addresses[0] + 512, pairs[1], inside[2])
    store_shared(addresses[1] + 512, pairs[1] >> 16, inside[3])


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
def multiply_block(weights, b_upper, b_lower, sums, dtype: tl.constexpr):
    """Adds 16 records to 16 pixels: one A operand of W times four B operands (n-blocks of 8 channels)."""
    a0, a1, a2, a3 = weights
    s0, s1, s2, s3 = sums
    return (
        multiply_matrices(a0, a1, a2, a3, b_upper[0], b_lower[0], s0[0], s0[1], s0[2], s0[3], dtype),
        multiply_matrices(a0, a1, a2, a3, b_upper[1], b_lower[1], s1[0], s1[1], s1[2], s1[3], dtype),
        multiply_matrices(a0, a1, a2, a3, b_upper[2], b_lower[2], s2[0], s2[1], s2[2], s2[3], dtype),
        multiply_matrices(a0, a1, a2, a3, b_upper[3], b_lower[3], s3[0], s3[1], s3[2], s3[3], dtype),
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
def clear_window(window, lane):
    """Puts zeros into W."""
    for pixel_row in tl.static_range(WINDOW_H):
        clear_shared(window + pixel_row * 512 + lane * 16)


@triton.jit
def sum_records(records, size, grad_output, window, lane, QUERY_STRIDE: tl.constexpr):
    """Returns the upper and the lower two rows of the window of at least one record; W is zero before and after."""
    dtype: tl.constexpr = grad_output.dtype.element_ty
    g = lane >> 2
    gradient_rows = grad_output + (lane & 3) * 8
    # ldmatrix: lane i addresses row i & 15 of a 16 x 16 block, and its left (i < 16) or right half.
    block_row = lane & 15
    swizzle = (block_row >> 1) & 3
    early = window + block_row * 64 + (((lane >> 4) ^ swizzle) << 4)
    late = window + block_row * 64 + (((lane >> 4) + 2) ^ swizzle) * 16

    zero = lane * 0.0
    none = (zero, zero, zero, zero)
    upper_sums = (none, none, none, none)
    lower_sums = (none, none, none, none)
    # Beyond the end the last record is read once more: a row that is not finite must not leave its windows.
    last = size - 1
    words = load_words2(records + tl.minimum(lane, last) * 2)
    for first in range(0, size, 32):
        counts = first + lane < size
        row_offset = ((words[1] >> 15) & 0x1FFFF) * QUERY_STRIDE
        gradient0 = load_words4(gradient_rows + shuffle(row_offset, g))
        gradient1 = load_words4(gradient_rows + shuffle(row_offset, g + 8))
        gradient2 = load_words4(gradient_rows + shuffle(row_offset, g + 16))
        gradient3 = load_words4(gradient_rows + shuffle(row_offset, g + 24))
        pairs, addresses, inside = spread_record(words[0], words[1], counts, window, lane, dtype)
        words = load_words2(records + tl.minimum(first + 32 + lane, last) * 2)
        store_weights(pairs, addresses, inside)
        synchronize_warp(lane)
        b_upper = transpose_rows(gradient0)
        b_lower = transpose_rows(gradient1)
        upper_sums = multiply_block(load_matrices(early), b_upper, b_lower, upper_sums, dtype)
        lower_sums = multiply_block(load_matrices(early + 1024), b_upper, b_lower, lower_sums, dtype)
        b_upper = transpose_rows(gradient2)
        b_lower = transpose_rows(gradient3)
        upper_sums = multiply_block(load_matrices(late), b_upper, b_lower, upper_sums, dtype)
        lower_sums = multiply_block(load_matrices(late + 1024), b_upper, b_lower, lower_sums, dtype)
        synchronize_warp(lane)
        store_weights((lane * 0, lane * 0), addresses, inside)
    return upper_sums, lower_sums


@triton.jit
def sum_run(records, size, grad_output, window, QUERY_STRIDE: tl.constexpr):
    """Returns the upper and the lower two rows of the window of a run of at least one record."""
    lane = tl.arange(0, 32)
    if grad_output.dtype.element_ty == tl.float32:
        return sum_float_records(records, size, grad_output, lane, QUERY_STRIDE)
    else:
        return sum_records(records, size, grad_output, window, lane, QUERY_STRIDE)


@triton.jit
def add_window(upper_sums, lower_sums, window_row, target, PIXEL_STRIDE: tl.constexpr):
    """Adds the window that a row of `windows` describes to 32 channels of the gradient of value."""
    lane = tl.arange(0, 32)
    g = lane >> 2
    t = lane & 3
    columns = tl.load(window_row + 2)
    rows = tl.load(window_row + 3)
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


@triton.jit
def store_part(part, upper_sums, lower_sums):
    """Stores the sums of a warp, each lane its own, 16 bytes at a time."""
    lane = tl.arange(0, 32)
    place = part + lane * 4
    everyone = lane >= 0
    for block in tl.static_range(4):
        a, b, c, d = upper_sums[block]
        store_floats4(place + block * 128, a, b, c, d, everyone)
        a, b, c, d = lower_sums[block]
        store_floats4(place + (block + 4) * 128, a, b, c, d, everyone)


@triton.jit
def store_floats4(pointer, a, b, c, d, mask):
    """Stores four float32."""
    store_words4(
        pointer,
        a.to(tl.int32, bitcast=True),
        b.to(tl.int32, bitcast=True),
        c.to(tl.int32, bitcast=True),
        d.to(tl.int32, bitcast=True),
        mask,
    )


@triton.jit
def add_block(sums, place):
    """Returns four sums of a lane plus those stored at `place`."""
    words = load_words4(place)
    return (
        sums[0] + words[0].to(tl.float32, bitcast=True),
        sums[1] + words[1].to(tl.float32, bitcast=True),
        sums[2] + words[2].to(tl.float32, bitcast=True),
        sums[3] + words[3].to(tl.float32, bitcast=True),
    )


@triton.jit
def sum_parts(parts, starts, splits, PART_STRIDE: tl.constexpr):
    """Returns the upper and the lower two rows of the window of a split tile: its parts in order."""
    lane = tl.arange(0, 32)
    zero = lane * 0.0
    none = (zero, zero, zero, zero)
    upper_sums = (none, none, none, none)
    lower_sums = (none, none, none, none)
    for split in range(splits):
        if tl.load(starts + split + 1) > tl.load(starts + split):
            place = parts + split * PART_STRIDE + lane * 4
            u0, u1, u2, u3 = upper_sums
            l0, l1, l2, l3 = lower_sums
            upper_sums = (
                add_block(u0, place),
                add_block(u1, place + 128),
                add_block(u2, place + 256),
                add_block(u3, place + 384),
            )
            lower_sums = (
                add_block(l0, place + 512),
                add_block(l1, place + 640),
                add_block(l2, place + 768),
                add_block(l3, place + 896),
            )
    return upper_sums, lower_sums


@triton.jit(
    do_not_specialize=[
        "num_queries",
        "batch_stride",
        "head_stride",
        "bound",
        "capacity",
        "programs",
        "first_plane",
        "num_parts",
        "colour",
    ]
)
def reduce_kernel(
    bins,  # [L + 1, 3], see buckets.plan_kernel
    windows,  # [bound, WINDOW_FIELDS], see there
    starts,  # [B, M, bound + 1] int32
    records,  # [B, M, capacity, 2, or 4 where grad_output is float32] int32
    grad_output,  # [B, Q, M, D], bfloat16, float16 or float32
    target,  # grad_value in float32, by its strides, zeroed
    parts,  # [planes, num_parts, D / 32, 1024] float32, windows of buckets of split tiles; None for STAGE "buckets"
    num_queries,
    batch_stride,
    head_stride,
    bound,
    capacity,
    programs,  # of an item and head
    first_plane,  # item * M + head that the grid begins with
    num_parts,
    colour,  # of the tiles to take; not read unless STAGE is "colour"
    PIXEL_STRIDE: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    L: tl.constexpr,
    STAGE: tl.constexpr,
):
    """Takes bucket after bucket, STAGE:

    "buckets"   adds each to the gradient, in any order.
    "parts"     stores the windows of the buckets of split tiles.
    "colour"    adds tile after tile of one colour, split ones from their parts.
    """
    CHUNKS: tl.constexpr = D // 32
    RECORD_WORDS: tl.constexpr = 4 if grad_output.dtype.element_ty == tl.float32 else 2
    PART_STRIDE: tl.constexpr = CHUNKS * 1024
    program = tl.program_id(0) // CHUNKS
    chunk = tl.program_id(0) % CHUNKS
    channel = chunk * 32
    plane = (first_plane + program // programs).to(tl.int64)
    item = plane // M
    head = plane % M
    starts += plane * (bound + 1)
    records += plane * capacity * RECORD_WORDS
    grad_output += item * num_queries * (M * D) + head * D + channel
    target += item * batch_stride + head * head_stride + channel
    if STAGE != "buckets":
        parts += ((plane - first_plane) * num_parts * CHUNKS + chunk) * 1024
    window = None
    if grad_output.dtype.element_ty != tl.float32:
        lane = tl.arange(0, 32)
        window = allocate_window(lane)
        clear_window(window, lane)
    for bucket in range(program % programs, count_buckets(bins, L), programs):
        window_row = windows + bucket * WINDOW_FIELDS
        start = tl.load(starts + bucket)
        size = tl.load(starts + bucket + 1) - start
        if STAGE != "buckets":
            part = tl.load(window_row + 6)
        if STAGE == "parts":
            size = tl.where(part >= 0, size, 0)
        if STAGE == "colour":
            splits = tl.where(tl.load(window_row + 4) == colour, tl.load(window_row + 5), 0)
            size = tl.where((splits > 0) & (part < 0), size, 0)
            if (splits > 0) & (part >= 0):
                upper_sums, lower_sums = sum_parts(parts + part * PART_STRIDE, starts + bucket, splits, PART_STRIDE)
                add_window(upper_sums, lower_sums, window_row, target, PIXEL_STRIDE)
        if size > 0:
            run = records + start * RECORD_WORDS
            upper_sums, lower_sums = sum_run(run, size, grad_output, window, M * D)
            if STAGE == "parts":
                store_part(parts + part * PART_STRIDE, upper_sums, lower_sums)
            else:
                add_window(upper_sums, lower_sums, window_row, target, PIXEL_STRIDE)
