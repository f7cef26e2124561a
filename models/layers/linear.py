"""Linear layers of many rows, whose bias has its gradient from a kernel of its own.

It is the sum of the output's gradient over all rows: a read of that tensor, at whose speed PyTorch's reduction does not
run where rows are many and narrow, as the pixels of all levels are.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional

from models.layers.autocast import autocast_dtype

# With fewer rows there is little to read, and a sum by PyTorch is one launch instead of two.
_MIN_ROWS = 4096


class Linear(nn.Linear):
    """`torch.nn.Linear` by `linear`."""

    def forward(self, features: Tensor) -> Tensor:
        """Maps float [..., in_features] to [..., out_features]."""
        return linear(features, self.weight, self.bias)


def linear(features: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Computes features weight^T + bias.

    Args:
        features: float [..., in_features].
        weight: float [out_features, in_features].
        bias: float [out_features].

    Returns:
        float [..., out_features]; under autocast in its dtype.

    Notes:
        On a GPU, with many rows: differentiable once, the gradient of the bias added up in float32 and rounded once.
        Else `torch.nn.functional.linear`.
    """
    if not can_sum(features, weight, bias):
        return functional.linear(features, weight, bias)
    dtype = autocast_dtype(features.device) or features.dtype
    return _Linear.apply(*(tensor.to(dtype) for tensor in (features, weight, bias)))


def can_sum(features: Tensor, weight: Tensor, bias: Tensor) -> bool:
    """Whether the kernel can take the gradient of a linear layer, and is worth it.

    Weights that are cast already and those that autocast has to cast are answered alike: a layer that is recomputed in
    the backward pass, where they are not, has to keep what it kept before.
    """
    dtypes = {features.dtype, weight.dtype, bias.dtype}
    return (
        features.is_cuda
        and torch.is_grad_enabled()
        and bias.requires_grad
        and features.numel() >= _MIN_ROWS * features.shape[-1]
        and (len(dtypes) == 1 or autocast_dtype(features.device) is not None)
        and torch.float64 not in dtypes
        and not torch.compiler.is_compiling()
    )


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, features: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(features, weight)
        return functional.linear(features, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        from models.layers.row_sum import sum_rows  # Triton, which is not installed everywhere

        features, weight = ctx.saved_tensors
        rows = gradient.flatten(0, -2)
        grad_features = (rows @ weight).view_as(features) if ctx.needs_input_grad[0] else None
        grad_weight = rows.t() @ features.flatten(0, -2) if ctx.needs_input_grad[1] else None
        return grad_features, grad_weight, sum_rows(rows) if ctx.needs_input_grad[2] else None
