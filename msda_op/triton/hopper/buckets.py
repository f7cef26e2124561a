"""Buckets: where the samples wait that the reduction turns into the gradient of value.

Legend: B batch, Q queries, S rows of value, M heads, D channels a head, L levels, K points.

Each level is cut into tiles of 3 x 7 pixels. A sample belongs to the tile that holds its upper left pixel (`left`,
`top` of `samples.weigh_pixels`), so that its four pixels lie in the tile's window of 4 x 8 pixels. A tile that
expects many samples is split into a power of two of buckets, by query. The buckets of an item and head are numbered
through:

    bucket = first bucket of the level + (row of tile * tiles in a row + column of tile) * splits + query // 2 % splits

Sizes of levels are known on the device alone, and so the plan is made there, by `plan_kernel`, and equal for all items
and heads. The host knows S, and with it a bound: a level of one column has a tile for three pixels, every other level
fewer. Tables are allocated for the bound; grids are sized for levels of ordinary shape, and their programs take one
bucket after the other where there are more.

Sizes of buckets are exact: samples are counted, the counts summed up to starts, and only then records written, so that
the Q * L * K records of an item and head hold any distribution. The counter of a bucket has a 32-byte sector for
itself, since adds that return to one sector wait for each other. Where levels of freak shape have more buckets than
there are sectors, counters share them, see `find_counter`.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from msda_op.triton.hopper.primitives import count_bits, lowest_bit, match_any
from msda_op.triton.hopper.samples import (
    load_extent,
    load_lane_level,
    load_sample,
    place_sample,
    split_program_id,
    weigh_pixels,
)

TILE_H = tl.constexpr(3)
TILE_W = tl.constexpr(7)
WINDOW_H = tl.constexpr(4)
WINDOW_W = tl.constexpr(8)
SECTOR = tl.constexpr(8)  # int32 of 32 bytes
WINDOW_FIELDS = tl.constexpr(7)  # numbers of a row of `windows`, see `plan_kernel`

# Samples that an even spread may bring to a bucket: fewer cost more windows to flush, more leave the card without
# enough programs. Tiles that expect more are halved until none does.
BUCKET_LIMIT = 768

# Pixels of a tile at levels of ordinary shape: 3 * 7, less for tiles that reach over the edge.
_ORDINARY_TILE = 18


def bound_buckets(value_length: int, num_levels: int, num_samples: int) -> int:
    """Returns the most buckets that an item and head can have, whatever the shapes of its levels.

    ceil((h - 1) / 3) * ceil((w - 1) / 7) is at most h * w / 3 + 1, and a tile that is split has fewer than twice the
    buckets that its samples fill.

    Args:
        value_length: S; the levels do not overlap.
        num_levels: L.
        num_samples: Q * L * K.
    """
    return value_length // 3 + num_levels + 2 * num_samples // BUCKET_LIMIT


def bound_split_buckets(num_samples: int) -> int:
    """Returns the most buckets of split tiles that an item and head can have, by the second argument above."""
    return 2 * num_samples // BUCKET_LIMIT


def expect_buckets(value_length: int, num_levels: int, num_samples: int) -> int:
    """Returns about how many buckets an item and head have at levels of ordinary shape; arguments as above."""
    return value_length // _ORDINARY_TILE + num_levels + num_samples // BUCKET_LIMIT


class BucketSizes(NamedTuple):
    """What the host knows of the buckets of an item and head.

    Args:
        bound: rows of the tables.
        programs: in the kernels that take buckets.
        sector_bits: binary logarithm of the number of sectors for counters.
    """

    bound: int
    programs: int
    sector_bits: int


def size_buckets(value_length: int, num_levels: int, num_samples: int) -> BucketSizes:
    """Returns them; arguments as above."""
    sizes = (value_length, num_levels, num_samples)
    bound, expected = bound_buckets(*sizes), expect_buckets(*sizes)
    return BucketSizes(bound, expected, (max(-(-bound // SECTOR.value), expected) - 1).bit_length())


@triton.jit
def plan_level(height, width, level_samples, LIMIT: tl.constexpr):
    """Returns (rows of tiles, tiles in a row, buckets of a tile) of a level.

    The tiles hold every upper left pixel of a 2 x 2 block: rows 0 .. h - 2 and columns 0 .. w - 2, and 0 where there
    is no second row or column.
    """
    rows = tl.maximum(tl.cdiv(height - 1, TILE_H), 1)
    columns = tl.maximum(tl.cdiv(width - 1, TILE_W), 1)
    splits = tl.cdiv(tl.cdiv(level_samples, rows * columns), LIMIT)
    exponent = ((splits - 1).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 126  # bits of splits - 1; 0 has none
    return rows, columns, 1 << tl.maximum(exponent, 0)


@triton.jit
def split_bucket_program(programs):
    """Returns (plane, first bucket) of a program; each plane (item and head) has `programs`, which take turns."""
    program = tl.program_id(0)
    return (program // programs).to(tl.int64), program % programs


@triton.jit(do_not_specialize=["level_samples", "bound", "sector_bits", "programs"])
def plan_kernel(
    spatial_shapes,  # [L, 2] (h, w) int32 or int64
    level_start_index,  # [L] first row of value, int32 or int64
    bins,  # [L + 1, 3] int32, written: (tiles in a row, splits - 1, first bucket); the last row ends the last level
    windows,  # [bound, WINDOW_FIELDS] int32, written, see below
    counters,  # [B, M, 2^sector_bits, SECTOR] int32, zeroed where they count
    level_samples,  # Q * K, samples of an item and head on one level
    bound,
    sector_bits,
    programs,  # of a plane
    L: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Plans the buckets of an item and head. All programs zero counters; those of the first plane write the tables.

    The row of a bucket: first row of value of its window, w of the level, columns and rows of the level from there,
    colour of the tile, buckets of the tile (0 behind the first of them), and its number among the buckets of split
    tiles (-1 where the tile is not split). Tiles of one colour (row % 2 * 2 + column % 2) have windows that do not
    meet.
    """
    plane, first_block = split_bucket_program(programs)
    total = 0
    for level in tl.static_range(L):
        height, width = load_extent(spatial_shapes, level)
        rows, columns, splits = plan_level(height, width, level_samples, LIMIT)
        if tl.program_id(0) == 0:
            tl.store(bins + level * 3, columns)
            tl.store(bins + level * 3 + 1, splits - 1)
            tl.store(bins + level * 3 + 2, total)
        total += rows * columns * splits
    tl.device_assert(total <= bound, "levels must not overlap in value")
    if tl.program_id(0) == 0:
        tl.store(bins + L * 3 + 2, total)
    counters += plane * (SECTOR << sector_bits)
    for block in range(first_block * BLOCK, total, programs * BLOCK):
        bucket = block + tl.arange(0, BLOCK)
        tl.store(counters + find_counter(bucket, sector_bits), bucket * 0, mask=bucket < total)
        if plane == 0:
            first = 0
            first_split = 0
            for level in tl.static_range(L):
                height, width = load_extent(spatial_shapes, level)
                rows, columns, splits = plan_level(height, width, level_samples, LIMIT)
                end = first + rows * columns * splits
                tile = (bucket - first) // splits
                tile_y = tile // columns
                tile_x = tile % columns
                top = tile_y * TILE_H
                left = tile_x * TILE_W
                start = tl.load(level_start_index + level).to(tl.int32)
                mask = (bucket >= first) & (bucket < end)
                row = windows + bucket * WINDOW_FIELDS
                tl.store(row, start + top * width + left, mask=mask)
                tl.store(row + 1, tl.broadcast_to(width, [BLOCK]), mask=mask)
                tl.store(row + 2, width - left, mask=mask)
                tl.store(row + 3, height - top, mask=mask)
                tl.store(row + 4, tile_y % 2 * 2 + tile_x % 2, mask=mask)
                tl.store(row + 5, tl.where((bucket - first) % splits == 0, splits, 0), mask=mask)
                tl.store(row + 6, tl.where(splits > 1, first_split + bucket - first, -1), mask=mask)
                first_split += tl.where(splits > 1, end - first, 0)
                first = end


