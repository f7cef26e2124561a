"""Batch norms of a network that will not train any more: folded into the convolutions before them, or made such as
kernels take along."""

from itertools import pairwise

import torch
from torch import Tensor, nn
from torchvision.ops import FrozenBatchNorm2d

from models.layers.frozen_norm import FoldedBatchNorm2d

TrainedNorm = nn.BatchNorm2d | nn.SyncBatchNorm


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
            if not (isinstance(convolution, nn.Conv2d) and isinstance(norm, TrainedNorm | FrozenBatchNorm2d)):
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


def freeze_batch_norms(model: nn.Module) -> None:
    """Replaces batch norms, in place, by frozen ones that `models.layers.residual_blocks.norm_relu` fuses.

    Args:
        model: a network in evaluation mode, on any device.

    Raises:
        ValueError: if a norm has no running statistics.
    """
    for parent in model.modules():
        for name, norm in list(parent.named_children()):
            if isinstance(norm, TrainedNorm):
                mean, variance = _statistics(norm)
                frozen = FoldedBatchNorm2d(norm.num_features, norm.eps)
                frozen.fused = True
                frozen.running_mean.copy_(mean)
                frozen.running_var.copy_(variance)
                if norm.affine:
                    frozen.weight.copy_(norm.weight.detach())
                    frozen.bias.copy_(norm.bias.detach())
                setattr(parent, name, frozen)


def _statistics(norm: TrainedNorm | FrozenBatchNorm2d) -> tuple[Tensor, Tensor]:
    mean, variance = norm.running_mean, norm.running_var
    if not (isinstance(mean, Tensor) and isinstance(variance, Tensor)):
        raise ValueError("norms must hold running statistics, got a batch norm without; train with track_running_stats")
    return mean, variance
