"""The op reduced to its gather, with switches that spoil it: what coalescing and unrolling are worth.

Legend: Q queries, K rows a query takes, D channels. One program computes output[BLOCK_Q queries, all D channels].
"""

# mypy: disallow-untyped-defs=False

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK_Q = 16


@triton.jit
def add_row(accumulator, table, rows, weights, queries, point, mask, channels, K, row_stride, channel_stride):
    """Returns the accumulator [BLOCK_Q, D] with the weighted row of one point added."""
    row = tl.load(rows + queries * K + point, mask=mask, other=0)
    weight = tl.load(weights + queries * K + point, mask=mask, other=0.0)
    offsets = row[:, None] * row_stride + channels[None, :] * channel_stride
    return accumulator + tl.load(table + offsets, mask=mask[:, None], other=0.0).to(tl.float32) * weight[:, None]


@triton.jit(do_not_specialize=["num_points", "row_stride", "channel_stride"])
def gather_rows_kernel(
    table,  # [S, D], any strides
    rows,  # [Q, K] int32
    weights,  # [Q, K] float32
    output,  # [Q, D] float32
    num_queries,
    num_points,
    row_stride,
    channel_stride,
    K: tl.constexpr,
    D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    CONTIGUOUS: tl.constexpr,  # the compiler knows that channels are neighbours, and may load 16 bytes at once
    UNROLLED: tl.constexpr,  # the loads of all points may be in flight together
):
    queries = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    channels = tl.arange(0, D)
    mask = queries < num_queries
    if CONTIGUOUS:
        row_stride = D
        channel_stride = 1
    accumulator = tl.zeros([BLOCK_Q, D], tl.float32)
    if UNROLLED:
        for point in tl.static_range(K):
            accumulator = add_row(
                accumulator, table, rows, weights, queries, point, mask, channels, K, row_stride, channel_stride
            )
    else:
        for point in range(num_points):
            accumulator = add_row(
                accumulator, table, rows, weights, queries, point, mask, channels, K, row_stride, channel_stride
            )
    tl.store(output + queries[:, None] * D + channels[None, :], accumulator, mask=mask[:, None])


def gather_rows(table: Tensor, rows: Tensor, weights: Tensor, *, contiguous: bool, unrolled: bool) -> Tensor:
    """Returns sum_k weights[q, k] * table[rows[q, k]].

    Args:
        table: `[S, D]`, any strides, D a power of two.
        rows: `[Q, K]` int32, contiguous.
        weights: `[Q, K]` float32, contiguous.
        contiguous: whether the compiler is told that rows are contiguous, which they must be then.
        unrolled: whether the loop over points is unrolled.

    Returns:
        `[Q, D]` float32.
    """
    if contiguous and not table.is_contiguous():
        raise ValueError(f"table must be contiguous where contiguous=True, got strides {table.stride()}; copy it")
    (num_queries, num_points), head_dim = rows.shape, table.shape[1]
    output = torch.empty(num_queries, head_dim, dtype=torch.float32, device=table.device)
    gather_rows_kernel[(triton.cdiv(num_queries, _BLOCK_Q),)](
        table,
        rows,
        weights,
        output,
        num_queries,
        num_points,
        *table.stride(),
        K=num_points,
        D=head_dim,
        BLOCK_Q=_BLOCK_Q,
        CONTIGUOUS=contiguous,
        UNROLLED=unrolled,
        num_warps=1,
    )
    return output
