"""Device functions shared by the kernels: level sizes, samples, pixel coordinates, corner rows.

Legend: B batch, Q queries, S rows of value, M heads, D channels a head, L levels, K points.
Tiles: [BLOCK_Q, BLOCK_K] holds one sample an element, [BLOCK_Q, BLOCK_K, BLOCK_D] its channels.
Conventions, as constants of the compilation: HEAD_MAJOR value is [B, M, S, D] instead of [B, S, M, D]; PAIR_FIRST
locations are [B, 2, Q, M, L, K] instead of [B, Q, M, L, K, 2]; BORDER padding instead of zeros; ALIGN_CORNERS.
"""

import triton
import triton.language as tl


@triton.jit
def split_program_id(num_queries, M: tl.constexpr, BLOCK_Q: tl.constexpr):
    """Returns (batch item as int64, head, queries of the tile); tiles of one head and item run one after the other."""
    tiles = tl.cdiv(num_queries, BLOCK_Q)
    program = tl.program_id(0)
    queries = program % tiles * BLOCK_Q + tl.arange(0, BLOCK_Q)
    head = program // tiles % M
    item = (program // tiles // M).to(tl.int64)
    return item, head, queries


@triton.jit
def load_level(spatial_shapes, level_start_index, level):
    """Returns (h, w, first row) of a level as int32."""
    height = tl.load(spatial_shapes + 2 * level).to(tl.int32)
    width = tl.load(spatial_shapes + 2 * level + 1).to(tl.int32)
    start = tl.load(level_start_index + level).to(tl.int32)
    return height, width, start


@triton.jit
def value_strides(value_length, M: tl.constexpr, D: tl.constexpr, HEAD_MAJOR: tl.constexpr):
    """Returns elements from one row of a batch item's value to the next, and from one head to the next."""
    if HEAD_MAJOR:
        return D, value_length * D
    else:
        return M * D, D


@triton.jit
def pair_strides(num_samples, PAIR_FIRST: tl.constexpr):
    """Returns elements from one sample's (x, y) to the next, and from x to y; `num_samples` are those of an item."""
    if PAIR_FIRST:
        return 1, num_samples
    else:
        return 2, 1


@triton.jit
def load_pairs(pairs, samples, mask, num_samples, PAIR_FIRST: tl.constexpr):
    """Returns x and y of samples in float32; NaN, which samples nothing, where the mask is off."""
    sample_stride, axis_stride = pair_strides(num_samples, PAIR_FIRST)
    x = tl.load(pairs + samples * sample_stride, mask=mask, other=float("nan")).to(tl.float32)
    y = tl.load(pairs + samples * sample_stride + axis_stride, mask=mask, other=float("nan")).to(tl.float32)
    return x, y


@triton.jit
def store_pairs(pairs, samples, mask, x, y, num_samples, PAIR_FIRST: tl.constexpr):
    """Stores x and y where `load_pairs` finds them."""
    sample_stride, axis_stride = pair_strides(num_samples, PAIR_FIRST)
    tl.store(pairs + samples * sample_stride, x.to(pairs.dtype.element_ty), mask=mask)
    tl.store(pairs + samples * sample_stride + axis_stride, y.to(pairs.dtype.element_ty), mask=mask)


@triton.jit
def locate(location, size, BORDER: tl.constexpr, ALIGN_CORNERS: tl.constexpr):
    """Returns where locations lie along one axis.

    Pixel i has its centre at coordinate i. Zero padding: the range is tested in floats; NaN, infinity and numbers
    beyond int32 fail the test, and only what passes it is cast to int. Border padding: coordinates are moved into
    0..size - 1, and NaN fails.

    Returns:
        Lower pixel, fraction towards the upper one, lower is inside, upper is inside, d coordinate / d location.
    """
    if ALIGN_CORNERS:
        slope = (size - 1).to(tl.float32)
        coordinate = location * slope
    else:
        slope = size.to(tl.float32)
        coordinate = location * slope - 0.5
    if BORDER:
        last = (size - 1).to(tl.float32)
        reachable = coordinate == coordinate
        slope = tl.where((coordinate > 0) & (coordinate < last), slope, 0.0)
        coordinate = tl.minimum(tl.maximum(coordinate, 0.0), last)
    else:
        reachable = (coordinate > -1.0) & (coordinate < size)
    coordinate = tl.where(reachable, coordinate, -2.0)
    lower = tl.floor(coordinate)
    pixel = lower.to(tl.int32)
    return pixel, coordinate - lower, pixel >= 0, (pixel >= -1) & (pixel < size - 1), slope


@triton.jit
def load_rows(value, offsets, inside, channel_mask):
    """Returns rows [BLOCK_Q, BLOCK_K, BLOCK_D] of one corner in float32, zero outside the level."""
    mask = inside[:, :, None] & channel_mask
    return tl.load(value + offsets, mask=mask, other=0.0).to(tl.float32)
