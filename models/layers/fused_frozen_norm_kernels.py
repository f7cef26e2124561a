"""Kernels of ReLU(norm(x) + residual), the norm with fixed statistics and the residual, if any, with a norm of its own.

R rows (pixels) of C channels, a row's channels side by side. A program takes a tile of BLOCK_R x BLOCK_C elements;
arithmetic is float32, nothing is atomic. What there is none of is None, and costs nothing.
"""

# mypy: disallow-untyped-defs=False

import triton
import triton.language as tl


@triton.jit
def place_tile(num_rows, num_channels, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """Returns where the program's tile begins (int64), and its elements from there; which exist; and its channels.

    Tiles that lie side by side in a row follow each other.
    """
    tiles_of_row = tl.cdiv(num_channels, BLOCK_C)
    first_row = tl.program_id(0) // tiles_of_row * BLOCK_R
    columns = tl.program_id(0) % tiles_of_row * BLOCK_C + tl.arange(0, BLOCK_C)
    rows = tl.arange(0, BLOCK_R)
    mask = (rows < num_rows - first_row)[:, None] & (columns < num_channels)[None, :]
    return first_row.to(tl.int64) * num_channels, rows[:, None] * num_channels + columns[None, :], mask, columns


@triton.jit
def load_scale(weight, running_var, eps, columns, num_channels):
    """Returns weight / sqrt(running_var + eps) of some channels."""
    inside = columns < num_channels
    factor = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    return factor * tl.rsqrt(tl.load(running_var + columns, mask=inside, other=1.0).to(tl.float32) + eps)


@triton.jit
def load_shift(bias, running_mean, scale, columns, num_channels):
    """Returns bias - running_mean * scale of some channels."""
    inside = columns < num_channels
    offset = tl.load(running_mean + columns, mask=inside, other=0.0).to(tl.float32)
    return tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32) - offset * scale


@triton.jit
def forward_kernel(
    x,
    residual,
    output,
    weight,
    bias,
    running_mean,
    running_var,
    eps,
    residual_weight,
    residual_bias,
    residual_running_mean,
    residual_running_var,
    residual_eps,
    num_rows,
    num_channels,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Writes a tile of the output. The tile is asked for before the channels' terms, which take longer to be ready."""
    start, places, mask, columns = place_tile(num_rows, num_channels, BLOCK_R, BLOCK_C)
    result = tl.load(x + start + places, mask=mask, other=0.0).to(tl.float32)
    if residual is not None:
        added = tl.load(residual + start + places, mask=mask, other=0.0).to(tl.float32)
    scale = load_scale(weight, running_var, eps, columns, num_channels)
    shift = load_shift(bias, running_mean, scale, columns, num_channels)
    result = result * scale[None, :] + shift[None, :]
    if residual is not None:
        if residual_weight is not None:
            scale = load_scale(residual_weight, residual_running_var, residual_eps, columns, num_channels)
            shift = load_shift(residual_bias, residual_running_mean, scale, columns, num_channels)
            added = added * scale[None, :] + shift[None, :]
        result += added
    result = tl.where(result < 0.0, 0.0, result)  # NaN stays NaN
    tl.store(output + start + places, result.to(output.dtype.element_ty), mask=mask)


@triton.jit
def backward_kernel(
    grad_output,
    second_grad_output,
    output,
    grad_x,
    grad_residual,
    weight,
    running_var,
    eps,
    residual_weight,
    residual_running_var,
    residual_eps,
    num_rows,
    num_channels,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Writes a tile of each gradient: what flows through the ReLU, times the scale of the input's norm.

    The output's gradient is the sum of two where two have read the output.
    """
    start, places, mask, columns = place_tile(num_rows, num_channels, BLOCK_R, BLOCK_C)
    gradient = tl.load(grad_output + start + places, mask=mask, other=0.0).to(tl.float32)
    if second_grad_output is not None:
        gradient += tl.load(second_grad_output + start + places, mask=mask, other=0.0).to(tl.float32)
    result = tl.load(output + start + places, mask=mask, other=0.0).to(tl.float32)
    gradient = tl.where(result <= 0.0, 0.0, gradient)
    if grad_x is not None:
        scaled = gradient * load_scale(weight, running_var, eps, columns, num_channels)[None, :]
        tl.store(grad_x + start + places, scaled.to(grad_x.dtype.element_ty), mask=mask)
    if grad_residual is not None:
        if residual_weight is not None:
            gradient *= load_scale(residual_weight, residual_running_var, residual_eps, columns, num_channels)[None, :]
        tl.store(grad_residual + start + places, gradient.to(grad_residual.dtype.element_ty), mask=mask)
