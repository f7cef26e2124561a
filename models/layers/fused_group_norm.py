"""GroupNorm of tensors that are channels last in memory: two kernels forward, two backward.

Importing this module imports Triton. Code that `torch.compile` sees calls PyTorch's own norm, which it fuses by itself.
"""

from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from models.layers.fused_group_norm_kernels import gradient_kernel, output_kernel, statistics_kernel, sums_kernel
from msda_op.triton.kernel_launch import Launch

# Of a tile: its bytes in all tensors that are read, two loads of 16 bytes a lane; and its channels, whole cache lines
# of every dtype.
_TILE_BYTES = 4096
_TILE_CHANNELS = 64
_NUM_WARPS = 4

# Programs of a launch: what the 132 multiprocessors of an H200 hold at once; and chunks that readers combine.
_MAX_PROGRAMS = 1056
_MAX_CHUNKS = 64


def group_norm(x: Tensor, weight: Tensor, bias: Tensor, num_groups: int, eps: float) -> Tensor:
    """Normalises.

    output = (x - mean) / sqrt(variance + eps) * weight + bias, mean and variance those of an image's group of channels
    (arXiv 1803.08494, equations 1, 2 and 6)

    Args:
        x: float32, float16 or bfloat16 [B, C, H, W], not empty.
        weight: [C].
        bias: [C].
        num_groups: G, a divisor of C.
        eps: added to the variance.

    Returns:
        x's dtype [B, C, H, W], channels last in memory, as the gradient is.

    Notes:
        Differentiable once in the first three. Deterministic: sums have a fixed order. Float32 inside. Tensors in
        another memory format than channels last are copied; the images of the output's gradient may lie apart, as those
        of a level among several do.
    """
    return _GroupNorm.apply(x, weight, bias, num_groups, eps)


class _GroupNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, num_groups: int, eps: float) -> Tensor:
        x = x.contiguous(memory_format=torch.channels_last)
        batch = x.shape[0]
        num_programs, sizes = _sizes(x, num_groups, num_tensors=1)
        output = torch.empty_like(x)
        partials = x.new_empty((batch, sizes["num_chunks"], 2, num_groups), dtype=torch.float32)
        mean, inverse_deviation = x.new_empty((2, batch, num_groups), dtype=torch.float32).unbind()
        tensors = {"x": x, "partials": partials}
        Launch(statistics_kernel, num_programs, tensors | sizes, _NUM_WARPS).run(x)
        arguments = {
            **tensors,
            "weight": weight,
            "bias": bias,
            "output": output,
            "mean": mean,
            "inverse_deviation": inverse_deviation,
            "eps": eps,
            "MAX_CHUNKS": _MAX_CHUNKS,
            **sizes,
        }
        Launch(output_kernel, num_programs, arguments, _NUM_WARPS).run(x)
        ctx.save_for_backward(x, weight, mean, inverse_deviation)
        ctx.num_groups = num_groups
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, inverse_deviation = ctx.saved_tensors
        num_programs, sizes = _sizes(x, ctx.num_groups, num_tensors=2)
        grad_output = _with_adjacent_rows(grad_output)
        num_sums, num_channels = x.shape[0] * sizes["num_chunks"], x.shape[1]
        sums = x.new_empty((num_sums, 2, num_channels + ctx.num_groups), dtype=torch.float32)
        tensors = {
            "x": x,
            "grad_output": grad_output,
            "grad_stride": grad_output.stride(0),
            "weight": weight,
            "mean": mean,
            "inverse_deviation": inverse_deviation,
            "sums": sums,
        }
        Launch(sums_kernel, num_programs, tensors | sizes, _NUM_WARPS).run(x)
        grad_x, grad_parameters = torch.empty_like(x), weight.new_empty((2, num_channels))
        arguments = {
            **tensors,
            "grad_x": grad_x,
            "grad_parameters": grad_parameters,
            "num_sums": num_sums,
            "MAX_CHUNKS": _MAX_CHUNKS,
            **sizes,
        }
        num_tiles = triton.cdiv(ctx.num_groups, sizes["BLOCK_G"])
        Launch(gradient_kernel, 2 * num_tiles + num_programs, arguments, _NUM_WARPS).run(x)
        return grad_x, *grad_parameters.unbind(), None, None


def _with_adjacent_rows(gradient: Tensor) -> Tensor:
    """Returns a tensor whose rows (pixels) lie side by side in each image, as channels last, copied unless they do."""
    _, num_channels, _, width = gradient.shape
    if gradient.stride()[1:] == (1, width * num_channels, num_channels):
        return gradient
    return gradient.contiguous(memory_format=torch.channels_last)


def _sizes(x: Tensor, num_groups: int, num_tensors: int) -> tuple[int, dict[str, int]]:
    batch, num_channels, height, width = x.shape
    return _divide(batch, height * width, num_channels, num_groups, num_tensors * x.element_size())


@lru_cache(maxsize=4096)  # Triton's arithmetic on the host takes longer than the rest of a launch
def _divide(
    batch: int, num_rows: int, num_channels: int, num_groups: int, element_bytes: int
) -> tuple[int, dict[str, int]]:
    """Returns the number of programs, and what a kernel needs to know of their shares, by the names of its arguments.

    No chunk is empty.
    """
    group_channels = num_channels // num_groups
    block_c = triton.next_power_of_2(group_channels)
    block_g = min(max(1, _TILE_CHANNELS // block_c), triton.next_power_of_2(num_groups))
    block_r = max(1, _TILE_BYTES // (element_bytes * block_g * block_c))
    num_tiles, num_blocks = triton.cdiv(num_groups, block_g), triton.cdiv(num_rows, block_r)
    most_chunks = max(1, min(_MAX_CHUNKS, _MAX_PROGRAMS // (batch * num_tiles)))
    rows_of_chunk = triton.cdiv(num_blocks, most_chunks) * block_r
    num_chunks = triton.cdiv(num_rows, rows_of_chunk)
    sizes = {
        "num_rows": num_rows,
        "num_channels": num_channels,
        "num_groups": num_groups,
        "num_chunks": num_chunks,
        "rows_of_chunk": rows_of_chunk,
        "GROUP_CHANNELS": group_channels,
        "BLOCK_R": block_r,
        "BLOCK_G": block_g,
        "BLOCK_C": block_c,
    }
    return batch * num_chunks * num_tiles, sizes
