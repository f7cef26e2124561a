"""Windows of records in float32, on the tensor cores, in products of three parts.

Legend as in `reduce`. The tensor cores take the first 11 bits of a float32 (tf32). So W and the upstream gradient G are
split into a high part, their first 11 bits, and the rest, of which 11 of 13 bits count, and

    W G = W_high G_high + W_high G_low + W_low G_high

leaves out W_low G_low and the last 2 bits of each rest: at most 2^-22 of a product each, less than the roundings of the
float32 sums they are added to.

    lane 4g + t    in W: column g of the window, records t and t + 4 of eight
                   as B operand: channels 4g .. 4g + 3, one in each n-block, of records t and t + 4
                   in the sums: column g of the window, channels 8t + j and 8t + 4 + j in n-block j
    lane 8i + c    as gather lane: 16-byte chunk c of the gradient row of record i of four

The eight lanes of a row read its 128 bytes at once; one shuffle a register turns gather lanes into those of B.
"""

import triton
import triton.language as tl

from msda_op.triton.hopper.primitives import load_words4, multiply_tensor_floats, shuffle


@triton.jit
def split_tensor_float(x):
    """Returns the bits of the first 11 bits of a float32, and those of the rest."""
    high = x.to(tl.int32, bitcast=True) & -8192
    return high, (x - high.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True)


@triton.jit
def load_float_record(records, index, size):
    """Returns the four words of a record: x, y, attention, query; beyond the end the last, with an attention of 0."""
    words = load_words4(records + tl.minimum(index, size - 1) * 4)
    return words[0], words[1], tl.where(index < size, words[2], 0), words[3]


@triton.jit
def load_gradients(gradient_rows, record, lane, QUERY_STRIDE: tl.constexpr):
    """Returns four rows of the gradient, a chunk a gather lane, of the records that lanes t = 0 .. 3 hold."""
    query = shuffle(record[3], lane >> 3)
    return load_words4(gradient_rows + query * QUERY_STRIDE)


@triton.jit
def weigh_float_record(record, g):
    """Returns the weights of a record for pixel g of the four rows of the window."""
    x = record[0].to(tl.float32, bitcast=True) - g.to(tl.float32)
    y = record[1].to(tl.float32, bitcast=True)
    weight = record[2].to(tl.float32, bitcast=True) * tl.maximum(1 - tl.abs(x), 0.0)
    return (
        weight * tl.maximum(1 - tl.abs(y), 0.0),
        weight * tl.maximum(1 - tl.abs(y - 1), 0.0),
        weight * tl.maximum(1 - tl.abs(y - 2), 0.0),
        weight * tl.maximum(1 - tl.abs(y - 3), 0.0),
    )


@triton.jit
def multiply_split(w, b0, b1, sums):
    """Adds eight records to 16 pixels and 8 channels: the two small products first."""
    w0, w1, w2, w3 = w
    s0, s1, s2, s3 = sums
    s0, s1, s2, s3 = multiply_tensor_floats(w0[1], w1[1], w2[1], w3[1], b0[0], b1[0], s0, s1, s2, s3)
    s0, s1, s2, s3 = multiply_tensor_floats(w0[0], w1[0], w2[0], w3[0], b0[1], b1[1], s0, s1, s2, s3)
    return multiply_tensor_floats(w0[0], w1[0], w2[0], w3[0], b0[0], b1[0], s0, s1, s2, s3)


@triton.jit
def add_float_records(early, late, early_rows, late_rows, upper_sums, lower_sums, lane):
    """Adds eight records, of which the lane holds t in `early` and t + 4 in `late`, to the rows of the window."""
    g = lane >> 2
    e0, e1, e2, e3 = weigh_float_record(early, g)
    l0, l1, l2, l3 = weigh_float_record(late, g)
    upper = (split_tensor_float(e0), split_tensor_float(e1), split_tensor_float(l0), split_tensor_float(l1))
    lower = (split_tensor_float(e2), split_tensor_float(e3), split_tensor_float(l2), split_tensor_float(l3))
    source = (lane & 3) * 8 + g
    u0, u1, u2, u3 = upper_sums
    v0, v1, v2, v3 = lower_sums
    b0 = split_tensor_float(shuffle(early_rows[0], source).to(tl.float32, bitcast=True))
    b1 = split_tensor_float(shuffle(late_rows[0], source).to(tl.float32, bitcast=True))
    u0 = multiply_split(upper, b0, b1, u0)
    v0 = multiply_split(lower, b0, b1, v0)
    b0 = split_tensor_float(shuffle(early_rows[1], source).to(tl.float32, bitcast=True))
    b1 = split_tensor_float(shuffle(late_rows[1], source).to(tl.float32, bitcast=True))
    u1 = multiply_split(upper, b0, b1, u1)
    v1 = multiply_split(lower, b0, b1, v1)
    b0 = split_tensor_float(shuffle(early_rows[2], source).to(tl.float32, bitcast=True))
    b1 = split_tensor_float(shuffle(late_rows[2], source).to(tl.float32, bitcast=True))
    u2 = multiply_split(upper, b0, b1, u2)
    v2 = multiply_split(lower, b0, b1, v2)
    b0 = split_tensor_float(shuffle(early_rows[3], source).to(tl.float32, bitcast=True))
    b1 = split_tensor_float(shuffle(late_rows[3], source).to(tl.float32, bitcast=True))
    u3 = multiply_split(upper, b0, b1, u3)
    v3 = multiply_split(lower, b0, b1, v3)
    return (u0, u1, u2, u3), (v0, v1, v2, v3)


@triton.jit
def order_channels(sums):
    """Returns sums in the order of `reduce`: channels 8t + 2j, 8t + 2j + 1 in n-block j."""
    s0, s1, s2, s3 = sums
    return (
        (s0[0], s1[0], s0[2], s1[2]),
        (s2[0], s3[0], s2[2], s3[2]),
        (s0[1], s1[1], s0[3], s1[3]),
        (s2[1], s3[1], s2[3], s3[3]),
    )


@triton.jit
def sum_float_records(records, size, grad_output, lane, QUERY_STRIDE: tl.constexpr):
    """Returns the upper and the lower two rows of the window of at least one record."""
    t = lane & 3
    gradient_rows = grad_output + (lane & 7) * 4
    zero = lane * 0.0
    none = (zero, zero, zero, zero)
    upper_sums = (none, none, none, none)
    lower_sums = (none, none, none, none)
    # Rows are one step of eight records ahead of the sums, and records two.
    early = load_float_record(records, t, size)
    late = load_float_record(records, t + 4, size)
    next_early = load_float_record(records, t + 8, size)
    next_late = load_float_record(records, t + 12, size)
    early_rows = load_gradients(gradient_rows, early, lane, QUERY_STRIDE)
    late_rows = load_gradients(gradient_rows, late, lane, QUERY_STRIDE)
    for first in range(0, size, 8):
        next_early_rows = load_gradients(gradient_rows, next_early, lane, QUERY_STRIDE)
        next_late_rows = load_gradients(gradient_rows, next_late, lane, QUERY_STRIDE)
        far_early = load_float_record(records, first + 16 + t, size)
        far_late = load_float_record(records, first + 20 + t, size)
        upper_sums, lower_sums = add_float_records(early, late, early_rows, late_rows, upper_sums, lower_sums, lane)
        early = next_early
        late = next_late
        early_rows = next_early_rows
        late_rows = next_late_rows
        next_early = far_early
        next_late = far_late
    return order_channels(upper_sums), order_channels(lower_sums)
