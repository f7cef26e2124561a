"""Dot products of the pixels of samples with the upstream gradient, which the gradients of locations and weights need.

Legend: Q queries, M heads, D channels a head.
Lanes hold samples (see `samples`) until the pixels are read. Reading, they stand like this, one query after the other:

    gather lane:   bits 4-3          bit 2                bits 1-0
                   point of a quad   left/right pixel     t: 16-byte chunk of the 64-byte row
                   `--------- g = lane >> 2 --------'

A chunk is four registers of two channels, and as they come from memory they are an A operand of mma.m16n8k16:
registers 0 and 2 are row g, registers 1 and 3 row g + 8. So the B operand holds the upstream gradient of chunk t,
registers 0 and 2 in even columns and 1 and 3 in odd ones, and c0 + c3 of the result is the dot product of the pixel g
with the gradient, over all 32 channels, in every t. Lane t keeps that of quad t, and two shuffles bring each row's
pair home to its sample lane.

Rows of float32 have eight chunks. Their dot products are ordinary multiplications, exact to float32:

    gather lane:   bit 4              bit 3                bits 2-0
                   point of a pair    left/right pixel     16-byte chunk of the 128-byte row

Eight loads of two points each leave eight parts on each lane for the upper and for the lower row of pixels. Eight lanes
of chunks add them up by halving three times, after which lane c of them keeps the sum of load c.
"""

import triton
import triton.language as tl

from msda_op.triton.hopper.forward import add_and_halve, load_rows
from msda_op.triton.hopper.primitives import load_words4, multiply_matrices, shuffle


@triton.jit
def dot_rows(rows, b0, b1, sums, dtype: tl.constexpr):
    """Adds products of an upper and a lower row of pixels with the gradient to a pair of C operands."""
    upper, lower = rows
    c, d = sums
    return (
        multiply_matrices(upper[0], upper[1], upper[2], upper[3], b0, b1, c[0], c[1], c[2], c[3], dtype),
        multiply_matrices(lower[0], lower[1], lower[2], lower[3], b0, b1, d[0], d[1], d[2], d[3], dtype),
    )


@triton.jit
def pick_quad(t, sums0, sums1, sums2, sums3, row: tl.constexpr):
    """Returns on lane t the dot product (c0 + c3) of quad t, of the upper (0) or lower (1) row of pixels."""
    dot0 = sums0[row][0] + sums0[row][3]
    dot1 = sums1[row][0] + sums1[row][3]
    dot2 = sums2[row][0] + sums2[row][3]
    dot3 = sums3[row][0] + sums3[row][3]
    return tl.where(t < 2, tl.where(t == 0, dot0, dot1), tl.where(t == 2, dot2, dot3))


@triton.jit
def dot_query(
    value, grad_output, pixels, row_strides, lane, QUERY: tl.constexpr, CHUNKS: tl.constexpr, dtype: tl.constexpr
):
    """Returns the dot products of the four pixels of each sample of query 0 or 1 with its gradient.

    In order upper left, upper right, lower left, lower right, on the lanes 0-15 and again on 16-31.
    """
    if dtype == tl.float32:
        return dot_float_query(value, grad_output, pixels, row_strides, lane, QUERY, CHUNKS)
    zero = lane * 0.0
    empty = (zero, zero, zero, zero)
    sums0 = (empty, empty)
    sums1 = (empty, empty)
    sums2 = (empty, empty)
    sums3 = (empty, empty)
    source = QUERY * 16 + (lane >> 3)
    for chunk in tl.static_range(CHUNKS):
        gradient = (grad_output + 32 * chunk).to(tl.pointer_type(tl.int32), bitcast=True)
        b0 = tl.load(gradient)
        b1 = tl.load(gradient + 2)
        rows0 = load_rows(value + 32 * chunk, pixels, source, row_strides[0])
        rows1 = load_rows(value + 32 * chunk, pixels, source + 4, row_strides[1])
        rows2 = load_rows(value + 32 * chunk, pixels, source + 8, row_strides[2])
        rows3 = load_rows(value + 32 * chunk, pixels, source + 12, row_strides[3])
        sums0 = dot_rows(rows0, b0, b1, sums0, dtype)
        sums1 = dot_rows(rows1, b0, b1, sums1, dtype)
        sums2 = dot_rows(rows2, b0, b1, sums2, dtype)
        sums3 = dot_rows(rows3, b0, b1, sums3, dtype)
    upper = pick_quad(lane & 3, sums0, sums1, sums2, sums3, 0)
    lower = pick_quad(lane & 3, sums0, sums1, sums2, sums3, 1)
    home = (lane & 3) * 8 + ((lane >> 2) & 3)
    return shuffle(upper, home), shuffle(upper, home + 4), shuffle(lower, home), shuffle(lower, home + 4)


