"""Forward kernel of the Hopper path.

Legend: B batch, Q queries, S rows of value, M heads, D channels a head, L levels, K points.
One program computes 32 channels of one head of 2 * WARPS * ITERATIONS queries. Nothing is atomic.

Lanes hold samples (see `samples`) until the pixels are read. Reading, they stand like this:

    gather lane:   bit 4      bit 3             bit 2                bits 1-0
                   query      parity of point   left/right pixel     16-byte chunk of the 64-byte row

so that 8 neighbouring lanes read the left and the right pixel of one sample: 128 bytes in a row where heads come
first (BNLC), which the L1 cache serves at once. One step takes two points of two queries: an LDG.128 for the upper
row of pixels and one for the lower. The weights travel as pairs (upper, lower) of float16. At the end lanes that
differ in bits 2 and 3 hold parts of the same sums; they exchange and keep two channels each.
"""

import triton
import triton.language as tl

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
def add_and_halve(keeps_second, first, second, distance: tl.constexpr):
    """Adds over two lanes at `distance`: one gets the sum of `first`, the one that `keeps_second` that of `second`."""
    return tl.where(keeps_second, second, first) + shuffle_xor(tl.where(keeps_second, first, second), distance)


@triton.jit(do_not_specialize=["num_queries", "batch_stride", "head_stride"])
def forward_kernel(
    value,  # [B, S, M, D] or [B, M, S, D] by its strides; bfloat16 or float16
    levels,  # [L, 3] (h, w, first row) int32
    places,  # [B, Q, M, L, K, 2] (x, y) locations, or [B, Q, L, REFERENCE] reference points, float32
    offsets,  # [B, Q, M, L, K, 2] (x, y); None for locations
    weights,  # [B, Q, M, L, K] attention weights, or logits
    output,  # [B, Q, M, D], dtype of value
    num_queries,
    batch_stride,
    head_stride,
    PIXEL_STRIDE: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    L: tl.constexpr,
    K: tl.constexpr,
    REFERENCE: tl.constexpr,
    WARPS: tl.constexpr,
    ITERATIONS: tl.constexpr,
):
    dtype: tl.constexpr = value.dtype.element_ty
    CHUNKS: tl.constexpr = D // 32
    PASSES: tl.constexpr = (L * ((K + 3) // 4) + 3) // 4
    item, head_chunk, first_query = split_program_id(num_queries, M * CHUNKS, 2 * WARPS * ITERATIONS)
    head = head_chunk // CHUNKS
    thread = tl.arange(0, 32 * WARPS)
    lane = thread & 31
    right = (lane >> 2) & 1
    parity = (lane >> 3) & 1
    channel = head_chunk % CHUNKS * 32 + (lane & 3) * 8
    on_right = right != 0
    on_odd = parity != 0
    in_second_half = (lane & 2) != 0
    pixel_source = (lane & 16) + parity
    weight_source = (lane & 16) + right * 2 + parity

    value += item * batch_stride + head * head_stride + (right * PIXEL_STRIDE + channel)
    samples = item * num_queries * (M * L * K)
    if REFERENCE == 0:
        places += 2 * samples
        offsets = places
    else:
        places += item * num_queries * (L * REFERENCE)
        offsets += 2 * samples
    offset_dtype: tl.constexpr = offsets.dtype.element_ty
    weights += samples
    output += item * num_queries * (M * D) + head * D + (channel + right * 4 + parity * 2)

    level, point, exists, height, width, start = load_lane_level(levels, lane, 0, L, K)
    strides = load_row_strides(levels, 0, PIXEL_STRIDE, L, K)
    query = first_query + (thread >> 5) * 2 + (lane >> 4)
    last_query = num_queries - 1
    place, offset, weight = load_sample(
        places, offsets, weights, tl.minimum(query, last_query), head, level, point, M, L, K, REFERENCE
    )
    zero = lane * 0.0
    sums = (zero, zero, zero, zero, zero, zero, zero, zero)
    for step in range(ITERATIONS * PASSES):
        x, y = place_sample(place, offset, height, width, offset_dtype, K, REFERENCE)
        attention = weight.to(tl.float32)
        if REFERENCE != 0:
            attention = softmax_of_query(attention, exists)
        attention = tl.where(exists, attention, 0.0)
        left, _, weight_left, weight_right = weigh_pixels(x, width)
        top, _, weight_top, weight_bottom = weigh_pixels(y, height)
        pixel, turned = place_block(left, top, width, start)
        pixels = pixel * PIXEL_STRIDE
        weight_left, weight_right = turn_block(turned, weight_left, weight_right)
        row_strides = strides
        done_query = query
        # The next sample is on its way while this one is summed.
        if PASSES > 1:
            sweep = (step + 1) % PASSES
            level, point, exists, height, width, start = load_lane_level(levels, lane, sweep, L, K)
            strides = load_row_strides(levels, sweep, PIXEL_STRIDE, L, K)
            query = tl.where(sweep == 0, query + 2 * WARPS, query)
        else:
            query += 2 * WARPS
        if ITERATIONS * PASSES > 1:
            place, offset, weight = load_sample(
                places, offsets, weights, tl.minimum(query, last_query), head, level, point, M, L, K, REFERENCE
            )

        # Weights to their lanes: of a quad, lanes 0-1 keep the left pixels and lanes 2-3 the right ones; `even` holds
        # points 0 and 1, `odd` points 2 and 3.
        share_top = attention * weight_top
        share_bottom = attention * weight_bottom
        pair_left = pack_halves(share_top * weight_left, share_bottom * weight_left, tl.float16)
        pair_right = pack_halves(share_top * weight_right, share_bottom * weight_right, tl.float16)
        received = shuffle_xor(tl.where(in_second_half, pair_left, pair_right), 2)
        even = tl.where(in_second_half, received, pair_left)
        odd = tl.where(in_second_half, pair_right, received)
        for quad in tl.static_range(0, 4, 2):
            # Eight loads leave before the first of them is used.
            rows0 = load_rows(value, pixels, pixel_source + 4 * quad, row_strides[quad])
            rows1 = load_rows(value, pixels, pixel_source + 4 * quad + 2, row_strides[quad])
            rows2 = load_rows(value, pixels, pixel_source + 4 * quad + 4, row_strides[quad + 1])
            rows3 = load_rows(value, pixels, pixel_source + 4 * quad + 6, row_strides[quad + 1])
            sums = add_rows(sums, rows0, shuffle(even, weight_source + 4 * quad), dtype)
            sums = add_rows(sums, rows1, shuffle(odd, weight_source + 4 * quad), dtype)
            sums = add_rows(sums, rows2, shuffle(even, weight_source + 4 * quad + 4), dtype)
            sums = add_rows(sums, rows3, shuffle(odd, weight_source + 4 * quad + 4), dtype)

        if step % PASSES == PASSES - 1:
            half0 = add_and_halve(on_right, sums[0], sums[4], 4)
            half1 = add_and_halve(on_right, sums[1], sums[5], 4)
            half2 = add_and_halve(on_right, sums[2], sums[6], 4)
            half3 = add_and_halve(on_right, sums[3], sums[7], 4)
            low = add_and_halve(on_odd, half0, half2, 8)
            high = add_and_halve(on_odd, half1, half3, 8)
            target = (output + done_query * (M * D)).to(tl.pointer_type(tl.int32), bitcast=True)
            tl.store(target, pack_halves(low, high, dtype), mask=done_query < num_queries)
            sums = (zero, zero, zero, zero, zero, zero, zero, zero)
