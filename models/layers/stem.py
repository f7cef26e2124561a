"""The stem of a ResNet: a 7x7 convolution of three channels, norm, ReLU and pooling (arXiv 1512.03385, table 1).

Tensor cores multiply rows of many channels, of which an image has three. By blocks of 2x2 pixels it has twelve, and the
convolution of stride 2 becomes one of 4x4 blocks and stride 1: the same products, and zeros, added up in another order.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.layers.residual_blocks import fuses_norm, norm_relu

_BLOCK = 2
_KERNEL = 7
_BLOCKS_BEFORE, _BLOCKS_AFTER = 2, 1
# A fourth channel of zeros makes sixteen a block, which is a multiple of eight, as tensor cores want them.
_EXTRA_CHANNELS = 1


def convolve_blocks(images: Tensor, weight: Tensor) -> Tensor:
    """Convolves with stride 2 and padding 3, block by block.

    Args:
        images: float [B, 3, H, W].
        weight: float [channels, 3, 7, 7].

    Returns:
        weight's dtype [B, channels, ceil(H / 2), ceil(W / 2)], channels last in memory where the backend has it so.

    Notes:
        Differentiable. Row 2i - 3 + t of the padded image meets row t of the kernel. A row of zeros before the kernel's
        first makes them rows 2i - 4 to 2i + 3, which are four blocks: i - 2 to i + 1.
    """
    height, width = images.shape[-2:]
    before, after = _BLOCKS_BEFORE * _BLOCK, _BLOCKS_AFTER * _BLOCK
    padding = (before, after + width % _BLOCK, before, after + height % _BLOCK, 0, _EXTRA_CHANNELS)
    padded = functional.pad(images.to(weight.dtype), padding)
    kernel = functional.pad(weight, (1, 0, 1, 0, 0, _EXTRA_CHANNELS))
    return functional.conv2d(_gather_blocks(padded), _gather_blocks(kernel))


def fits_blocks(convolution: nn.Conv2d) -> bool:
    """Whether a convolution is what `convolve_blocks` computes."""
    return (
        convolution.bias is None
        and (convolution.kernel_size, convolution.stride, convolution.padding) == ((_KERNEL,) * 2, (2, 2), (3, 3))
        and (convolution.dilation, convolution.groups, convolution.padding_mode) == ((1, 1), 1, "zeros")
    )


def norm_relu_pool(x: Tensor, norm: nn.Module, pool: nn.Module) -> Tensor:
    """Computes pool(ReLU(norm(x))), by one kernel where `norm_relu` is one and nothing has a gradient.

    Args:
        x: float [B, C, H, W], the result of a convolution, which may be overwritten.
        norm: any module of such tensors.
        pool: the maximum of 3x3 pixels with stride 2 and padding 1.

    Returns:
        float [B, C, ceil(H / 2), ceil(W / 2)].
    """
    if fuses_norm(x, norm) and not (torch.is_grad_enabled() and x.requires_grad):
        from models.layers.fused_stem import frozen_norm_relu_pool  # Triton, which is not installed everywhere

        return frozen_norm_relu_pool(x, norm)
    return pool(norm_relu(x, norm))


def _gather_blocks(x: Tensor) -> Tensor:
    """Moves the pixels of each block into its channels, [N, C, H, W] -> [N, 4 C, H / 2, W / 2], channels last."""
    n, channels, height, width = x.shape
    blocks = x.reshape(n, channels, height // _BLOCK, _BLOCK, width // _BLOCK, _BLOCK).permute(0, 2, 4, 1, 3, 5)
    return blocks.reshape(n, height // _BLOCK, width // _BLOCK, channels * _BLOCK**2).permute(0, 3, 1, 2)
