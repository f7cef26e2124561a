"""The activation of the feed-forward blocks."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import dropout


def relu_dropout(features: Tensor, probability: float, training: bool) -> Tensor:
    """Returns dropout(relu(features)), and keeps the result alone for the backward pass.

    What is positive afterwards was positive before and kept: neither the activation nor the mask has to be stored.

    Args:
        features: float, any shape.
        probability: of dropping, in 0..1.
        training: whether to drop.
    """
    if not training or probability == 0:
        return features.relu()
    return _ReluDropout.apply(features, probability)


class _ReluDropout(Function):
    @staticmethod
    def forward(ctx: Any, features: Tensor, probability: float) -> Tensor:
        output = dropout(features.relu(), probability, training=True)
        ctx.save_for_backward(output)
        ctx.probability = probability
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (output,) = ctx.saved_tensors
        scale = 0.0 if ctx.probability == 1 else 1 / (1 - ctx.probability)
        # The derivative of scale * elu with alpha 0, from its result: gradient * scale where that is positive, else 0.
        return torch.ops.aten.elu_backward(gradient, 0.0, scale, 1.0, True, output), None
