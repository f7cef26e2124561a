"""Backward kernel of the Hopper path: gradients of locations and weights, and what the gradient of value is made of.

Legend: B batch, Q queries, S rows of value, M heads, D channels a head, L levels, K points.
One program takes one head of 2 * WARPS * ITERATIONS queries.

Lanes hold samples (see `samples`) until the pixels are read, see `dots`.

The gradient of value goes one of two ways, SCATTER:
    "atomics"   eight lanes add the 128-byte row of float32 of one pixel; for few samples.
    "records"   each sample leaves a record in its bucket; `reduce` turns buckets into gradients. What it adds to is
                zeroed here, where memory has time for it.
    "none"      nobody asked for it.
"""

import triton
import triton.language as tl

from msda_op.triton.hopper.buckets import SECTOR, TILE_H, TILE_W, find_bucket, find_counter, join_buckets, load_bin
from msda_op.triton.hopper.dots import dot_query
from msda_op.triton.hopper.primitives import (
    add_floats4,
    load_words2,
    load_words4,
    pack_halves,
    shuffle,
    store_words2,
    store_words4,
)
from msda_op.triton.hopper.samples import (
    load_lane_level,
    load_row_strides,
    load_sample,
    place_block,
    place_pair,
    place_sample,
    slope_weights,
    softmax_of_query,
    split_program_id,
    sum_of_query,
    turn_block,
    unpack_halves,
    weigh_pixels,
)

# A record of halves is two words, (x << 16 | attention as float16, query << 15 | y): x and y are the place in the tile
# plus 1, in units of 1/2048 pixel. Its 17 bits for the query limit Q to 2^17. That of float32 is four: x, y, attention
# as they are, and the query.
RECORD_SCALE = tl.constexpr(2048)


@triton.jit
def make_record(x, y, tile_left, tile_top, attention, query):
    """Returns the two words of a sample's record; rounding must not carry it past the last pixel of the window."""
    column = tl.minimum(((x - tile_left + 1) * RECORD_SCALE + 0.5).to(tl.int32), (TILE_W + 2) * RECORD_SCALE - 1)
    row = tl.minimum(((y - tile_top + 1) * RECORD_SCALE + 0.5).to(tl.int32), (TILE_H + 2) * RECORD_SCALE - 1)
    half = attention.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return (column << 16) | half, (query << 15) | row


@triton.jit
def store_record(records, seat, x, y, tile_left, tile_top, attention, query, mask, dtype: tl.constexpr):
    """Stores a sample's record at its place."""
    if dtype == tl.float32:
        column = (x - tile_left).to(tl.int32, bitcast=True)
        row = (y - tile_top).to(tl.int32, bitcast=True)
        store_words4(records + seat * 4, column, row, attention.to(tl.int32, bitcast=True), query, mask)
    else:
        word0, word1 = make_record(x, y, tile_left, tile_top, attention, query)
        store_words2(records + seat * 2, word0, word1, mask)


@triton.jit
def add_pixels(grad_value, pixels, source, row_stride, weights, gradient, counts, PIXEL_STRIDE: tl.constexpr):
    """Adds four channels of the gradient, times their weights, to the four pixels of the sample on lane `source`."""
    upper = grad_value + shuffle(pixels, source)
    lower = upper + row_stride
    w = shuffle(weights[0], source)
    add_floats4(upper, w * gradient[0], w * gradient[1], w * gradient[2], w * gradient[3], counts & (w != 0))
    w = shuffle(weights[1], source)
    add_floats4(
        upper + PIXEL_STRIDE, w * gradient[0], w * gradient[1], w * gradient[2], w * gradient[3], counts & (w != 0)
    )
    w = shuffle(weights[2], source)
    add_floats4(lower, w * gradient[0], w * gradient[1], w * gradient[2], w * gradient[3], counts & (w != 0))
    w = shuffle(weights[3], source)
    add_floats4(
        lower + PIXEL_STRIDE, w * gradient[0], w * gradient[1], w * gradient[2], w * gradient[3], counts & (w != 0)
    )


