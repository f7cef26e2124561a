"""Sum over the rows of a matrix, [R, C] -> [C]: two launches of one kernel.

A program adds every n-th block of BLOCK_R rows up, n programs to a tile of BLOCK_C columns, in float32; the second
launch adds the n sums up. Nothing is atomic. Importing this module imports Triton.
"""

# mypy: disallow-untyped-defs=False

import torch
import triton
import triton.language as tl
from torch import Tensor

from msda_op.triton.kernel_launch import Launch

# Of a tile: its bytes, four loads of 16 bytes a lane; and its columns, whole cache lines of every dtype.
_TILE_BYTES = 16384
_TILE_COLUMNS = 64
_NUM_WARPS = 8
_MAX_PROGRAMS = 512


@triton.jit
def row_sum_kernel(rows, sums, num_rows, num_columns, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """Writes the sums of a program's rows, a row of [n, C]."""
    tiles_of_row = tl.cdiv(num_columns, BLOCK_C)
    program = tl.program_id(0) // tiles_of_row
    columns = tl.program_id(0) % tiles_of_row * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = columns < num_columns
    total = tl.zeros([BLOCK_R, BLOCK_C], dtype=tl.float32)
    for start in range(program * BLOCK_R, num_rows, tl.num_programs(0) // tiles_of_row * BLOCK_R):
        places = start + tl.arange(0, BLOCK_R).to(tl.int64)
        mask = (places < num_rows)[:, None] & inside[None, :]
        total += tl.load(rows + places[:, None] * num_columns + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    sums += program * num_columns
    tl.store(sums + columns, tl.sum(total, axis=0).to(sums.dtype.element_ty), mask=inside)


def sum_rows(matrix: Tensor) -> Tensor:
    """Adds the rows of a matrix up.

    Args:
        matrix: float32, float16 or bfloat16 [R, C], R at least 1.

    Returns:
        the same dtype [C], rounded once.

    Notes:
        Not differentiable. Deterministic: sums have a fixed order.
    """
    matrix = matrix.contiguous()
    num_tiles = triton.cdiv(matrix.shape[1], _TILE_COLUMNS)
    num_sums = max(1, min(triton.cdiv(matrix.shape[0], _rows_of_tile(matrix)), _MAX_PROGRAMS // num_tiles))
    partial_sums = matrix.new_empty((num_sums, matrix.shape[1]), dtype=torch.float32)
    sums = matrix.new_empty((1, matrix.shape[1]))
    _launch(matrix, partial_sums)
    _launch(partial_sums, sums)
    return sums[0]


def _rows_of_tile(matrix: Tensor) -> int:
    return _TILE_BYTES // (_TILE_COLUMNS * matrix.element_size())


def _launch(rows: Tensor, sums: Tensor) -> None:
    arguments = {
        "rows": rows,
        "sums": sums,
        "num_rows": rows.shape[0],
        "num_columns": rows.shape[1],
        "BLOCK_R": _rows_of_tile(rows),
        "BLOCK_C": _TILE_COLUMNS,
    }
    num_programs = sums.shape[0] * triton.cdiv(rows.shape[1], _TILE_COLUMNS)
    Launch(row_sum_kernel, num_programs, arguments, _NUM_WARPS).run(rows)
