"""The same gradient of value in every run: records in order, windows added in order.

Which records a bucket holds does not depend on the run, but their order does: atomics hand out the places. Sorted by
`sort_kernel`, they are the same, and so are the sums that `reduce` makes of a bucket. Windows are added in four
launches, one for each colour: tiles of a colour have windows that do not meet, so that a pixel gets at most one sum of
each colour, and always in the order of the colours.

    0 1 0 1
    2 3 2 3      colour of a tile = row % 2 * 2 + column % 2; windows reach over into the next row and column
    0 1 0 1

A split tile would take as long as all its buckets one after the other. So a launch before stores their windows, as
parts, which the tile adds up in order. Their number has a bound, `buckets.bound_split_buckets`, and they are made for
some items and heads at a time, which stay below `PART_BYTES`.
"""

import triton
import triton.language as tl

from msda_op.triton.hopper.buckets import count_buckets, split_bucket_program

NUM_COLOURS = 4

# Most memory for parts of more than one item and head.
PART_BYTES = 64 * 2**20

# Above every record: a record's query is never alone with 15 set bits of y, which stays below 9 * 2048.
LAST_RECORD = tl.constexpr(0x7FFFFFFFFFFFFFFF)


@triton.jit
def sort_block(records, size, BLOCK: tl.constexpr):
    """Sorts up to BLOCK records."""
    element = tl.arange(0, BLOCK)
    mask = element < size
    block = tl.load(records + element, mask=mask, other=LAST_RECORD)
    tl.store(records + element, tl.sort(block), mask=mask)


@triton.jit
def sort_run(records, size, BLOCK: tl.constexpr):
    """Sorts a run of records of any size, at least 2.

    Up to BLOCK are sorted at once, in a block of a quarter or half of the size where they fit, which most buckets of
    fine levels do: a quarter takes a sixth of the work. More are sorted by odd-even transposition of half blocks: in
    each round, neighbouring halves are sorted together, from an even half in even rounds and from an odd one in odd
    rounds; as many rounds as halves, and one more that sorts a half left alone by the first, put everything in order.
    """
    HALF: tl.constexpr = BLOCK // 2
    if size <= BLOCK // 4:
        sort_block(records, size, BLOCK // 4)
    elif size <= HALF:
        sort_block(records, size, HALF)
    else:
        rounds = tl.where(size <= BLOCK, 1, (size + HALF - 1) // HALF + 1)
        for turn in range(rounds):
            for first in range(turn % 2 * HALF, size, BLOCK):
                sort_block(records + first, size - first, BLOCK)
            tl.debug_barrier()


@triton.jit(do_not_specialize=["bound", "capacity", "programs"])
def sort_kernel(
    bins,  # [L + 1, 3], see buckets.plan_kernel
    starts,  # [B, M, bound + 1] int32
    records,  # [B, M, capacity] int64, sorted inside each bucket; equal records are the same record
    bound,
    capacity,
    programs,  # of an item and head
    L: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sorts bucket after bucket."""
    plane, first = split_bucket_program(programs)
    starts += plane * (bound + 1)
    records += plane * capacity
    for bucket in range(first, count_buckets(bins, L), programs):
        start = tl.load(starts + bucket)
        size = tl.load(starts + bucket + 1) - start
        if size > 1:
            sort_run(records + start, size, BLOCK)