@triton.jit
def load_gradient(pointer, dtype: tl.constexpr):
    """Returns four channels of the gradient in float32."""
    if dtype == tl.float32:
        words = load_words4(pointer)
        return (
            words[0].to(tl.float32, bitcast=True),
            words[1].to(tl.float32, bitcast=True),
            words[2].to(tl.float32, bitcast=True),
            words[3].to(tl.float32, bitcast=True),
        )
    else:
        words = load_words2(pointer)
        g0, g1 = unpack_halves(words[0], dtype)
        g2, g3 = unpack_halves(words[1], dtype)
        return g0, g1, g2, g3


@triton.jit
def scatter_query(
    grad_value,
    grad_output,
    pixels,
    row_strides,
    weights,
    counts,
    lane,
    QUERY: tl.constexpr,
    CHUNKS: tl.constexpr,
    PIXEL_STRIDE: tl.constexpr,
    dtype: tl.constexpr,
):
    """Adds the samples of query 0 or 1 to the gradient of value: eight lanes a row, four samples at a time."""
    source = QUERY * 16 + (lane >> 3)
    channel = (lane & 7) * 4
    for chunk in tl.static_range(CHUNKS):
        gradient = load_gradient(grad_output + (32 * chunk + channel), dtype)
        target = grad_value + (32 * chunk + channel)
        for quad in tl.static_range(4):
            add_pixels(target, pixels, source + 4 * quad, row_strides[quad], weights, gradient, counts, PIXEL_STRIDE)


@triton.jit
def store_pair(pointer, x, y, mask):
    """Stores two neighbouring numbers in the dtype of the pointer, halves or float32."""
    if pointer.dtype.element_ty == tl.float32:
        store_words2(pointer, x.to(tl.int32, bitcast=True), y.to(tl.int32, bitcast=True), mask)
    else:
        pair = pack_halves(x, y, pointer.dtype.element_ty)
        tl.store(pointer.to(tl.pointer_type(tl.int32), bitcast=True), pair, mask=mask)


