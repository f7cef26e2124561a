"""The same gradient of value in every run: records in order, windows added up in order.

Legend: B batch, Q queries, S rows of value, M heads, D channels a head, L levels. Which records a bucket holds does
not depend on the run, but their order does: atomics hand out the places. Sorted, they are the same, and so are the
sums that `reduce` makes of them. It then stores its windows instead of adding them to the gradient, and
`combine_kernel` adds, pixel by pixel, those that hold the pixel.
"""

import triton
import triton.language as tl

from msda_op.triton.hopper.buckets import COUNTER_STRIDE, TILE_H, TILE_W, WINDOW_H, WINDOW_W

# Above every record: a record's query is never alone with 15 set bits of y, which stays below 9 * 2048.
LAST_RECORD = tl.constexpr(0x7FFFFFFFFFFFFFFF)


@triton.jit(do_not_specialize=["num_buckets", "capacity"])
def sort_kernel(
    counters,  # [B, M, num_buckets, COUNTER_STRIDE] int32; the first of each is the end of the bucket
    starts,  # [B, M, num_buckets] int32
    records,  # [B, M, capacity] int64, sorted inside each bucket; equal records are the same record
    num_buckets,
    capacity,
    BLOCK: tl.constexpr,
):
    """One program sorts one bucket of any size.

    A record alone is in order; up to BLOCK are sorted at once. More are sorted by odd-even transposition of half
    blocks: in each round, neighbouring halves are sorted together, from an even half in even rounds and from an odd
    one in odd rounds; as many rounds as halves, and one more that sorts a half left alone by the first, put
    everything in order.
    """
    bucket = tl.program_id(0)
    start = tl.load(starts + bucket)
    size = tl.load(counters + bucket.to(tl.int64) * COUNTER_STRIDE) - start
    records += (bucket // num_buckets).to(tl.int64) * capacity + start
    HALF: tl.constexpr = BLOCK // 2
    halves = (size + HALF - 1) // HALF
    rounds = tl.where(size <= BLOCK, (size > 1).to(tl.int32), halves + 1)
    element = tl.arange(0, BLOCK)
    for turn in range(rounds):
        for first in range(turn % 2 * HALF, size, BLOCK):
            mask = first + element < size
            block = tl.load(records + first + element, mask=mask, other=LAST_RECORD)
            tl.store(records + first + element, tl.sort(block), mask=mask)
        tl.debug_barrier()


@triton.jit
def add_windows(sums, windows, tile_y, tile_x, y, x, mask, level_bin, num_buckets, channels, D: tl.constexpr):
    """Adds pixels (y, x) of the windows of one tile each, split by split."""
    tiles_in_row, split_mask, first_bucket = level_bin
    row = y - tile_y * TILE_H
    column = x - tile_x * TILE_W
    holds = mask & (tile_y >= 0) & (tile_x >= 0) & (tile_x < tiles_in_row) & (row < WINDOW_H) & (column < WINDOW_W)
    first = first_bucket + (tile_y * tiles_in_row + tile_x) * (split_mask + 1)
    for split in range(split_mask + 1):
        pixel = ((first + split) * WINDOW_H + row) * WINDOW_W + column
        sums += tl.load(windows + pixel[:, None].to(tl.int64) * D + channels[None, :], mask=holds[:, None], other=0.0)
    return sums


@triton.jit(do_not_specialize=["num_buckets", "batch_stride", "head_stride"])
def combine_kernel(
    levels,  # [L, 3] (h, w, first row) int32
    bins,  # [L, 3], see BucketPlan
    windows,  # [B, M, num_buckets, 4, 8, D] float32
    grad_value,  # like value, by its strides
    num_buckets,
    batch_stride,
    head_stride,
    PIXEL_STRIDE: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    L: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program writes BLOCK pixels of one level of one item and head: sums of the windows of at most four tiles."""
    plane = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0)
    # The level that holds this block; blocks do not cross levels.
    level = 0
    for candidate in tl.static_range(L - 1):
        blocks = tl.cdiv(tl.load(levels + candidate * 3) * tl.load(levels + candidate * 3 + 1), BLOCK)
        passed = (level == candidate) & (block >= blocks)
        block = tl.where(passed, block - blocks, block)
        level = tl.where(passed, candidate + 1, level)
    height = tl.load(levels + level * 3)
    width = tl.load(levels + level * 3 + 1)
    start = tl.load(levels + level * 3 + 2)
    level_bin = (tl.load(bins + level * 3), tl.load(bins + level * 3 + 1), tl.load(bins + level * 3 + 2))

    pixel = block * BLOCK + tl.arange(0, BLOCK)
    mask = pixel < height * width
    y = pixel // width
    x = pixel % width
    channels = tl.arange(0, D)
    windows += plane * num_buckets * (WINDOW_H * WINDOW_W * D)
    last_tile_y = (height - 2) // TILE_H
    sums = tl.zeros([BLOCK, D], tl.float32)
    for up in tl.static_range(2):
        tile_y = y // TILE_H - up
        in_rows = mask & (tile_y <= last_tile_y)
        for back in tl.static_range(2):
            tile_x = x // TILE_W - back
            sums = add_windows(sums, windows, tile_y, tile_x, y, x, in_rows, level_bin, num_buckets, channels, D)
    grad_value += plane // M * batch_stride + plane % M * head_stride
    target = grad_value + (start + pixel)[:, None] * PIXEL_STRIDE + channels[None, :]
    tl.store(target, sums.to(grad_value.dtype.element_ty), mask=mask[:, None])
