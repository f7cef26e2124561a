"""What follows a linear layer of many rows, done to its result in place: padded rows cleared, or ReLU with dropout.

Importing this module imports Triton.
"""

# mypy: disallow-untyped-defs=False

import triton
import triton.language as tl
from torch import Tensor

from models.layers.dropout_kernels import keep_mask
from msda_op.triton.kernel_launch import Launch

_NUM_WARPS = 4
# Rows of a program that clears, of which most have nothing to be cleared; and columns of a store.
_CLEARED_ROWS = 32
_CLEARED_COLUMNS = 256
# Elements of a program of the activation, four loads of 16 bytes a lane in half precision.
_ACTIVATED_ROWS = 4
_ACTIVATED_COLUMNS = 1024


@triton.jit(do_not_specialize=["num_rows"])
def clear_kernel(rows, padding_mask, num_rows, num_columns, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """Writes zeros into BLOCK_R rows, where they are padding."""
    places = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R).to(tl.int64)
    padding = tl.load(padding_mask + places, mask=places < num_rows, other=0) != 0
    for start in range(0, num_columns, BLOCK_C):
        columns = start + tl.arange(0, BLOCK_C)
        mask = padding[:, None] & (columns < num_columns)[None, :]
        zeros = tl.zeros([BLOCK_R, BLOCK_C], dtype=rows.dtype.element_ty)
        tl.store(rows + places[:, None] * num_columns + columns[None, :], zeros, mask=mask)


@triton.jit
def relu_dropout_kernel(features, seed, num_elements, threshold, scale, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """Replaces BLOCK_R x BLOCK_C elements by dropout(relu(element)); NaN stays, where it is kept."""
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    places = rows.to(tl.int64)[:, None] * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    mask = places < num_elements
    values = tl.load(features + places, mask=mask, other=0.0).to(tl.float32)
    keep = keep_mask(tl.load(seed), rows, threshold, BLOCK_R, BLOCK_C)
    values = tl.where(keep, tl.where(values < 0, 0.0, values) * scale, 0.0)
    tl.store(features + places, values.to(features.dtype.element_ty), mask=mask)


def clear_rows(matrix: Tensor, padding_mask: Tensor) -> None:
    """Fills rows with zeros.

    Args:
        matrix: float [..., C], contiguous.
        padding_mask: bool [...], True = a row to be cleared.
    """
    arguments = {
        "rows": matrix,
        "padding_mask": padding_mask.contiguous(),
        "num_rows": padding_mask.numel(),
        "num_columns": matrix.shape[-1],
        "BLOCK_R": _CLEARED_ROWS,
        "BLOCK_C": _CLEARED_COLUMNS,
    }
    Launch(clear_kernel, triton.cdiv(padding_mask.numel(), _CLEARED_ROWS), arguments, _NUM_WARPS).run(matrix)


def apply_relu_dropout(features: Tensor, seed: Tensor, threshold: int, scale: float) -> None:
    """Replaces features by dropout(relu(features)).

    Args:
        features: float32, float16 or bfloat16, contiguous.
        seed: int64 [1] on the device, what the dropped elements are drawn from.
        threshold: dropped of 65536, see `round_probability`, as the next.
        scale: what kept elements are multiplied by.
    """
    arguments = {
        "features": features,
        "seed": seed,
        "num_elements": features.numel(),
        "threshold": threshold,
        "scale": scale,
        "BLOCK_R": _ACTIVATED_ROWS,
        "BLOCK_C": _ACTIVATED_COLUMNS,
    }
    num_programs = triton.cdiv(features.numel(), _ACTIVATED_ROWS * _ACTIVATED_COLUMNS)
    Launch(relu_dropout_kernel, num_programs, arguments, _NUM_WARPS).run(features)
