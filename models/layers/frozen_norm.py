"""Batch norms with fixed statistics, folded into the convolutions before them."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import torch
from torch import Tensor, nn
from torchvision.ops import FrozenBatchNorm2d

from models.weight_casts import Place, replacing_parameters


class FoldedBatchNorm2d(FrozenBatchNorm2d):
    """A batch norm with fixed statistics that the convolution before it can apply, see `folding_norms`.

    Attributes:
        folded: whether the input is normalised already.
        fused: whether `norm_relu` may take it into one kernel with what follows.
    """

    folded: bool = False
    fused: bool = False

    def forward(self, x: Tensor) -> Tensor:
        """Normalises float [B, C, H, W], unless the convolution has done so."""
        return x if self.folded else super().forward(x)


@contextmanager
def folding_norms(root: nn.Module) -> Iterator[None]:
    """Lets each convolution in front of a `FoldedBatchNorm2d` apply the norm: one pass over the features less.

    norm(conv(x, w)) = conv(x, scale * w) + shift, with scale = weight / sqrt(running_var + eps) and shift = bias -
    scale * running_mean. Gradients reach the convolution's own weight through the product.

    Args:
        root: a module; below it a norm follows a convolution without bias among the children of its parent.
    """
    pairs = [
        (first, second)
        for parent in root.modules()
        for first, second in pairwise(parent.children())
        if isinstance(first, nn.Conv2d) and isinstance(second, FoldedBatchNorm2d)
    ]
    if not pairs:
        yield
        return
    scales, shifts = scales_and_shifts([norm for _, norm in pairs])
    weights = [convolution.weight for convolution, _ in pairs]
    products = torch._foreach_mul(weights, [scale.view(-1, 1, 1, 1) for scale in scales])
    # All products are differentiable where one is: frozen stages would get a backward pass for nothing.
    folded = [
        product if weight.requires_grad else product.detach() for product, weight in zip(products, weights, strict=True)
    ]
    places = [Place(convolution, name) for name in ("weight", "bias") for convolution, _ in pairs]
    for _, norm in pairs:
        norm.folded = True
    try:
        with replacing_parameters(places, [*folded, *shifts]):
            yield
    finally:
        for _, norm in pairs:
            norm.folded = False


@torch.no_grad()
def scales_and_shifts(norms: list[FoldedBatchNorm2d]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Returns what each norm multiplies its input by, and what it adds then: float32 [channels] each."""
    deviations = torch._foreach_sqrt(torch._foreach_add([norm.running_var for norm in norms], norms[0].eps))
    scales = torch._foreach_div([norm.weight for norm in norms], deviations)
    shifts = torch._foreach_sub(
        [norm.bias for norm in norms], torch._foreach_mul([norm.running_mean for norm in norms], scales)
    )
    return scales, shifts
