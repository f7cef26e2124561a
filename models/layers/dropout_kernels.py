"""Which elements dropout keeps, for kernels: a function of a seed and of a place (Philox), to be found again."""

# mypy: disallow-untyped-defs=False

import triton
import triton.language as tl

# Seven rounds of Philox pass the batteries of tests for random numbers; ten are its authors' safety margin.
_ROUNDS = tl.constexpr(7)

STEPS = 1 << 16
"""Probabilities are multiples of 1 / STEPS: a Philox call makes eight numbers of 16 bits."""
MIN_COLUMNS = 8
"""Columns of a block of `keep_mask`, at least."""


def round_probability(probability: float) -> tuple[int, float]:
    """Rounds a probability of dropping, and makes up for what is dropped.

    Args:
        probability: in 0..1 without 1.

    Returns:
        How many of `STEPS` numbers are dropped, at most all but one; and what the kept elements are multiplied by.
    """
    threshold = min(round(probability * STEPS), STEPS - 1)
    return threshold, STEPS / (STEPS - threshold)


@triton.jit
def keep_mask(seed, rows, threshold, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """Draws which of BLOCK_C columns of rows [BLOCK_R] are kept, bool [BLOCK_R, BLOCK_C]; `threshold` of 65536 are not.

    Rows are nonnegative. Eight columns beside one another come from one Philox call.
    """
    columns = tl.arange(0, BLOCK_C // 8)
    counters = (rows[:, None] * (BLOCK_C // 8) + columns[None, :]).to(tl.int32)
    first, second, third, fourth = tl.randint4x(seed, counters, n_rounds=_ROUNDS)
    words = tl.join(tl.join(first, second), tl.join(third, fourth)).to(tl.uint32, bitcast=True)
    numbers = tl.join(words >> 16, words & 0xFFFF).reshape(BLOCK_R, BLOCK_C)
    return numbers.to(tl.int32) >= threshold
