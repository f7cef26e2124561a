"""Sum over the rows of a matrix, [R, C] -> [C]: two launches of one kernel.

A program adds every n-th block of BLOCK_R rows up, n programs to a tile of BLOCK_C columns, in float32; the second
launch adds the n sums up. Nothing is atomic. Importing this module imports Triton.

The matrix may be the gradient of a linear layer whose result was cleared or rectified in place: what reaches the layer
of it is written on the way, where PyTorch would write it first and read it again to sum it.
"""

# mypy: disallow-untyped-defs=False

from typing import Any

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
def row_sum_kernel(
    rows,
    padding_mask,
    activated,
    scale,
    passed,
    sums,
    num_rows,
    num_columns,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Writes the sums of a program's rows, a row of [n, C]; and the rows as they were summed, unless `passed` is None.

    Rows of padding count as zeros, and so does what has no positive element in `activated`, whose scale the rest gets;
    either may be None.
    """
    tiles_of_row = tl.cdiv(num_columns, BLOCK_C)
    program = tl.program_id(0) // tiles_of_row
    columns = tl.program_id(0) % tiles_of_row * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = columns < num_columns
    total = tl.zeros([BLOCK_R, BLOCK_C], dtype=tl.float32)
    for start in range(program * BLOCK_R, num_rows, tl.num_programs(0) // tiles_of_row * BLOCK_R):
        places = start + tl.arange(0, BLOCK_R).to(tl.int64)
        mask = (places < num_rows)[:, None] & inside[None, :]
        elements = places[:, None] * num_columns + columns[None, :]
        values = tl.load(rows + elements, mask=mask, other=0.0).to(tl.float32)
        if activated is not None:
            values = tl.where(tl.load(activated + elements, mask=mask, other=0.0) > 0, values * scale, 0.0)
        if padding_mask is not None:
            padding = tl.load(padding_mask + places, mask=places < num_rows, other=0) != 0
            values = tl.where(padding[:, None], 0.0, values)
        if passed is not None:
            tl.store(passed + elements, values.to(passed.dtype.element_ty), mask=mask)
        total += values
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
    return _sum_rows(matrix.contiguous(), {})


def sum_passed_rows(
    gradient: Tensor, padding_mask: Tensor | None, activated: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Takes a gradient back through what was done to a matrix in place, and adds its rows up.

    Args:
        gradient: float32, float16 or bfloat16 [R, C], of the matrix as it was left.
        padding_mask: bool [R], True = a row that was cleared; None where none was.
        activated: the same dtype as the gradient [R, C], the matrix as it was left by ReLU and dropout; None where it
            was neither.
        scale: what dropout has multiplied by.

    Returns:
        The gradient of the matrix as it was before, [R, C], and the sum of its rows, [C]; dtypes of the gradient.

    Notes:
        As `sum_rows`.
    """
    gradient = gradient.contiguous()
    passed = torch.empty_like(gradient)
    mask = None if padding_mask is None else padding_mask.contiguous()
    return passed, _sum_rows(gradient, {"padding_mask": mask, "activated": activated, "scale": scale, "passed": passed})


def add_partial_sums(partial_sums: Tensor, like: Tensor) -> Tensor:
    """Adds a few rows up by one launch, in a fixed order: float32 [n, C] to [C] in the dtype of a tensor beside it."""
    sums = like.new_empty((1, partial_sums.shape[1]))
    _launch(partial_sums, sums, like, {})
    return sums[0]


def _sum_rows(matrix: Tensor, options: dict[str, Any]) -> Tensor:
    num_tiles = triton.cdiv(matrix.shape[1], _TILE_COLUMNS)
    num_sums = max(1, min(triton.cdiv(matrix.shape[0], _rows_of_tile(matrix)), _MAX_PROGRAMS // num_tiles))
    partial_sums = matrix.new_empty((num_sums, matrix.shape[1]), dtype=torch.float32)
    _launch(matrix, partial_sums, matrix, options)
    return add_partial_sums(partial_sums, matrix)


def _rows_of_tile(matrix: Tensor) -> int:
    return _TILE_BYTES // (_TILE_COLUMNS * matrix.element_size())


def _launch(rows: Tensor, sums: Tensor, device_of: Tensor, options: dict[str, Any]) -> None:
    arguments = {
        "rows": rows,
        "padding_mask": None,
        "activated": None,
        "scale": 1.0,
        "passed": None,
        "sums": sums,
        "num_rows": rows.shape[0],
        "num_columns": rows.shape[1],
        "BLOCK_R": _rows_of_tile(rows),
        "BLOCK_C": _TILE_COLUMNS,
        **options,
    }
    num_programs = sums.shape[0] * triton.cdiv(rows.shape[1], _TILE_COLUMNS)
    Launch(row_sum_kernel, num_programs, arguments, _NUM_WARPS).run(device_of)
