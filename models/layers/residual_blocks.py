"""Residual blocks of a ResNet whose norms take the ReLU and the sum behind them along."""

import torch
import torchvision.models.resnet
from torch import Tensor, nn

from models.layers.frozen_norm import FoldedBatchNorm2d


class BasicBlock(torchvision.models.resnet.BasicBlock):
    """Two 3x3 convolutions and a shortcut (arXiv 1512.03385, figure 5 left), by `norm_relu`."""

    def forward(self, x: Tensor) -> Tensor:
        """Maps float [B, C, H, W] to the block's channels and stride."""
        out = norm_relu(self.conv1(x), self.bn1)
        return norm_relu(self.conv2(out), self.bn2, *_shortcut(x, self.downsample))


class Bottleneck(torchvision.models.resnet.Bottleneck):
    """1x1, 3x3 and 1x1 convolutions and a shortcut (arXiv 1512.03385, figure 5 right), by `norm_relu`."""

    def forward(self, x: Tensor) -> Tensor:
        """Maps float [B, C, H, W] to the block's channels and stride."""
        out = norm_relu(self.conv1(x), self.bn1)
        out = norm_relu(self.conv2(out), self.bn2)
        return norm_relu(self.conv3(out), self.bn3, *_shortcut(x, self.downsample))


def norm_relu(
    x: Tensor, norm: nn.Module, residual: Tensor | None = None, residual_norm: nn.Module | None = None
) -> Tensor:
    """Computes ReLU(norm(x) + residual_norm(residual)).

    Norms that are `FoldedBatchNorm2d`, `fused` and not folded become one kernel with the rest where `can_fuse` says so.
    Elsewhere the same is composed of PyTorch's functions.

    Args:
        x: float [B, C, H, W], the result of a convolution, which may be overwritten.
        norm: any module of such tensors.
        residual: what is added, the same shape; None adds nothing.
        residual_norm: of the residual; None adds it as it is.

    Returns:
        float [B, C, H, W].
    """
    if isinstance(norm, FoldedBatchNorm2d) and norm.fused and not norm.folded and can_fuse(x):
        from models.layers.fused_frozen_norm import frozen_norm_relu  # Triton, which is not installed everywhere

        assert residual_norm is None or isinstance(residual_norm, FoldedBatchNorm2d)
        return frozen_norm_relu(x, norm, residual, residual_norm)
    out = norm(x)
    if residual is not None:
        out += residual if residual_norm is None else residual_norm(residual)
    return torch.relu_(out)


def can_fuse(x: Tensor) -> bool:
    """Whether a kernel can take a tensor: float32 or half precision on a GPU; what is compiled is fused without it."""
    return x.is_cuda and x.dtype != torch.float64 and not torch.compiler.is_compiling()


def _shortcut(x: Tensor, downsample: nn.Module | None) -> tuple[Tensor, nn.Module | None]:
    """Returns what a block adds, and the norm that it lacks."""
    if downsample is None:
        return x, None
    convolution, norm = downsample.children()
    return convolution(x), norm
