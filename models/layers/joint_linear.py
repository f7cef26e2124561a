"""Linear layers of one input, as one product."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from models.layers.linear import linear
from msda_op.call_memory import is_watched


class JointLinear(nn.Module):
    """Computes the results of several linear layers of the same input by one product.

    y_i = x W_i^T + b_i for all i, as the parts of x [W_1; W_2; ...]^T + [b_1; b_2; ...]: the input is read once, and
    its gradient is one product instead of a sum. The layers stay children of the module that owns them, which keeps
    their names and their parameters; here they are only referred to.

    Attributes:
        layers: the layers, of one input width, all with a bias.
        joined: weights and biases below one another, [sum of out_features, in_features] and [sum of out_features],
            where `models.weight_casts.casting_weights` has made them for a while; else None, and each call joins them.
    """

    def __init__(self, *layers: nn.Linear) -> None:
        """Refers to the layers."""
        super().__init__()
        self.layers = layers  # in a tuple, where PyTorch does not look for children
        self.joined: tuple[Tensor, Tensor] | None = None

    def parameters_to_join(self) -> tuple[list[Tensor], list[Tensor]]:
        """Returns the layers' weights and their biases."""
        return [layer.weight for layer in self.layers], [layer.bias for layer in self.layers]

    def forward(self, features: Tensor) -> tuple[Tensor, ...]:
        """Maps float [..., in_features] to one [..., out_features] a layer: strided views of one tensor."""
        weight, bias = self.joined or tuple(torch.cat(tensors) for tensors in self.parameters_to_join())
        return split_rows(linear(features, weight, bias), [layer.out_features for layer in self.layers])


def split_rows(rows: Tensor, widths: Sequence[int]) -> tuple[Tensor, ...]:
    """Splits `[..., sum of widths]` into views, whose gradients are joined without a copy where they already are.

    The gradient of a split concatenates those of its parts. An op that knows its inputs for parts of one tensor may
    write their gradients as parts of one, which then is the gradient of the rows.
    """
    if is_watched(rows):  # traced or mapped, it has no memory to look at
        return rows.split(list(widths), dim=-1)
    return _SplitRows.apply(rows, widths)


class _SplitRows(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, widths: Sequence[int]) -> tuple[Tensor, ...]:
        return rows.split(list(widths), dim=-1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        # A view of one gradient would hide the others from a second derivative.
        joined = None if torch.is_grad_enabled() else _tensor_of_parts(gradients)
        return torch.cat(gradients, -1) if joined is None else joined, None


def _tensor_of_parts(parts: Sequence[Tensor]) -> Tensor | None:
    """Returns the tensor whose rows the parts make up in order, or None where their memory is not that of one."""
    if any(type(part) is not Tensor for part in parts):
        return None
    first = parts[0]
    starts = accumulate((part.shape[-1] for part in parts), initial=first.storage_offset())
    width = sum(part.shape[-1] for part in parts)
    *lengths, _ = first.shape
    strides = [width]
    for length in reversed(lengths[1:]):
        strides.insert(0, strides[0] * length)
    for part, start in zip(parts, starts, strict=False):
        same = part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr() and part.dtype == first.dtype
        if not same or part.stride() != (*strides, 1) or part.storage_offset() != start:
            return None
    return first.as_strided((*lengths, width), (*strides, 1))