@triton.jit
def load_bin(bins, level):
    """Returns the row of `bins` of the lane's level."""
    row = bins + level * 3
    return tl.load(row), tl.load(row + 1), tl.load(row + 2)


@triton.jit
def find_counter(bucket, sector_bits):
    """Returns the place of a bucket's counter among 2^sector_bits sectors: the first of each, then the second, ..."""
    return (bucket & ((1 << sector_bits) - 1)) * SECTOR + (bucket >> sector_bits)


@triton.jit
def count_buckets(bins, L: tl.constexpr):
    """Returns the number of buckets of an item and head."""
    return tl.load(bins + L * 3 + 2)


@triton.jit
def find_bucket(left, top, query, level_bin):
    """Returns (bucket, first column of its tile, first row) of samples at (left, top); all but the bucket as float."""
    tiles_in_row, split_mask, first_bucket = level_bin
    tile_x = left.to(tl.int32) // TILE_W
    tile_y = top.to(tl.int32) // TILE_H
    tile = tile_y * tiles_in_row + tile_x
    bucket = first_bucket + tile * (split_mask + 1) + ((query >> 1) & split_mask)
    return bucket, (tile_x * TILE_W).to(tl.float32), (tile_y * TILE_H).to(tl.float32)


@triton.jit
def join_buckets(bucket, joins):
    """Groups the lanes of a warp by bucket: returns (first lane of the group, rank in it, size of it).

    Lanes that do not join form a group of their own.
    """
    group = match_any(tl.where(joins, bucket, -1))
    lane = tl.arange(0, bucket.shape[0]) & 31
    return lowest_bit(group), count_bits(group & ((1 << lane) - 1)), count_bits(group)


@triton.jit
def count_sample(counters, left, top, weights_x, weights_y, query, exists, num_queries, level_bin, sector_bits, lane):
    """Counts the samples of a warp at (left, top) in their buckets, those that weigh anything."""
    joins = exists & (query < num_queries) & (weights_x > 0) & (weights_y > 0)
    bucket, _, _ = find_bucket(left, top, query, level_bin)
    leader, _, size = join_buckets(bucket, joins)
    tl.atomic_add(counters + find_counter(bucket, sector_bits), size, mask=joins & (lane == leader), sem="relaxed")