@triton.jit
def dot_float_rows(rows, gradient, upper_sum, lower_sum):
    """Adds products of four channels of an upper and a lower row of pixels with those of the gradient."""
    upper, lower = rows
    for channel in tl.static_range(4):
        upper_sum += upper[channel].to(tl.float32, bitcast=True) * gradient[channel].to(tl.float32, bitcast=True)
        lower_sum += lower[channel].to(tl.float32, bitcast=True) * gradient[channel].to(tl.float32, bitcast=True)
    return upper_sum, lower_sum


@triton.jit
def add_parts(lane, part0, part1, part2, part3, part4, part5, part6, part7):
    """Adds each part over eight neighbouring lanes; lane c of them gets the sum of part c."""
    on_bit2 = (lane & 4) != 0
    on_bit1 = (lane & 2) != 0
    half0 = add_and_halve(on_bit2, part0, part4, 4)
    half1 = add_and_halve(on_bit2, part1, part5, 4)
    half2 = add_and_halve(on_bit2, part2, part6, 4)
    half3 = add_and_halve(on_bit2, part3, part7, 4)
    quarter0 = add_and_halve(on_bit1, half0, half2, 2)
    quarter1 = add_and_halve(on_bit1, half1, half3, 2)
    return add_and_halve((lane & 1) != 0, quarter0, quarter1, 1)


@triton.jit
def dot_float_query(value, grad_output, pixels, row_strides, lane, QUERY: tl.constexpr, CHUNKS: tl.constexpr):
    """Returns what `dot_query` returns, for rows of float32."""
    zero = lane * 0.0
    upper0, upper1, upper2, upper3, upper4, upper5, upper6, upper7 = (zero,) * 8
    lower0, lower1, lower2, lower3, lower4, lower5, lower6, lower7 = (zero,) * 8
    source = QUERY * 16 + (lane >> 4)
    for chunk in tl.static_range(CHUNKS):
        gradient = load_words4(grad_output + 32 * chunk)
        rows0 = load_rows(value + 32 * chunk, pixels, source, row_strides[0])
        rows1 = load_rows(value + 32 * chunk, pixels, source + 2, row_strides[0])
        rows2 = load_rows(value + 32 * chunk, pixels, source + 4, row_strides[1])
        rows3 = load_rows(value + 32 * chunk, pixels, source + 6, row_strides[1])
        rows4 = load_rows(value + 32 * chunk, pixels, source + 8, row_strides[2])
        rows5 = load_rows(value + 32 * chunk, pixels, source + 10, row_strides[2])
        rows6 = load_rows(value + 32 * chunk, pixels, source + 12, row_strides[3])
        rows7 = load_rows(value + 32 * chunk, pixels, source + 14, row_strides[3])
        upper0, lower0 = dot_float_rows(rows0, gradient, upper0, lower0)
        upper1, lower1 = dot_float_rows(rows1, gradient, upper1, lower1)
        upper2, lower2 = dot_float_rows(rows2, gradient, upper2, lower2)
        upper3, lower3 = dot_float_rows(rows3, gradient, upper3, lower3)
        upper4, lower4 = dot_float_rows(rows4, gradient, upper4, lower4)
        upper5, lower5 = dot_float_rows(rows5, gradient, upper5, lower5)
        upper6, lower6 = dot_float_rows(rows6, gradient, upper6, lower6)
        upper7, lower7 = dot_float_rows(rows7, gradient, upper7, lower7)
    upper = add_parts(lane, upper0, upper1, upper2, upper3, upper4, upper5, upper6, upper7)
    lower = add_parts(lane, lower0, lower1, lower2, lower3, lower4, lower5, lower6, lower7)
    home = ((lane >> 1) & 7) + (lane & 1) * 16
    return shuffle(upper, home), shuffle(upper, home + 8), shuffle(lower, home), shuffle(lower, home + 8)
