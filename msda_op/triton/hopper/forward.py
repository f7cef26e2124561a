"""Forward kernel of the Hopper path.

Legend: B batch, Q queries, S rows of value, M heads, D channels a head, L levels, K points.
One program computes 32 channels of one head of 2 * WARPS * ITERATIONS queries. With COUNT, samples are counted on the
way, by atomics, into the buckets where the backward pass will leave their records. Nothing else is atomic.

Lanes hold samples (see `samples`) until the pixels are read. Reading, they stand like this:

    gather lane:   bit 4      bit 3             bit 2                bits 1-0
    halves         query      parity of point   left/right pixel     16-byte chunk of the 64-byte row
    float32        query      left/right pixel  `---- 16-byte chunk of the 128-byte row ----'

so that 8 neighbouring lanes read 128 bytes that the L1 cache serves at once: of halves the left and the right pixel of
one sample, in a row where heads come first (BNLC), of float32 one pixel. One step takes two points of halves, or one
of float32, of two queries: an LDG.128 for the upper row of pixels and one for the lower. The weights of halves travel
as pairs (upper, lower) of float16. At the end lanes that differ in the bits of parity and side hold parts of the same
sums; they exchange and keep two channels each.
"""

import triton
import triton.language as tl

from msda_op.triton.hopper.buckets import SECTOR, count_sample, load_bin
from msda_op.triton.hopper.primitives import load_words4, pack_halves, shuffle, shuffle_xor
from msda_op.triton.hopper.samples import (
    load_lane_level,
    load_row_strides,
    load_sample,
    place_block,
    place_sample,
    softmax_of_query,
    split_program_id,
    turn_block,
    unpack_halves,
    weigh_pixels,
)


@triton.jit
def load_rows(value, pixels, source, row_stride):
    """Returns the lane's chunk in the upper and the lower row of pixels of the sample on lane `source`."""
    upper = value + shuffle(pixels, source)
    return load_words4(upper), load_words4(upper + row_stride)


@triton.jit
def add_rows(sums, rows, weights, dtype: tl.constexpr):
    """Returns the eight sums of a lane plus its chunks times the packed weights of both rows."""
    upper_weight, lower_weight = unpack_halves(weights, tl.float16)
    upper, lower = rows
    u0, u1 = unpack_halves(upper[0], dtype)
    u2, u3 = unpack_halves(upper[1], dtype)
    u4, u5 = unpack_halves(upper[2], dtype)
    u6, u7 = unpack_halves(upper[3], dtype)
    l0, l1 = unpack_halves(lower[0], dtype)
    l2, l3 = unpack_halves(lower[1], dtype)
    l4, l5 = unpack_halves(lower[2], dtype)
    l6, l7 = unpack_halves(lower[3], dtype)
    return (
        sums[0] + u0 * upper_weight + l0 * lower_weight,
        sums[1] + u1 * upper_weight + l1 * lower_weight,
        sums[2] + u2 * upper_weight + l2 * lower_weight,
        sums[3] + u3 * upper_weight + l3 * lower_weight,
        sums[4] + u4 * upper_weight + l4 * lower_weight,
        sums[5] + u5 * upper_weight + l5 * lower_weight,
        sums[6] + u6 * upper_weight + l6 * lower_weight,
        sums[7] + u7 * upper_weight + l7 * lower_weight,
    )


@triton.jit
def add_float_rows(sums, rows, upper_weight, lower_weight):
    """Returns the four sums of a lane plus its chunks of float32 times the weights of both rows."""
    upper, lower = rows
    return (
        sums[0]
        + upper[0].to(tl.float32, bitcast=True) * upper_weight
        + lower[0].to(tl.float32, bitcast=True) * lower_weight,
        sums[1]
        + upper[1].to(tl.float32, bitcast=True) * upper_weight
        + lower[1].to(tl.float32, bitcast=True) * lower_weight,
        sums[2]
        + upper[2].to(tl.float32, bitcast=True) * upper_weight
        + lower[2].to(tl.float32, bitcast=True) * lower_weight,
        sums[3]
        + upper[3].to(tl.float32, bitcast=True) * upper_weight
        + lower[3].to(tl.float32, bitcast=True) * lower_weight,
    )