@triton.jit(do_not_specialize=["num_queries", "sector_bits"])
def count_kernel(
    spatial_shapes,  # [L, 2] (h, w) int32 or int64
    level_start_index,  # [L]; not used
    bins,  # [L + 1, 3], see plan_kernel
    places,  # [B, Q, M, L, K, 2] locations, or [B, Q, L, REFERENCE] reference points, float32
    offsets,  # [B, Q, M, L, K, 2], rows of a query OFFSET_STRIDE apart; None for locations
    weights,  # [B, Q, M, L, K]; not used
    counters,  # [B, M, 2^sector_bits, SECTOR] int32, see there; they count the samples
    num_queries,
    sector_bits,
    M: tl.constexpr,
    L: tl.constexpr,
    K: tl.constexpr,
    OFFSET_STRIDE: tl.constexpr,
    WEIGHT_HEADS: tl.constexpr,
    REFERENCE: tl.constexpr,
    THIN: tl.constexpr,
    WARPS: tl.constexpr,
    ITERATIONS: tl.constexpr,
):
    PASSES: tl.constexpr = (L * ((K + 3) // 4) + 3) // 4
    item, head, first_query = split_program_id(num_queries, M, 2 * WARPS * ITERATIONS)
    thread = tl.arange(0, 32 * WARPS)
    lane = thread & 31
    first_row = item * num_queries
    if REFERENCE == 0:
        places += first_row * OFFSET_STRIDE
        offsets = places
    else:
        places += first_row * (L * REFERENCE)
        offsets += first_row * OFFSET_STRIDE
    offset_dtype: tl.constexpr = offsets.dtype.element_ty
    weights += first_row * (WEIGHT_HEADS * L * K)
    counters += (item * M + head) * (SECTOR << sector_bits)
    for sweep in tl.static_range(PASSES):
        level, point, exists, height, width, _ = load_lane_level(spatial_shapes, level_start_index, lane, sweep, L, K)
        level_bin = load_bin(bins, level)
        for iteration in tl.static_range(ITERATIONS):
            query = first_query + (iteration * WARPS + (thread >> 5)) * 2 + (lane >> 4)
            row = tl.minimum(query, num_queries - 1)
            place, offset, _ = load_sample(
                places, offsets, weights, row, head, level, point, OFFSET_STRIDE, WEIGHT_HEADS, L, K, REFERENCE
            )
            x, y = place_sample(place, offset, height, width, offset_dtype, K, REFERENCE)
            left, _, weight_left, weight_right = weigh_pixels(x, width, THIN)
            top, _, weight_top, weight_bottom = weigh_pixels(y, height, THIN)
            weights_x, weights_y = weight_left + weight_right, weight_top + weight_bottom
            count_sample(
                counters, left, top, weights_x, weights_y, query, exists, num_queries, level_bin, sector_bits, lane
            )


@triton.jit(do_not_specialize=["bound", "sector_bits"])
def scan_kernel(
    bins,  # [L + 1, 3], see plan_kernel
    counters,  # [B, M, 2^sector_bits, SECTOR] int32, see there; sizes of the buckets, turned into starts
    starts,  # [B, M, bound + 1] int32, written: the same, which stay while records raise the counters, and the end
    bound,
    sector_bits,
    L: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Exclusive sums of the bucket sizes of one item and head."""
    counters += tl.program_id(0).to(tl.int64) * (SECTOR << sector_bits)
    starts += tl.program_id(0).to(tl.int64) * (bound + 1)
    num_buckets = count_buckets(bins, L)
    total = 0
    for first in range(0, num_buckets, BLOCK):
        bucket = first + tl.arange(0, BLOCK)
        mask = bucket < num_buckets
        counter = counters + find_counter(bucket, sector_bits)
        size = tl.load(counter, mask=mask, other=0)
        start = total + tl.cumsum(size, 0) - size
        tl.store(starts + bucket, start, mask=mask)
        tl.store(counter, start, mask=mask)
        total += tl.sum(size, 0)
    tl.store(starts + num_buckets, total)


@triton.jit(do_not_specialize=["bound", "sector_bits"])
def seat_kernel(
    bins,  # [L + 1, 3], see plan_kernel
    counters,  # [B, M, 2^sector_bits, SECTOR] int32, see there; written
    starts,  # [B, M, bound + 1] int32, see scan_kernel
    bound,
    sector_bits,
    L: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sets the counters of an item and head to the starts that an earlier scan has left."""
    counters += tl.program_id(0).to(tl.int64) * (SECTOR << sector_bits)
    starts += tl.program_id(0).to(tl.int64) * (bound + 1)
    num_buckets = count_buckets(bins, L)
    for first in range(0, num_buckets, BLOCK):
        bucket = first + tl.arange(0, BLOCK)
        mask = bucket < num_buckets
        tl.store(counters + find_counter(bucket, sector_bits), tl.load(starts + bucket, mask=mask), mask=mask)
