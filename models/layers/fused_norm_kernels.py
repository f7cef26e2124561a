"""Kernels of dropout + residual + LayerNorm.

R rows of C channels. A program takes blocks of BLOCK_R rows with all their channels; all arithmetic is float32. Nothing
is atomic: the backward kernel leaves the parameters' gradients as one partial sum a program. (Asked for it, with
ATOMIC, it adds them up itself, in no fixed order: what that is worth `scripts.benchmark variants` measures.)

The backward kernel draws the dropped channels again, see `keep_mask`.
"""

# mypy: disallow-untyped-defs=False

import triton
import triton.language as tl

from models.layers.dropout_kernels import keep_mask


@triton.jit
def load_sum(
    residual,
    branch,
    seed,
    rows,
    places,
    mask,
    threshold,
    scale,
    DROPS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Returns residual + dropout(branch), float32 [BLOCK_R, BLOCK_C], and which channels of the branch are kept."""
    added = tl.load(branch + places, mask=mask, other=0.0).to(tl.float32)
    keep = mask
    if DROPS:
        keep = keep_mask(tl.load(seed), rows, threshold, BLOCK_R, BLOCK_C)
        added = tl.where(keep, added * scale, 0.0)
    return tl.load(residual + places, mask=mask, other=0.0).to(tl.float32) + added, keep


@triton.jit
def forward_kernel(
    residual,
    branch,
    weight,
    bias,
    seed,
    output,
    mean,
    inverse_deviation,
    num_rows,
    num_channels,
    eps,
    threshold,
    scale,
    DROPS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Writes the normalised sum of BLOCK_R rows, and each row's mean and inverse deviation."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    columns = tl.arange(0, BLOCK_C)
    inside = columns < num_channels
    mask = (rows < num_rows)[:, None] & inside[None, :]
    places = rows[:, None] * num_channels + columns[None, :]
    summed, _ = load_sum(residual, branch, seed, rows, places, mask, threshold, scale, DROPS, BLOCK_R, BLOCK_C)
    row_mean = tl.sum(summed, axis=1) / num_channels
    centred = tl.where(mask, summed - row_mean[:, None], 0.0)
    row_inverse = 1.0 / tl.sqrt(tl.sum(centred * centred, axis=1) / num_channels + eps)
    factor = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    shift = tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    result = centred * row_inverse[:, None] * factor[None, :] + shift[None, :]
    tl.store(output + places, result.to(output.dtype.element_ty), mask=mask)
    tl.store(mean + rows, row_mean, mask=rows < num_rows)
    tl.store(inverse_deviation + rows, row_inverse, mask=rows < num_rows)


@triton.jit
def backward_kernel(
    grad_output,
    residual,
    branch,
    weight,
    seed,
    mean,
    inverse_deviation,
    grad_residual,
    grad_branch,
    sums,
    num_rows,
    num_channels,
    threshold,
    scale,
    DROPS: tl.constexpr,
    ATOMIC: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Writes both inputs' gradients of every n-th block of rows, n programs; and [n, 2, C] sums for weight and bias.

    ATOMIC adds to [2, C] sums that all programs share.

    With x the normalised row, g = weight * grad_output and r the inverse deviation: grad_sum = r (g - mean(g) - x
    mean(g x)), grad_weight = sum of grad_output x, grad_bias = sum of grad_output.
    """
    program = tl.program_id(0)
    columns = tl.arange(0, BLOCK_C)
    inside = columns < num_channels
    factor = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    weight_terms = tl.zeros([BLOCK_R, BLOCK_C], dtype=tl.float32)
    bias_terms = tl.zeros([BLOCK_R, BLOCK_C], dtype=tl.float32)
    for start in range(program * BLOCK_R, num_rows, tl.num_programs(0) * BLOCK_R):
        rows = start + tl.arange(0, BLOCK_R).to(tl.int64)
        mask = (rows < num_rows)[:, None] & inside[None, :]
        places = rows[:, None] * num_channels + columns[None, :]
        summed, keep = load_sum(residual, branch, seed, rows, places, mask, threshold, scale, DROPS, BLOCK_R, BLOCK_C)
        row_mean = tl.load(mean + rows, mask=rows < num_rows, other=0.0)
        row_inverse = tl.load(inverse_deviation + rows, mask=rows < num_rows, other=0.0)
        gradient = tl.load(grad_output + places, mask=mask, other=0.0).to(tl.float32)
        normalised = tl.where(mask, (summed - row_mean[:, None]) * row_inverse[:, None], 0.0)
        weight_terms += gradient * normalised
        bias_terms += gradient
        scaled = gradient * factor[None, :]
        mean_scaled = tl.sum(scaled, axis=1) / num_channels
        mean_product = tl.sum(scaled * normalised, axis=1) / num_channels
        grad_sum = (scaled - mean_scaled[:, None] - normalised * mean_product[:, None]) * row_inverse[:, None]
        tl.store(grad_residual + places, grad_sum.to(grad_residual.dtype.element_ty), mask=mask)
        if DROPS:
            grad_sum = tl.where(keep, grad_sum * scale, 0.0)
        tl.store(grad_branch + places, grad_sum.to(grad_branch.dtype.element_ty), mask=mask)
    # Added up over rows once: in the loop, warps would wait for one another at every block.
    grad_weight, grad_bias = tl.sum(weight_terms, axis=0), tl.sum(bias_terms, axis=0)
    if ATOMIC:
        tl.atomic_add(sums + columns, grad_weight, mask=inside, sem="relaxed")
        tl.atomic_add(sums + num_channels + columns, grad_bias, mask=inside, sem="relaxed")
    else:
        mine = sums + program * 2 * num_channels
        tl.store(mine + columns, grad_weight, mask=inside)
        tl.store(mine + num_channels + columns, grad_bias, mask=inside)