@triton.jit
def part_sides(left, right, lane, DISTANCE: tl.constexpr):
    """Parts numbers of the left and the right pixels between a lane and the one at `DISTANCE`, a power of two.

    Both results hold `left` on the lower and `right` on the upper lane of such a pair: the first those of the sample on
    the lower lane, the second those of the other.
    """
    on_upper = (lane & DISTANCE) != 0
    received = shuffle_xor(tl.where(on_upper, left, right), DISTANCE)
    return tl.where(on_upper, received, left), tl.where(on_upper, right, received)


@triton.jit
def add_samples(sums, value, pixels, row_strides, share_top, share_bottom, weight_left, weight_right, lane):
    """Returns the sums of a gather lane plus its part of the samples of a pass."""
    dtype: tl.constexpr = value.dtype.element_ty
    if dtype == tl.float32:
        upper_even, upper_odd = part_sides(share_top * weight_left, share_top * weight_right, lane, 1)
        lower_even, lower_odd = part_sides(share_bottom * weight_left, share_bottom * weight_right, lane, 1)
        pixel_source = lane & 16
        weight_source = (lane & 16) + ((lane >> 3) & 1)
        for quad in tl.static_range(4):
            # Eight loads leave before the first of them is used.
            rows0 = load_rows(value, pixels, pixel_source + 4 * quad, row_strides[quad])
            rows1 = load_rows(value, pixels, pixel_source + 4 * quad + 1, row_strides[quad])
            rows2 = load_rows(value, pixels, pixel_source + 4 * quad + 2, row_strides[quad])
            rows3 = load_rows(value, pixels, pixel_source + 4 * quad + 3, row_strides[quad])
            source = weight_source + 4 * quad
            sums = add_float_rows(sums, rows0, shuffle(upper_even, source), shuffle(lower_even, source))
            sums = add_float_rows(sums, rows1, shuffle(upper_odd, source), shuffle(lower_odd, source))
            source = weight_source + 4 * quad + 2
            sums = add_float_rows(sums, rows2, shuffle(upper_even, source), shuffle(lower_even, source))
            sums = add_float_rows(sums, rows3, shuffle(upper_odd, source), shuffle(lower_odd, source))
    else:
        # Of a quad, lanes 0-1 keep the weights of left pixels and lanes 2-3 of right ones; `early` holds points 0 and
        # 1, `late` points 2 and 3.
        pair_left = pack_halves(share_top * weight_left, share_bottom * weight_left, tl.float16)
        pair_right = pack_halves(share_top * weight_right, share_bottom * weight_right, tl.float16)
        early, late = part_sides(pair_left, pair_right, lane, 2)
        pixel_source = (lane & 16) + ((lane >> 3) & 1)
        weight_source = pixel_source + ((lane >> 2) & 1) * 2
        for quad in tl.static_range(0, 4, 2):
            # Eight loads leave before the first of them is used.
            rows0 = load_rows(value, pixels, pixel_source + 4 * quad, row_strides[quad])
            rows1 = load_rows(value, pixels, pixel_source + 4 * quad + 2, row_strides[quad])
            rows2 = load_rows(value, pixels, pixel_source + 4 * quad + 4, row_strides[quad + 1])
            rows3 = load_rows(value, pixels, pixel_source + 4 * quad + 6, row_strides[quad + 1])
            sums = add_rows(sums, rows0, shuffle(early, weight_source + 4 * quad), dtype)
            sums = add_rows(sums, rows1, shuffle(late, weight_source + 4 * quad), dtype)
            sums = add_rows(sums, rows2, shuffle(early, weight_source + 4 * quad + 4), dtype)
            sums = add_rows(sums, rows3, shuffle(late, weight_source + 4 * quad + 4), dtype)
    return sums


