"""The 3x3 maximum of ReLU(norm(x)) behind a ResNet's first convolution, by one kernel, where nothing has a gradient.

Importing this module imports Triton.
"""

# mypy: disallow-untyped-defs=False

import torch
import triton
import triton.language as tl
from torch import Tensor
from torchvision.ops import FrozenBatchNorm2d

from models.layers.fused_frozen_norm import TERMS, norm_terms
from models.layers.fused_frozen_norm_kernels import load_scale, load_shift
from msda_op.triton.kernel_launch import Launch

# Output pixels and channels of a program.
_BLOCK_P = 32
_BLOCK_C = 64
_NUM_WARPS = 4


@triton.jit(do_not_specialize=["num_pixels", "height", "width", "output_height", "output_width"])
def norm_relu_pool_kernel(
    x,
    output,
    weight,
    bias,
    running_mean,
    running_var,
    eps,
    num_pixels,
    height,
    width,
    output_height,
    output_width,
    num_channels,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Writes BLOCK_P output pixels of BLOCK_C channels; NaN wins.

    A maximum that starts at zero is that of what the ReLU makes of each.
    """
    tiles_of_row = tl.cdiv(num_channels, BLOCK_C)
    pixels = tl.program_id(0) // tiles_of_row * BLOCK_P + tl.arange(0, BLOCK_P)
    columns = tl.program_id(0) % tiles_of_row * BLOCK_C + tl.arange(0, BLOCK_C)
    present, inside = pixels < num_pixels, columns < num_channels
    scale = load_scale(weight, running_var, eps, columns, num_channels)
    shift = load_shift(bias, running_mean, scale, columns, num_channels)
    first_y = pixels // output_width % output_height * 2 - 1
    first_x = pixels % output_width * 2 - 1
    first_row = (pixels // (output_width * output_height)).to(tl.int64) * height
    result = tl.zeros([BLOCK_P, BLOCK_C], dtype=tl.float32)
    for tap in tl.static_range(9):
        tap_y, tap_x = first_y + tap // 3, first_x + tap % 3
        exists = present & (tap_y >= 0) & (tap_y < height) & (tap_x >= 0) & (tap_x < width)
        mask = exists[:, None] & inside[None, :]
        places = ((first_row + tap_y) * width + tap_x)[:, None] * num_channels + columns[None, :]
        value = tl.load(x + places, mask=mask, other=0.0).to(tl.float32) * scale[None, :] + shift[None, :]
        result = tl.maximum(result, tl.where(mask, value, 0.0), propagate_nan=tl.PropagateNan.ALL)
    places = pixels.to(tl.int64)[:, None] * num_channels + columns[None, :]
    tl.store(output + places, result.to(output.dtype.element_ty), mask=present[:, None] & inside[None, :])


def frozen_norm_relu_pool(x: Tensor, norm: FrozenBatchNorm2d) -> Tensor:
    """Normalises, rectifies and takes the maximum of 3x3 pixels around every other one.

    Args:
        x: float32, float16 or bfloat16 [B, C, H, W].
        norm: of x.

    Returns:
        x's dtype [B, C, ceil(H / 2), ceil(W / 2)], channels last in memory.

    Notes:
        Not differentiable. Float32 inside. Tensors in another memory format than channels last are copied.
    """
    x = x.contiguous(memory_format=torch.channels_last)
    batch, num_channels, height, width = x.shape
    output_height, output_width = triton.cdiv(height, 2), triton.cdiv(width, 2)
    output = torch.empty_like(x[:, :, :output_height, :output_width], memory_format=torch.channels_last)
    num_pixels = batch * output_height * output_width
    arguments = {
        "x": x,
        "output": output,
        **norm_terms(norm, TERMS),
        "num_pixels": num_pixels,
        "height": height,
        "width": width,
        "output_height": output_height,
        "output_width": output_width,
        "num_channels": num_channels,
        "BLOCK_P": _BLOCK_P,
        "BLOCK_C": _BLOCK_C,
    }
    if num_pixels > 0:
        num_programs = triton.cdiv(num_pixels, _BLOCK_P) * triton.cdiv(num_channels, _BLOCK_C)
        Launch(norm_relu_pool_kernel, num_programs, arguments, _NUM_WARPS).run(x)
    return output