@triton.jit
def zero_rows(grad_value, tile, tiles, value_length, thread, D: tl.constexpr, PIXEL_STRIDE: tl.constexpr):
    """Zeroes one of `tiles` shares of the rows of an item and head."""
    LANES: tl.constexpr = D // 4
    share = tl.cdiv(value_length, tiles)
    zero = thread * 0
    for first in range(0, share, thread.shape[0] // LANES):
        place = first + thread // LANES
        row = tile * share + place
        target = grad_value + row * PIXEL_STRIDE + thread % LANES * 4
        store_words4(target, zero, zero, zero, zero, (place < share) & (row < value_length))


@triton.jit(do_not_specialize=["num_queries", "batch_stride", "head_stride", "sector_bits"])
def backward_kernel(
    value,  # [B, S, M, D] or [B, M, S, D] by its strides; bfloat16, float16 or float32
    spatial_shapes,  # [L, 2] (h, w) int32 or int64
    level_start_index,  # [L] first row of value, int32 or int64
    bins,  # [L + 1, 3], see buckets.plan_kernel; None without records
    places,  # [B, Q, M, L, K, 2] (x, y) locations, or [B, Q, L, REFERENCE] reference points, float32
    offsets,  # [B, Q, M, L, K, 2] (x, y), rows of a query OFFSET_STRIDE apart; None for locations
    weights,  # [B, Q, M, L, K] attention weights, or logits, rows WEIGHT_HEADS * L * K apart
    grad_output,  # [B, Q, M, D], dtype of value
    grad_value,  # like value, float32: atomics add to it, records leave it zeroed; None for neither
    grad_locations,  # [B, Q, M, L, K, 2] float32; None where not asked for
    grad_offsets,  # [B, Q, M, L, K, 2], dtype of offsets; None where not asked for
    grad_weights,  # [B, Q, M, L, K], dtype of weights, with JOINT both in rows of 3*M*L*K; None where not asked for
    counters,  # [B, M, 2^sector_bits, SECTOR] int32, starts raised to ends; None without records
    records,  # [B, M, Q * L * K, 2, or 4 where value is float32] int32; None without records
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
    JOINT: tl.constexpr,
    REFERENCE: tl.constexpr,
    THIN: tl.constexpr,
    SCATTER: tl.constexpr,
    WARPS: tl.constexpr,
    ITERATIONS: tl.constexpr,
):
    dtype: tl.constexpr = value.dtype.element_ty
    ROW_LANES: tl.constexpr = 8 if dtype == tl.float32 else 4
    RECORD_WORDS: tl.constexpr = 4 if dtype == tl.float32 else 2
    CHUNKS: tl.constexpr = D // 32
    PASSES: tl.constexpr = (L * ((K + 3) // 4) + 3) // 4
    NEEDS_DOTS: tl.constexpr = (grad_locations is not None) or (grad_offsets is not None) or (grad_weights is not None)
    # A buffer for atomics was filled with zeros from its start to its end, of which the L2 cache still holds the end.
    item, head, first_query = split_program_id(num_queries, M, 2 * WARPS * ITERATIONS, SCATTER == "atomics")
    thread = tl.arange(0, 32 * WARPS)
    lane = thread & 31
    second = lane >= 16

    plane = item * batch_stride + head * head_stride
    value += plane + ((lane // ROW_LANES) & 1) * PIXEL_STRIDE + lane % ROW_LANES * (32 // ROW_LANES)
    GRAD_HEADS: tl.constexpr = 3 * M if JOINT else M
    GRAD_STRIDE: tl.constexpr = (3 if JOINT else 2) * M * L * K
    first_row = item * num_queries
    if REFERENCE == 0:
        places += first_row * OFFSET_STRIDE
        offsets = places
    else:
        places += first_row * (L * REFERENCE)
        offsets += first_row * OFFSET_STRIDE
    offset_dtype: tl.constexpr = offsets.dtype.element_ty
    weights += first_row * (WEIGHT_HEADS * L * K)
    if grad_locations is not None:
        grad_locations += first_row * GRAD_STRIDE
    if grad_offsets is not None:
        grad_offsets += first_row * GRAD_STRIDE
    if grad_weights is not None:
        grad_weights += first_row * (GRAD_HEADS * L * K)
    if grad_value is not None:
        grad_value += plane
        if SCATTER == "records":
            QUERIES: tl.constexpr = 2 * WARPS * ITERATIONS
            tiles = tl.cdiv(num_queries, QUERIES)
            zero_rows(grad_value, first_query // QUERIES, tiles, batch_stride // (M * D), thread, D, PIXEL_STRIDE)
    grad_output += first_row * (M * D) + head * D
    gradient_chunk = (lane & 7) * 4 if dtype == tl.float32 else (lane & 3) * 8 + ((lane >> 2) & 1) * 2
    if SCATTER == "records":
        counters += (item * M + head) * (SECTOR << sector_bits)
        records += (item * M + head) * num_queries * (L * K * RECORD_WORDS)

    level, point, exists, height, width, start = load_lane_level(spatial_shapes, level_start_index, lane, 0, L, K)
    strides = load_row_strides(spatial_shapes, 0, PIXEL_STRIDE, L, K, THIN)
    if SCATTER == "records":
        level_bin = load_bin(bins, level)
    first_of_pair = first_query + (thread >> 5) * 2
    last_query = num_queries - 1
    place, offset, weight = load_sample(
        places,
        offsets,
        weights,
        tl.minimum(first_of_pair + (lane >> 4), last_query),
        head,
        level,
        point,
        OFFSET_STRIDE,
        WEIGHT_HEADS,
        L,
        K,
        REFERENCE,
    )
    for step in range(ITERATIONS * PASSES):
        x, y = place_sample(place, offset, height, width, offset_dtype, K, REFERENCE)
        attention = weight.to(tl.float32)
        if REFERENCE != 0:
            attention = softmax_of_query(attention, exists)
        attention = tl.where(exists, attention, 0.0)
        left, distance_x, weight_left, weight_right = weigh_pixels(x, width, THIN)
        top, distance_y, weight_top, weight_bottom = weigh_pixels(y, height, THIN)
        pixel, turned = place_block(left, top, width, start, THIN)
        pixels = pixel * PIXEL_STRIDE
        weight_left, weight_right = turn_block(turned, weight_left, weight_right, THIN)
        row_strides = strides
        step_pair = first_of_pair
        query = step_pair + (lane >> 4)
        counts = exists & (query < num_queries)
        score = ((query * GRAD_HEADS + head) * L + level) * K + point
        if SCATTER == "records":
            joins = counts & (weight_left + weight_right > 0) & (weight_top + weight_bottom > 0)
            bucket, tile_left, tile_top = find_bucket(left, top, query, level_bin)
            leader, rank, size = join_buckets(bucket, joins)
            counter = counters + find_counter(bucket, sector_bits)
            seat = tl.atomic_add(counter, size, mask=joins & (lane == leader), sem="relaxed")
        step_height = height
        step_width = width
        step_place = place
        # The next sample is on its way while this one is summed.
        if PASSES > 1:
            sweep = (step + 1) % PASSES
            level, point, exists, height, width, start = load_lane_level(
                spatial_shapes, level_start_index, lane, sweep, L, K
            )
            strides = load_row_strides(spatial_shapes, sweep, PIXEL_STRIDE, L, K, THIN)
            if SCATTER == "records":
                level_bin = load_bin(bins, level)
            first_of_pair = tl.where(sweep == 0, first_of_pair + 2 * WARPS, first_of_pair)
        else:
            first_of_pair += 2 * WARPS
        if ITERATIONS * PASSES > 1:
            next_query = tl.minimum(first_of_pair + (lane >> 4), last_query)
            place, offset, weight = load_sample(
                places, offsets, weights, next_query, head, level, point, OFFSET_STRIDE, WEIGHT_HEADS, L, K, REFERENCE
            )

        if SCATTER == "atomics":
            share_top = attention * weight_top
            share_bottom = attention * weight_bottom
            shares = (
                share_top * weight_left,
                share_top * weight_right,
                share_bottom * weight_left,
                share_bottom * weight_right,
            )
            for pair in tl.static_range(2):
                scatter_query(
                    grad_value,
                    grad_output + tl.minimum(step_pair + pair, last_query) * (M * D),
                    pixels,
                    row_strides,
                    shares,
                    step_pair + pair < num_queries,
                    lane,
                    pair,
                    CHUNKS,
                    PIXEL_STRIDE,
                    dtype,
                )
        if NEEDS_DOTS:
            gradient = grad_output + gradient_chunk
            first = gradient + tl.minimum(step_pair, last_query) * (M * D)
            a00, a01, a10, a11 = dot_query(value, first, pixels, row_strides, lane, 0, CHUNKS, dtype)
            other = gradient + tl.minimum(step_pair + 1, last_query) * (M * D)
            b00, b01, b10, b11 = dot_query(value, other, pixels, row_strides, lane, 1, CHUNKS, dtype)
            dot_00 = tl.where(second, b00, a00)
            dot_01 = tl.where(second, b01, a01)
            dot_10 = tl.where(second, b10, a10)
            dot_11 = tl.where(second, b11, a11)
            dot_left = weight_top * dot_00 + weight_bottom * dot_10
            dot_right = weight_top * dot_01 + weight_bottom * dot_11
            grad_attention = weight_left * dot_left + weight_right * dot_right
            if grad_weights is not None:
                grad_weight = grad_attention
                if REFERENCE != 0:
                    mean = sum_of_query(attention * grad_attention)
                    grad_weight = attention * (grad_attention - mean)
                tl.store(grad_weights + score, grad_weight.to(grad_weights.dtype.element_ty), mask=counts)
            dot_top = weight_left * dot_00 + weight_right * dot_01
            dot_bottom = weight_left * dot_10 + weight_right * dot_11
            slope_left, slope_right = slope_weights(distance_x, step_width, THIN)
            slope_left, slope_right = turn_block(turned, slope_left, slope_right, THIN)
            slope_top, slope_bottom = slope_weights(distance_y, step_height, THIN)
            grad_x = attention * (slope_left * dot_left + slope_right * dot_right)
            grad_y = attention * (slope_top * dot_top + slope_bottom * dot_bottom)
            pair = place_pair(score, query, GRAD_STRIDE, GRAD_HEADS * L * K)
            if grad_locations is not None:
                store_pair(grad_locations + pair, grad_x * step_width, grad_y * step_height, counts)
            if grad_offsets is not None:
                if REFERENCE == 4:
                    grad_x *= step_width * (step_place[2].to(tl.float32, bitcast=True) * (0.5 / K))
                    grad_y *= step_height * (step_place[3].to(tl.float32, bitcast=True) * (0.5 / K))
                store_pair(grad_offsets + pair, grad_x, grad_y, counts)
        if SCATTER == "records":
            seat = shuffle(seat, leader) + rank
            store_record(records, seat, x, y, tile_left, tile_top, attention, query, joins, dtype)