@triton.jit
def add_and_halve(keeps_second, first, second, distance: tl.constexpr):
    """Adds over two lanes at `distance`: one gets the sum of `first`, the one that `keeps_second` that of `second`."""
    return tl.where(keeps_second, second, first) + shuffle_xor(tl.where(keeps_second, first, second), distance)


@triton.jit
def pack_floats(low, high):
    """Two float32 as one int64, `low` in its lower half: the registers of a lane as they are."""
    lower, upper = low.to(tl.uint32, bitcast=True), high.to(tl.uint32, bitcast=True)
    return ((upper.to(tl.uint64) << 32) | lower.to(tl.uint64)).to(tl.int64, bitcast=True)


@triton.jit
def store_sums(output, sums, lane, mask):
    """Adds up the parts of sums over lanes and stores two channels of each lane.

    By stores that PyTorch can see: of inline PTX with effects it knows no target, so that a trace of this kernel would
    take every tensor for written, copy them all and write them back.
    """
    dtype: tl.constexpr = output.dtype.element_ty
    on_bit3 = (lane & 8) != 0
    if dtype == tl.float32:
        low = add_and_halve(on_bit3, sums[0], sums[2], 8)
        high = add_and_halve(on_bit3, sums[1], sums[3], 8)
        target = output + (lane & 7) * 4 + ((lane >> 3) & 1) * 2
        tl.store(target.to(tl.pointer_type(tl.int64), bitcast=True), pack_floats(low, high), mask=mask)
    else:
        on_bit2 = (lane & 4) != 0
        half0 = add_and_halve(on_bit2, sums[0], sums[4], 4)
        half1 = add_and_halve(on_bit2, sums[1], sums[5], 4)
        half2 = add_and_halve(on_bit2, sums[2], sums[6], 4)
        half3 = add_and_halve(on_bit2, sums[3], sums[7], 4)
        low = add_and_halve(on_bit3, half0, half2, 8)
        high = add_and_halve(on_bit3, half1, half3, 8)
        target = output + (lane & 3) * 8 + ((lane >> 2) & 1) * 4 + ((lane >> 3) & 1) * 2
        tl.store(target.to(tl.pointer_type(tl.int32), bitcast=True), pack_halves(low, high, dtype), mask=mask)


