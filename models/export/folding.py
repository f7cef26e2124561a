"""Folds the batch norms of a network in evaluation mode into the convolutions before them, for good."""

from itertools import pairwise

import torch
from torch import Tensor, nn
from torchvision.ops import FrozenBatchNorm2d


@torch.no_grad()
def fold_batch_norms(model: nn.Module) -> int:
    """Lets convolutions apply the batch norms that follow them, in place.

    norm(conv(x)) = scale * (W * x + b - mean) + shift = (scale W) * x + (scale (b - mean) + shift), with scale =
    weight / sqrt(var + eps). The norms become identities.

    Args:
        model: a network; a norm belongs to the convolution before it among the children of their parent.

    Returns:
        The number of norms folded.

    Notes:
        For a network that will not train any more; results agree up to rounding.
    """
    folded = 0
    for parent in model.modules():
        children = list(parent.named_children())
        for (_, convolution), (name, norm) in pairwise(children):
            if not (isinstance(convolution, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d | FrozenBatchNorm2d)):
                continue
            mean, variance = _statistics(norm)
            scale = (
                (variance + norm.eps).rsqrt() if norm.weight is None else norm.weight * (variance + norm.eps).rsqrt()
            )
            bias = -mean if convolution.bias is None else convolution.bias - mean
            shift = bias * scale if norm.bias is None else bias * scale + norm.bias
            convolution.weight = nn.Parameter(convolution.weight * scale.view(-1, 1, 1, 1), requires_grad=False)
            convolution.bias = nn.Parameter(shift, requires_grad=False)
            setattr(parent, name, nn.Identity())
            folded += 1
    return folded


def _statistics(norm: nn.BatchNorm2d | FrozenBatchNorm2d) -> tuple[Tensor, Tensor]:
    mean, variance = norm.running_mean, norm.running_var
    if not (isinstance(mean, Tensor) and isinstance(variance, Tensor)):
        raise ValueError("norms must hold running statistics, got a batch norm without; train with track_running_stats")
    return mean, variance
