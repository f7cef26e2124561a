"""`grid_sample` with derivatives of any order: PyTorch 2.11 has the first one only."""

from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def bilinear_sample(planes: Tensor, grid: Tensor) -> Tensor:
    """Samples feature maps bilinearly, zero outside (`grid_sample` with align_corners=False).

    Args:
        planes: `[B*M, D, h, w]`.
        grid: `[B*M, Q, K, 2]` (x, y), finite; -1..1 spans the map.

    Returns:
        `[B*M, D, Q, K]`.

    Notes:
        Differentiable any number of times in both. A first derivative costs what it does in `grid_sample`; under
        `create_graph` it is computed by gathers, slower and with more memory.
    """
    return _BilinearSample.apply(planes, grid)


class _BilinearSample(torch.autograd.Function):
    @staticmethod
    def forward(planes: Tensor, grid: Tensor) -> Tensor:
        return F.grid_sample(planes, grid, mode="bilinear", padding_mode="zeros", align_corners=False)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad_samples: Tensor) -> tuple[Tensor | None, Tensor | None]:
        planes, grid = ctx.saved_tensors
        needs = ctx.needs_input_grad
        if not torch.is_grad_enabled():
            bilinear, zeros, align_corners = 0, 0, False
            return torch.ops.aten.grid_sampler_2d_backward(
                grad_samples, planes, grid, bilinear, zeros, align_corners, needs
            )
        # create_graph is on: these gradients need gradients themselves.
        needed = [tensor for tensor, needed in zip((planes, grid), needs, strict=True) if needed]
        samples = _gather_samples(planes, grid)
        gradients = iter(torch.autograd.grad(samples, needed, grad_samples, create_graph=True))
        return (next(gradients) if needs[0] else None), (next(gradients) if needs[1] else None)


def _gather_samples(planes: Tensor, grid: Tensor) -> Tensor:
    """The same samples from operations that PyTorch differentiates without end."""
    channels, h, w = planes.shape[1:]
    rows = planes.flatten(2)
    column, row = ((grid[..., 0] + 1) * w - 1) / 2, ((grid[..., 1] + 1) * h - 1) / 2
    left, top = column.detach().floor(), row.detach().floor()
    samples = planes.new_zeros(planes.shape[0], channels, *grid.shape[1:3])
    for corner_row, corner_column in product((top, top + 1), (left, left + 1)):
        inside = (corner_row >= 0) & (corner_row < h) & (corner_column >= 0) & (corner_column < w)
        share = (1 - (row - corner_row).abs()) * (1 - (column - corner_column).abs()) * inside
        pixel = corner_row.clamp(0, h - 1).long() * w + corner_column.clamp(0, w - 1).long()
        corners = rows.gather(2, pixel.flatten(1)[:, None].expand(-1, channels, -1))
        samples = samples + corners.view_as(samples) * share[:, None]
    return samples