@triton.jit(do_not_specialize=["num_queries", "batch_stride", "head_stride", "sector_bits"])
def forward_kernel(
    value,  # [B, S, M, D] or [B, M, S, D] by its strides; bfloat16, float16 or float32
    spatial_shapes,  # [L, 2] (h, w) int32 or int64
    level_start_index,  # [L] first row of value, int32 or int64
    bins,  # [L + 1, 3], see buckets.plan_kernel; None without COUNT
    places,  # [B, Q, M, L, K, 2] (x, y) locations, or [B, Q, L, REFERENCE] reference points, float32
    offsets,  # [B, Q, M, L, K, 2] (x, y), rows of a query OFFSET_STRIDE apart; None for locations
    weights,  # [B, Q, M, L, K] attention weights, or logits, rows WEIGHT_HEADS * L * K apart
    output,  # [B, Q, M, D], dtype of value
    counters,  # [B, M, 2^sector_bits, SECTOR] int32, see buckets.plan_kernel; None without COUNT
    num_queries,
    batch_stride,
    head_stride,
    sector_bits,
    PIXEL_STRIDE: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    L: tl.constexpr,
    K: tl.constexpr,
    OFFSET_STRIDE: tl.constexpr,
    WEIGHT_HEADS: tl.constexpr,
    REFERENCE: tl.constexpr,
    THIN: tl.constexpr,
    COUNT: tl.constexpr,
    WARPS: tl.constexpr,
    ITERATIONS: tl.constexpr,
):
    ROW_LANES: tl.constexpr = 8 if value.dtype.element_ty == tl.float32 else 4
    CHUNKS: tl.constexpr = D // 32
    PASSES: tl.constexpr = (L * ((K + 3) // 4) + 3) // 4
    item, head_chunk, first_query = split_program_id(num_queries, M * CHUNKS, 2 * WARPS * ITERATIONS)
    head = head_chunk // CHUNKS
    thread = tl.arange(0, 32 * WARPS)
    lane = thread & 31
    right = (lane // ROW_LANES) & 1
    channel = head_chunk % CHUNKS * 32

    value += item * batch_stride + head * head_stride
    value += right * PIXEL_STRIDE + channel + lane % ROW_LANES * (32 // ROW_LANES)
    first_row = item * num_queries
    if REFERENCE == 0:
        places += first_row * OFFSET_STRIDE
        offsets = places
    else:
        places += first_row * (L * REFERENCE)
        offsets += first_row * OFFSET_STRIDE
    offset_dtype: tl.constexpr = offsets.dtype.element_ty
    weights += first_row * (WEIGHT_HEADS * L * K)
    output += first_row * (M * D) + head * D + channel

    level, point, exists, height, width, start = load_lane_level(spatial_shapes, level_start_index, lane, 0, L, K)
    strides = load_row_strides(spatial_shapes, 0, PIXEL_STRIDE, L, K, THIN)
    if COUNT:
        counters += (item * M + head) * (SECTOR << sector_bits)
        level_bin = load_bin(bins, level)
    query = first_query + (thread >> 5) * 2 + (lane >> 4)
    last_query = num_queries - 1
    place, offset, weight = load_sample(
        places,
        offsets,
        weights,
        tl.minimum(query, last_query),
        head,
        level,
        point,
        OFFSET_STRIDE,
        WEIGHT_HEADS,
        L,
        K,
        REFERENCE,
    )
    zero = lane * 0.0
    empty = (zero, zero, zero, zero) if ROW_LANES == 8 else (zero, zero, zero, zero, zero, zero, zero, zero)
    sums = empty
    for step in range(ITERATIONS * PASSES):
        x, y = place_sample(place, offset, height, width, offset_dtype, K, REFERENCE)
        attention = weight.to(tl.float32)
        if REFERENCE != 0:
            attention = softmax_of_query(attention, exists)
        attention = tl.where(exists, attention, 0.0)
        left, _, weight_left, weight_right = weigh_pixels(x, width, THIN)
        top, _, weight_top, weight_bottom = weigh_pixels(y, height, THIN)
        if COUNT:
            counts = exists & (channel == 0)
            weights_x, weights_y = weight_left + weight_right, weight_top + weight_bottom
            count_sample(
                counters, left, top, weights_x, weights_y, query, counts, num_queries, level_bin, sector_bits, lane
            )
        pixel, turned = place_block(left, top, width, start, THIN)
        pixels = pixel * PIXEL_STRIDE
        weight_left, weight_right = turn_block(turned, weight_left, weight_right, THIN)
        row_strides = strides
        done_query = query
        # The next sample is on its way while this one is summed.
        if PASSES > 1:
            sweep = (step + 1) % PASSES
            level, point, exists, height, width, start = load_lane_level(
                spatial_shapes, level_start_index, lane, sweep, L, K
            )
            strides = load_row_strides(spatial_shapes, sweep, PIXEL_STRIDE, L, K, THIN)
            if COUNT:
                level_bin = load_bin(bins, level)
            query = tl.where(sweep == 0, query + 2 * WARPS, query)
        else:
            query += 2 * WARPS
        if ITERATIONS * PASSES > 1:
            place, offset, weight = load_sample(
                places,
                offsets,
                weights,
                tl.minimum(query, last_query),
                head,
                level,
                point,
                OFFSET_STRIDE,
                WEIGHT_HEADS,
                L,
                K,
                REFERENCE,
            )

        share_top = attention * weight_top
        share_bottom = attention * weight_bottom
        sums = add_samples(sums, value, pixels, row_strides, share_top, share_bottom, weight_left, weight_right, lane)
        if step % PASSES == PASSES - 1:
            store_sums(output + done_query * (M * D), sums, lane, done_query < num_queries)
            sums = empty
