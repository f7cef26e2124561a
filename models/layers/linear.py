"""Linear layers of many rows, with what follows them, and a bias whose gradient comes from a kernel of its own.

That gradient is the sum of the output's gradient over all rows: a read of that tensor, at whose speed PyTorch's
reduction does not run where rows are many and narrow, as the pixels of all levels are. What follows is done to the
result in place, and the read of its backward pass is the one that sums.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional

from models.layers.autocast import autocast_dtype
from models.layers.feed_forward import relu_dropout

# With fewer rows there is little to read, and a sum by PyTorch is one launch instead of two.
_MIN_ROWS = 4096


class Linear(nn.Linear):
    """`torch.nn.Linear` by `linear`."""

    def forward(self, features: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Maps float [..., in_features] to [..., out_features], zeros where bool [...] is True: padding."""
        return linear(features, self.weight, self.bias, padding_mask)


def linear(features: Tensor, weight: Tensor, bias: Tensor, padding_mask: Tensor | None = None) -> Tensor:
    """Computes features weight^T + bias.

    Args:
        features: float [..., in_features].
        weight: float [out_features, in_features].
        bias: float [out_features].
        padding_mask: bool [...], True = padding, where the result is zero; None has none.

    Returns:
        float [..., out_features]; under autocast in its dtype.

    Notes:
        On a GPU, with many rows: differentiable once, the gradient of the bias added up in float32 and rounded once.
        Else of `torch.nn.functional.linear`.
    """
    if can_sum(features, weight, bias):
        return _Linear.apply(*_cast(features, weight, bias), padding_mask, None)
    output = functional.linear(features, weight, bias)
    if padding_mask is None:
        return output
    if output.is_cuda and not output.requires_grad and not torch.compiler.is_compiling():
        from models.layers.in_place import clear_rows  # Triton, which is not installed everywhere

        clear_rows(output, padding_mask)
        return output
    return torch.where(padding_mask.unsqueeze(-1), 0.0, output)


def linear_relu_dropout(layer: nn.Linear, features: Tensor, probability: float, training: bool) -> Tensor:
    """Computes dropout(relu(layer(features))).

    Args:
        layer: with a bias.
        features: float [..., in_features].
        probability: of dropping, in 0..1.
        training: whether to drop.

    Returns:
        float [..., out_features]; under autocast in its dtype.

    Notes:
        As `linear`. The kernel's probability is rounded, see `round_probability`.
    """
    weight, bias = layer.weight, layer.bias
    if training and 0 < probability < 1 and can_sum(features, weight, bias):
        return _Linear.apply(*_cast(features, weight, bias), None, probability)
    return relu_dropout(layer(features), probability, training)


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


def _cast(*tensors: Tensor) -> tuple[Tensor, ...]:
    dtype = autocast_dtype(tensors[0].device) or tensors[0].dtype
    return tuple(tensor.to(dtype) for tensor in tensors)


class _Linear(Function):
    """A product with padded rows cleared, or with ReLU and dropout of a probability behind it, or with neither."""

    @staticmethod
    def forward(
        ctx: Any,
        features: Tensor,
        weight: Tensor,
        bias: Tensor,
        padding_mask: Tensor | None,
        probability: float | None,
    ) -> Tensor:
        output = functional.linear(features, weight, bias)
        if padding_mask is not None:
            from models.layers.in_place import clear_rows

            clear_rows(output, padding_mask)
        ctx.scale = 1.0
        if probability is not None:
            from models.layers.dropout_kernels import round_probability
            from models.layers.in_place import apply_relu_dropout

            threshold, ctx.scale = round_probability(probability)
            seed = torch.randint(2**62, (1,), device=output.device)
            apply_relu_dropout(output, seed, threshold, ctx.scale)
        # What is positive after ReLU and dropout was positive before and kept: no mask has to be stored.
        ctx.save_for_backward(features, weight, padding_mask, None if probability is None else output)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        from models.layers.row_sum import sum_passed_rows, sum_rows  # Triton, which is not installed everywhere

        features, weight, padding_mask, activated = ctx.saved_tensors
        rows = gradient.flatten(0, -2)
        grad_bias = None
        if padding_mask is not None or activated is not None:
            padding = None if padding_mask is None else padding_mask.flatten()
            kept = None if activated is None else activated.flatten(0, -2)
            rows, grad_bias = sum_passed_rows(rows, padding, kept, ctx.scale)
        elif ctx.needs_input_grad[2]:
            grad_bias = sum_rows(rows)
        grad_features = (rows @ weight).view_as(features) if ctx.needs_input_grad[0] else None
        grad_weight = rows.t() @ features.flatten(0, -2) if ctx.needs_input_grad[1] else None
        return grad_features, grad_weight, grad_bias, None, None
