"""Samples: which lane holds which, where it lies, and the four pixels it takes.

Legend: B batch, Q queries, S rows of value, M heads, D channels a head, L levels, K points.

A warp holds the samples of two queries of one head, one sample a lane, so that each coordinate is computed once:

    sample lane:   bit 4      bits 3-2          bits 1-0
                   query      quad of points    point of the quad

A *quad* is four points of one level: K points fill QUADS = ceil(K / 4) quads, padded with lanes that sample nothing.
One pass holds four quads: L = K = 4 takes one pass in which quad = level; larger products L * K take more.

Branch-free bilinear sampling: the 2 x 2 block of pixels at (left, top) is clamped into the level, and the weight of a
pixel is the hat function of its distance, max(0, 1 - |distance|) along each axis. Pixels that the sample does not
reach get weight 0 by themselves, and so do all four of a sample outside, or at NaN or infinity (max(NaN, 0) is 0).

THIN says that levels may have a single row or column, of which the second of the block has weight 0. The lower row is
then the upper one once more; a second column would be the pixel after, which the last level does not have, so that the
block moves back by one pixel instead, and `turn_block` exchanges the columns. Needs S >= 3: the first pixel of value
cannot move. Without THIN all this costs nothing.
"""

import triton
import triton.language as tl

from msda_op.triton.hopper.primitives import load_words2, load_words4, shuffle_xor

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def split_program_id(num_queries, HEADS: tl.constexpr, QUERIES: tl.constexpr, LAST_FIRST: tl.constexpr = False):
    """Returns (batch item as int64, head, first query); the heads of a tile of queries run one after the other."""
    program = tl.program_id(0)
    if LAST_FIRST:
        program = tl.num_programs(0) - 1 - program
    tiles = tl.cdiv(num_queries, QUERIES)
    tile = program // HEADS
    return (tile // tiles).to(tl.int64), program % HEADS, tile % tiles * QUERIES


@triton.jit
def load_extent(spatial_shapes, level):
    """Returns (h, w) of a level as int32."""
    row = spatial_shapes + level * 2
    return tl.load(row).to(tl.int32), tl.load(row + 1).to(tl.int32)


@triton.jit
def load_lane_level(spatial_shapes, level_start_index, lane, sweep, L: tl.constexpr, K: tl.constexpr):
    """Returns (level, point, whether it exists, h, w, first row of the level) of the lane's sample in pass `sweep`."""
    QUADS: tl.constexpr = (K + 3) // 4
    quad = sweep * 4 + ((lane >> 2) & 3)
    level = quad // QUADS
    point = quad % QUADS * 4 + (lane & 3)
    exists = (level < L) & (point < K)
    level = tl.minimum(level, L - 1)
    height, width = load_extent(spatial_shapes, level)
    start = tl.load(level_start_index + level).to(tl.int32)
    return level, tl.minimum(point, K - 1), exists, height.to(tl.float32), width.to(tl.float32), start


@triton.jit
def load_row_stride(
    spatial_shapes, quad, PIXEL_STRIDE: tl.constexpr, L: tl.constexpr, K: tl.constexpr, THIN: tl.constexpr
):
    """Returns the elements from the upper to the lower row of blocks of a quad; 0 in a level of one row."""
    height, width = load_extent(spatial_shapes, tl.minimum(quad // ((K + 3) // 4), L - 1))
    row_stride = width * PIXEL_STRIDE
    return tl.where(height > 1, row_stride, 0) if THIN else row_stride


@triton.jit
def load_row_strides(
    spatial_shapes, sweep, PIXEL_STRIDE: tl.constexpr, L: tl.constexpr, K: tl.constexpr, THIN: tl.constexpr
):
    """Returns `load_row_stride` of the four quads of pass `sweep`."""
    return (
        load_row_stride(spatial_shapes, sweep * 4, PIXEL_STRIDE, L, K, THIN),
        load_row_stride(spatial_shapes, sweep * 4 + 1, PIXEL_STRIDE, L, K, THIN),
        load_row_stride(spatial_shapes, sweep * 4 + 2, PIXEL_STRIDE, L, K, THIN),
        load_row_stride(spatial_shapes, sweep * 4 + 3, PIXEL_STRIDE, L, K, THIN),
    )


@triton.jit
def unpack_halves(pair, dtype: tl.constexpr):
    """Returns (lower, upper) half of an int32 as float32."""
    if dtype == tl.bfloat16:
        return (pair << 16).to(tl.float32, bitcast=True), (pair & -65536).to(tl.float32, bitcast=True)
    else:
        low = pair.to(tl.int16).to(tl.float16, bitcast=True)
        high = (pair >> 16).to(tl.int16).to(tl.float16, bitcast=True)
        return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def load_pair(pointer):
    """Returns the registers of two neighbouring numbers: a packed pair, twice, of halves; two words of float32."""
    if pointer.dtype.element_ty == tl.float32:
        return load_words2(pointer)
    else:
        pair = tl.load(pointer.to(tl.pointer_type(tl.int32), bitcast=True))
        return pair, pair


@triton.jit
def widen_pair(registers, dtype: tl.constexpr):
    """Returns the two numbers of `load_pair` as float32."""
    if dtype == tl.float32:
        return registers[0].to(tl.float32, bitcast=True), registers[1].to(tl.float32, bitcast=True)
    else:
        return unpack_halves(registers[0], dtype)


@triton.jit
def place_pair(score, query, PAIR_STRIDE: tl.constexpr, SCORE_STRIDE: tl.constexpr):
    """Returns the place of a sample's pair of numbers, given that of its single one, in rows that far apart.

    Where pairs lie as densely as single numbers, that is twice the place, and nothing else stays in registers.
    """
    return 2 * score + query * (PAIR_STRIDE - 2 * SCORE_STRIDE)


@triton.jit
def load_sample(
    places,
    offsets,
    weights,
    query,
    head,
    level,
    point,
    OFFSET_STRIDE: tl.constexpr,
    WEIGHT_HEADS: tl.constexpr,
    L: tl.constexpr,
    K: tl.constexpr,
    REFERENCE: tl.constexpr,
):
    """Returns the registers of a sample as they come from memory: (place, offset, weight).

    REFERENCE 0: `places` are sampling locations and `weights` attention weights; 2 or 4: `places` are reference points
    or boxes, `weights` logits, and offsets are read too. From query to query there are OFFSET_STRIDE elements of
    locations or offsets, and WEIGHT_HEADS heads of L * K weights.
    """
    score = ((query * WEIGHT_HEADS + head) * L + level) * K + point
    pair = place_pair(score, query, OFFSET_STRIDE, WEIGHT_HEADS * L * K)
    weight = tl.load(weights + score)
    if REFERENCE == 0:
        place = load_words2(places + pair)
        return place, place, weight
    elif REFERENCE == 2:
        return load_words2(places + 2 * (query * L + level)), load_pair(offsets + pair), weight
    else:
        return load_words4(places + 4 * (query * L + level)), load_pair(offsets + pair), weight


@triton.jit
def place_sample(place, offset, height, width, offset_dtype: tl.constexpr, K: tl.constexpr, REFERENCE: tl.constexpr):
    """Returns the pixel coordinates (x, y) of a sample, pixel i having its centre at i.

    Spelled with explicit fused multiply-adds: the pass that counts the samples of a bucket and the pass that fills it
    must agree to the last bit, which a compiler free to contract would not promise.
    """
    x = place[0].to(tl.float32, bitcast=True)
    y = place[1].to(tl.float32, bitcast=True)
    if REFERENCE == 0:
        return tl.fma(x, width, -0.5), tl.fma(y, height, -0.5)
    else:
        right, down = widen_pair(offset, offset_dtype)
        if REFERENCE == 2:
            return tl.fma(x, width, -0.5) + right, tl.fma(y, height, -0.5) + down
        else:
            scale_x = place[2].to(tl.float32, bitcast=True) * (0.5 / K)
            scale_y = place[3].to(tl.float32, bitcast=True) * (0.5 / K)
            return tl.fma(tl.fma(right, scale_x, x), width, -0.5), tl.fma(tl.fma(down, scale_y, y), height, -0.5)


@triton.jit
def sum_of_query(x):
    """Returns the sum of `x` over the 16 sample lanes of a query."""
    x += shuffle_xor(x, 8)
    x += shuffle_xor(x, 4)
    x += shuffle_xor(x, 2)
    return x + shuffle_xor(x, 1)


@triton.jit
def softmax_of_query(logit, exists):
    """Returns the softmax over the 16 sample lanes of a query, 0 where no sample exists."""
    scaled = tl.where(exists, logit * LOG2_E, -float("inf"))
    peak = tl.maximum(scaled, shuffle_xor(scaled, 8))
    peak = tl.maximum(peak, shuffle_xor(peak, 4))
    peak = tl.maximum(peak, shuffle_xor(peak, 2))
    peak = tl.maximum(peak, shuffle_xor(peak, 1))
    power = tl.exp2(scaled - peak)
    return power / sum_of_query(power)


@triton.jit
def weigh_pixels(coordinate, size, THIN: tl.constexpr):
    """Returns (lower pixel as float, distance from it, weight of it, weight of the next one) along one axis.

    The lower pixel is never negative, whatever the size: Inductor tries kernels on tables that are full of zeros.
    """
    lower = tl.maximum(tl.minimum(tl.floor(coordinate), size - 2), 0.0)
    step = 1.0  # to the next pixel; out of reach where there is none
    if THIN:
        step = tl.where(size > 1, 1.0, float("inf"))
    distance = coordinate - lower
    return lower, distance, tl.maximum(1 - tl.abs(distance), 0.0), tl.maximum(1 - tl.abs(distance - step), 0.0)


@triton.jit
def place_block(left, top, width, start, THIN: tl.constexpr):
    """Returns (row of value of the upper left pixel of a block, whether it moved back by one)."""
    pixel = start + (top * width + left).to(tl.int32)
    turned = width == 1
    if THIN:
        turned &= pixel > 0
        pixel -= turned.to(tl.int32)
    return pixel, turned


@triton.jit
def turn_block(turned, left, right, THIN: tl.constexpr):
    """Returns what belongs to the left and the right column; `right` is 0 where the block moved back."""
    if THIN:
        return tl.where(turned, right, left), tl.where(turned, left, right)
    else:
        return left, right


@triton.jit
def slope_weights(distance, size, THIN: tl.constexpr):
    """Returns the derivatives of the two weights of `weigh_pixels` by the coordinate.

    At kinks they are those from the right, as `floor` has them; a sample exactly one pixel before the first has none.
    """
    between = (distance >= 0) & (distance < 1)
    lower = tl.where(between, -1.0, tl.where((distance > -1) & (distance < 0), 1.0, 0.0))
    upper = tl.where(between, 1.0, tl.where((distance >= 1) & (distance < 2), -1.0, 0.0))
    return lower, tl.where(size > 1, upper, 0.0) if THIN else upper
