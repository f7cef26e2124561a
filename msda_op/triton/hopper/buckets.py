"""Buckets: where the samples wait that the reduction turns into the gradient of value.

Legend: B batch, Q queries, S rows of value, M heads, D channels a head, L levels, K points.

Each level is cut into tiles of 3 x 7 pixels. A sample belongs to the tile that holds its upper left pixel (`left`,
`top` of `samples.weigh_pixels`), so that its four pixels lie in the tile's window of 4 x 8 pixels. A tile that
expects many samples is split into a power of two of buckets, by query. The buckets of an item and head are numbered
through:

    bucket = first bucket of the level + (row of tile * tiles in a row + column of tile) * splits + query // 2 % splits

Sizes are exact: samples are counted, the counts summed up to starts, and only then records written, so that the Q * L
* K records of an item and head hold any distribution. The counter of a bucket has a 32-byte sector for itself, since
adds that return to one sector wait for each other.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from msda_op.levels import HostShapes, level_starts
from msda_op.triton.hopper.primitives import count_bits, lowest_bit, match_any
from msda_op.triton.hopper.samples import load_lane_level, load_sample, place_sample, split_program_id, weigh_pixels

TILE_H = tl.constexpr(3)
TILE_W = tl.constexpr(7)
WINDOW_H = tl.constexpr(4)
WINDOW_W = tl.constexpr(8)
COUNTER_STRIDE = tl.constexpr(8)  # int32 from a counter to the next: one 32-byte sector

# Samples that a bucket should hold: fewer cost more windows to flush, more leave the card without enough programs.
BUCKET_TARGET = 512


class BucketPlan(NamedTuple):
    """The buckets of one item and head; equal for all of them.

    Args:
        num_buckets: buckets of an item and head. bins: `[L, 3]` int32 (tiles in a row, splits - 1, first bucket).
        windows: `[num_buckets, 4]` int32 (first row of value, w of the level, columns and rows of the level from
        there).
    """

    num_buckets: int
    bins: Tensor
    windows: Tensor


def count_tiles(height: int, width: int) -> tuple[int, int]:
    """Returns the rows and columns of tiles that hold every upper left pixel (0..h-2, 0..w-2) of a level."""
    return -(-(height - 1) // TILE_H.value), -(-(width - 1) // TILE_W.value)


def choose_splits(spatial_shapes: HostShapes, num_queries: int, num_points: int) -> tuple[int, ...]:
    """Returns the buckets of a tile of each level: the power of two that brings an even spread near the target."""
    splits = []
    for height, width in spatial_shapes:
        rows, columns = count_tiles(height, width)
        samples_of_tile = num_queries * num_points / (rows * columns)
        split = 1
        while samples_of_tile > 1.5 * split * BUCKET_TARGET:
            split *= 2
        splits.append(split)
    return tuple(splits)


@lru_cache(maxsize=256)
def plan_buckets(spatial_shapes: HostShapes, splits: tuple[int, ...], device: torch.device) -> BucketPlan:
    """Returns the tables of `BucketPlan` on `device`; copied once per (shapes, splits, device) and kept."""
    bins: list[tuple[int, int, int]] = []
    windows: list[tuple[int, int, int, int]] = []
    for (height, width), start, split in zip(spatial_shapes, level_starts(spatial_shapes), splits, strict=True):
        rows, columns = count_tiles(height, width)
        bins.append((columns, split - 1, len(windows)))
        for top in range(0, rows * TILE_H.value, TILE_H.value):
            for left in range(0, columns * TILE_W.value, TILE_W.value):
                windows += [(start + top * width + left, width, width - left, height - top)] * split
    with torch.inference_mode(False):
        return BucketPlan(
            len(windows),
            torch.tensor(bins, dtype=torch.int32, device=device),
            torch.tensor(windows, dtype=torch.int32, device=device),
        )


@triton.jit
def load_bin(bins, level):
    """Returns the row of BucketPlan.bins of the lane's level."""
    row = bins + level * 3
    return tl.load(row), tl.load(row + 1), tl.load(row + 2)


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


