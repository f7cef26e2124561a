"""Residual blocks of a ResNet whose norms take the ReLU and the sum behind them along.

A block hands its output to the next one twice, for its convolutions and for its shortcut: a kernel that has made it
gets two gradients then, and adds them up itself.
"""

import torch
import torchvision.models.resnet
from torch import Tensor, nn

from models.layers.frozen_norm import FoldedBatchNorm2d


class BasicBlock(torchvision.models.resnet.BasicBlock):
    """Two 3x3 convolutions and a shortcut (arXiv 1512.03385, figure 5 left)."""

    def forward(self, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Maps float [B, C, H, W], twice, to the block's channels and stride, twice."""
        x, shortcut = inputs
        out = norm_relu(self.conv1(x), self.bn1)
        return norm_residual_relu(self.conv2(out), self.bn2, *_project(shortcut, self.downsample))


class Bottleneck(torchvision.models.resnet.Bottleneck):
    """1x1, 3x3 and 1x1 convolutions and a shortcut (arXiv 1512.03385, figure 5 right)."""

    def forward(self, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Maps float [B, C, H, W], twice, to the block's channels and stride, twice."""
        x, shortcut = inputs
        out = norm_relu(self.conv1(x), self.bn1)
        out = norm_relu(self.conv2(out), self.bn2)
        return norm_residual_relu(self.conv3(out), self.bn3, *_project(shortcut, self.downsample))


def norm_relu(x: Tensor, norm: nn.Module) -> Tensor:
    """Computes ReLU(norm(x)).

    A norm that is `FoldedBatchNorm2d`, `fused` and not folded becomes one kernel with the rest where `can_fuse` says
    so; elsewhere the same is composed of PyTorch's functions.

    Args:
        x: float [B, C, H, W], the result of a convolution, which may be overwritten.
        norm: any module of such tensors.

    Returns:
        float [B, C, H, W].
    """
    if fuses_norm(x, norm):
        from models.layers.fused_frozen_norm import frozen_norm_relu  # Triton, which is not installed everywhere

        return frozen_norm_relu(x, norm)
    return torch.relu_(norm(x))


def norm_residual_relu(
    x: Tensor, norm: nn.Module, residual: Tensor, residual_norm: nn.Module | None
) -> tuple[Tensor, Tensor]:
    """Computes ReLU(norm(x) + residual_norm(residual)), by one kernel where `norm_relu` is one.

    Args:
        x: float [B, C, H, W], the result of a convolution, which may be overwritten.
        norm: of x.
        residual: the same shape.
        residual_norm: of the residual, of the kind of the other norm; None adds it as it is.

    Returns:
        float [B, C, H, W], twice.
    """
    if fuses_norm(x, norm):
        from models.layers.fused_frozen_norm import frozen_norm_residual_relu

        return frozen_norm_residual_relu(x, norm, residual, residual_norm)
    out = norm(x)
    out += residual if residual_norm is None else residual_norm(residual)
    out = torch.relu_(out)
    return out, out


def can_fuse(x: Tensor) -> bool:
    """Whether a kernel can take a tensor: float32 or half precision on a GPU; what is compiled is fused without it."""
    return x.is_cuda and x.dtype != torch.float64 and not torch.compiler.is_compiling()


def fuses_norm(x: Tensor, norm: nn.Module) -> bool:
    """Whether a kernel takes a norm into what follows it: where `can_fuse` says so, and the norm is for it."""
    return isinstance(norm, FoldedBatchNorm2d) and norm.fused and not norm.folded and can_fuse(x)


def _project(shortcut: Tensor, downsample: nn.Module | None) -> tuple[Tensor, nn.Module | None]:
    """Returns what a block adds, and the norm that it lacks."""
    if downsample is None:
        return shortcut, None
    convolution, norm = downsample.children()
    return convolution(shortcut), norm
