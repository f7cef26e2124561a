"""Device functions shared by the kernels: level sizes, pixel coordinates, corner rows.

Legend: B batch, Q queries, S rows of value, M heads, D channels a head, L levels, K points.
Tiles: [BLOCK_Q, BLOCK_K] holds one sample an element, [BLOCK_Q, BLOCK_K, BLOCK_D] its channels.
"""

import triton
import triton.language as tl

# A location at least one level away: lanes past the end of an axis take it and so sample nothing.
OUTSIDE = tl.constexpr(-1.0)


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
def locate(location, size):
    """Returns (lower pixel, fraction towards the upper one, lower is inside, upper is inside) along one axis.

    Pixel i has its centre at coordinate i, so coordinate = location * size - 0.5. The range is tested in floats: NaN,
    infinity and numbers beyond int32 fail the test, and only what passes it is cast to int.
    """
    coordinate = location * size - 0.5
    reachable = (coordinate > -1.0) & (coordinate < size)
    coordinate = tl.where(reachable, coordinate, -2.0)
    lower = tl.floor(coordinate)
    pixel = lower.to(tl.int32)
    return pixel, coordinate - lower, pixel >= 0, (pixel >= -1) & (pixel < size - 1)


@triton.jit
def load_rows(value, offsets, inside, channel_mask):
    """Returns rows [BLOCK_Q, BLOCK_K, BLOCK_D] of one corner in float32, zero outside the level."""
    mask = inside[:, :, None] & channel_mask
    return tl.load(value + offsets, mask=mask, other=0.0).to(tl.float32)
