"""A convolution with the group norm behind it, which kernels take over where the features are channels last."""

import torch
from torch import Tensor, nn

from models.layers.residual_blocks import can_fuse


class NormedConvolution(nn.Sequential):
    """GroupNorm(convolution(x)); its state-dict keys are those of a plain sequence.

    Attributes:
        fused: whether Triton kernels may normalise, see `normalise`; elsewhere PyTorch's norm does.
    """

    fused: bool = True

    def __init__(self, convolution: nn.Conv2d, norm: nn.GroupNorm) -> None:
        """Joins a convolution and the norm of its result.

        The norm stays what it is among the children, so that one of another kind can take its place (as
        `models.export.padding` has it), which then normalises by itself.
        """
        super().__init__(convolution, norm)

    def forward(self, x: Tensor) -> Tensor:
        """Convolves and normalises float [B, C, H, W]; returns what `normalise` does."""
        convolution, norm = self
        features = convolution(x)
        return normalise(features, norm) if self.fused else norm(features)


def normalise(x: Tensor, norm: nn.Module) -> Tensor:
    """Computes norm(x).

    `torch.nn.GroupNorm` itself with weight and bias becomes a few kernels where `can_fuse` says so and x is channels
    last in memory.

    Args:
        x: float [B, C, H, W].
        norm: any module of such tensors.

    Returns:
        float [B, C, H, W]: of the kernels x's dtype, channels last in memory, whether or not autocast is on, whose
        layers would cast a float32 result to that dtype; elsewhere what the norm returns.
    """
    if type(norm) is nn.GroupNorm and norm.weight is not None and norm.bias is not None and _fuses(x):
        from models.layers.fused_group_norm import group_norm  # Triton, which is not installed everywhere

        return group_norm(x, norm.weight, norm.bias, norm.num_groups, norm.eps)
    return norm(x)


def _fuses(x: Tensor) -> bool:
    return can_fuse(x) and x.numel() > 0 and x.is_contiguous(memory_format=torch.channels_last)
