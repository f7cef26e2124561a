"""ReLU(norm(x) + residual) behind a convolution, for norms with fixed statistics: a kernel forward, one backward.

Importing this module imports Triton. Code that `torch.compile` sees composes the same of PyTorch's functions, which it
fuses by itself.
"""

from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torchvision.ops import FrozenBatchNorm2d

from models.layers.fused_frozen_norm_kernels import backward_kernel, forward_kernel
from msda_op.triton.kernel_launch import Launch

# Of a tile: its bytes in a tensor, four loads of 16 bytes a lane; and its channels, whole cache lines of every dtype.
_TILE_BYTES = 8192
_TILE_CHANNELS = 64
_NUM_WARPS = 4

_SCALE_TERMS = ("weight", "running_var", "eps")
TERMS = (*_SCALE_TERMS, "bias", "running_mean")
"""What kernels need to know of a norm to apply it."""


def frozen_norm_relu(x: Tensor, norm: FrozenBatchNorm2d) -> Tensor:
    """Normalises and rectifies.

    output = max(0, n(x)), n(x) = (x - mean) / sqrt(variance + eps) * weight + bias  (arXiv 1502.03167, algorithm 2)

    Args:
        x: float32, float16 or bfloat16 [B, C, H, W].
        norm: of x; no gradient reaches it.

    Returns:
        x's dtype [B, C, H, W], channels last in memory, as gradients are.

    Notes:
        Differentiable once in x. Deterministic. Float32 inside. Tensors in another memory format than channels last are
        copied.
    """
    return _FrozenNormRelu.apply(x, norm, None, None)


def frozen_norm_residual_relu(
    x: Tensor, norm: FrozenBatchNorm2d, residual: Tensor, residual_norm: FrozenBatchNorm2d | None
) -> tuple[Tensor, Tensor]:
    """Normalises, adds and rectifies.

    output = max(0, n(x) + r(residual))  (arXiv 1512.03385, equation 2), with n the norm as in `frozen_norm_relu` and r
    the residual's own norm, or the identity.

    Args:
        x: float32, float16 or bfloat16 [B, C, H, W].
        norm: of x; no gradient reaches it.
        residual: the same shape, any of these dtypes.
        residual_norm: of the residual; None adds it as it is.

    Returns:
        The output twice, x's dtype [B, C, H, W], in the same memory, channels last: one for each of two readers, whose
        gradients the backward kernel adds up, where autograd would write their sum first.

    Notes:
        As `frozen_norm_relu`; differentiable in the residual too.
    """
    return _FrozenNormRelu.apply(x, norm, residual, residual_norm)


class _FrozenNormRelu(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        norm: FrozenBatchNorm2d,
        residual: Tensor | None,
        residual_norm: FrozenBatchNorm2d | None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        x = _channels_last(x)
        output = torch.empty_like(x)
        arguments = {
            "x": x,
            "residual": None if residual is None else _channels_last(residual),
            "output": output,
            **norm_terms(norm, TERMS),
            **norm_terms(residual_norm, TERMS, "residual_"),
        }
        _launch(forward_kernel, arguments, x)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(output)
        ctx.norms = norm, residual_norm
        ctx.residual_dtype = None if residual is None else residual.dtype
        return output if residual is None else (output, output.view_as(output))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        (output,) = ctx.saved_tensors
        norm, residual_norm = ctx.norms
        grad_output, *others = (_channels_last(gradient) for gradient in gradients if gradient is not None)
        grad_x = torch.empty_like(grad_output) if ctx.needs_input_grad[0] else None
        grad_residual = torch.empty_like(grad_output, dtype=ctx.residual_dtype) if ctx.needs_input_grad[2] else None
        arguments = {
            "grad_output": grad_output,
            "second_grad_output": others[0] if others else None,
            "output": output,
            "grad_x": grad_x,
            "grad_residual": grad_residual,
            **norm_terms(norm, _SCALE_TERMS),
            **norm_terms(residual_norm, _SCALE_TERMS, "residual_"),
        }
        _launch(backward_kernel, arguments, grad_output)
        return grad_x, None, grad_residual, None


def _channels_last(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last)


def norm_terms(norm: FrozenBatchNorm2d | None, names: tuple[str, ...], prefix: str = "") -> dict[str, Any]:
    """Returns what a kernel needs to know of a norm, by the names of its arguments."""
    return {prefix + name: None if norm is None else getattr(norm, name) for name in names}


def _launch(kernel: Any, arguments: dict[str, Any], tiled: Tensor) -> None:
    """Launches a program for each tile of a [B, C, H, W] tensor."""
    num_channels = tiled.shape[1]
    if tiled.numel() > 0:
        num_rows = tiled.numel() // num_channels
        num_tiles, sizes = _tile(num_rows, num_channels, tiled.element_size())
        Launch(kernel, num_tiles, arguments | sizes, _NUM_WARPS).run(tiled)


@lru_cache(maxsize=4096)  # Triton's arithmetic on the host takes longer than the rest of a launch
def _tile(num_rows: int, num_channels: int, element_size: int) -> tuple[int, dict[str, int]]:
    """Returns the number of tiles, and what a kernel needs to know of them, by the names of its arguments."""
    block_c = min(_TILE_CHANNELS, triton.next_power_of_2(num_channels))
    block_r = _TILE_BYTES // (element_size * block_c)
    num_tiles = triton.cdiv(num_rows, block_r) * triton.cdiv(num_channels, block_c)
    return num_tiles, {"num_rows": num_rows, "num_channels": num_channels, "BLOCK_R": block_r, "BLOCK_C": block_c}