@triton.jit(do_not_specialize=["num_queries", "num_buckets"])
def count_kernel(
    levels,  # [L, 3] (h, w, first row) int32
    bins,  # [L, 3], see BucketPlan
    places,  # [B, Q, M, L, K, 2] locations, or [B, Q, L, REFERENCE] reference points, float32
    offsets,  # [B, Q, M, L, K, 2]; None for locations
    weights,  # [B, Q, M, L, K]; not used
    counters,  # [B, M, num_buckets, COUNTER_STRIDE] int32, zeroed; the first of each counts the samples
    num_queries,
    num_buckets,
    M: tl.constexpr,
    L: tl.constexpr,
    K: tl.constexpr,
    REFERENCE: tl.constexpr,
    WARPS: tl.constexpr,
    ITERATIONS: tl.constexpr,
):
    PASSES: tl.constexpr = (L * ((K + 3) // 4) + 3) // 4
    item, head, first_query = split_program_id(num_queries, M, 2 * WARPS * ITERATIONS)
    thread = tl.arange(0, 32 * WARPS)
    lane = thread & 31
    samples = item * num_queries * (M * L * K)
    if REFERENCE == 0:
        places += 2 * samples
        offsets = places
    else:
        places += item * num_queries * (L * REFERENCE)
        offsets += 2 * samples
    offset_dtype: tl.constexpr = offsets.dtype.element_ty
    weights += samples
    counters += (item * M + head) * num_buckets * COUNTER_STRIDE
    for sweep in tl.static_range(PASSES):
        level, point, exists, height, width, _ = load_lane_level(levels, lane, sweep, L, K)
        level_bin = load_bin(bins, level)
        for iteration in tl.static_range(ITERATIONS):
            query = first_query + (iteration * WARPS + (thread >> 5)) * 2 + (lane >> 4)
            row = tl.minimum(query, num_queries - 1)
            place, offset, _ = load_sample(places, offsets, weights, row, head, level, point, M, L, K, REFERENCE)
            x, y = place_sample(place, offset, height, width, offset_dtype, K, REFERENCE)
            left, _, weight_left, weight_right = weigh_pixels(x, width)
            top, _, weight_top, weight_bottom = weigh_pixels(y, height)
            joins = exists & (query < num_queries) & (weight_left + weight_right > 0) & (weight_top + weight_bottom > 0)
            bucket, _, _ = find_bucket(left, top, query, level_bin)
            leader, _, size = join_buckets(bucket, joins)
            tl.atomic_add(counters + bucket * COUNTER_STRIDE, size, mask=joins & (lane == leader), sem="relaxed")


@triton.jit(do_not_specialize=["num_buckets"])
def scan_kernel(
    counters,  # [B, M, num_buckets, COUNTER_STRIDE] int32; sizes of the buckets, turned into starts
    starts,  # [B, M, num_buckets] int32; the same starts, which stay while records raise the counters
    num_buckets,
    BLOCK: tl.constexpr,
):
    """Exclusive sums of the bucket sizes of one item and head."""
    counters += tl.program_id(0).to(tl.int64) * num_buckets * COUNTER_STRIDE
    starts += tl.program_id(0).to(tl.int64) * num_buckets
    total = 0
    for first in range(0, num_buckets, BLOCK):
        bucket = first + tl.arange(0, BLOCK)
        mask = bucket < num_buckets
        size = tl.load(counters + bucket * COUNTER_STRIDE, mask=mask, other=0)
        start = total + tl.cumsum(size, 0) - size
        tl.store(starts + bucket, start, mask=mask)
        tl.store(counters + bucket * COUNTER_STRIDE, start, mask=mask)
        total += tl.sum(size, 0)
