"""`grid_sample` with derivatives of any order: PyTorch 2.11 has the first one only."""

from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def bilinear_sample(planes: Tensor, grid: Tensor, padding_mode: str, align_corners: bool) -> Tensor:
    """Samples feature maps bilinearly, as `torch.nn.functional.grid_sample` does.

    Args:
        planes: `[B*M, D, h, w]`.
        grid: `[B*M, Q, K, 2]` (x, y), no NaN; -1..1 spans the map.
        padding_mode: "zeros" or "border".
        align_corners: whether -1 and 1 are the centres of the outermost pixels, instead of their outer edges.

    Returns:
        `[B*M, D, Q, K]`.

    Notes:
        Differentiable any number of times in both. A first derivative costs what it does in `grid_sample`; under
        `create_graph` it is computed by gathers, slower and with more memory.
    """
    return _BilinearSample.apply(planes, grid, padding_mode, align_corners)


class _BilinearSample(torch.autograd.Function):
    @staticmethod
    def forward(planes: Tensor, grid: Tensor, padding_mode: str, align_corners: bool) -> Tensor:
        return F.grid_sample(planes, grid, mode="bilinear", padding_mode=padding_mode, align_corners=align_corners)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, str, bool], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])
        ctx.conventions = inputs[2:]

    @staticmethod
    def backward(ctx: Any, grad_samples: Tensor) -> tuple[Tensor | None, ...]:
        planes, grid = ctx.saved_tensors
        padding_mode, align_corners = ctx.conventions
        needs = ctx.needs_input_grad[:2]
        if not torch.is_grad_enabled():
            bilinear, padding = 0, ("zeros", "border").index(padding_mode)
            grads = torch.ops.aten.grid_sampler_2d_backward(
                grad_samples, planes, grid, bilinear, padding, align_corners, needs
            )
            return *grads, None, None
        # create_graph is on: these gradients need gradients themselves.
        needed = [tensor for tensor, needed in zip((planes, grid), needs, strict=True) if needed]
        samples = _gather_samples(planes, grid, padding_mode, align_corners)
        gradients = iter(torch.autograd.grad(samples, needed, grad_samples, create_graph=True))
        return (next(gradients) if needs[0] else None), (next(gradients) if needs[1] else None), None, None


def _gather_samples(planes: Tensor, grid: Tensor, padding_mode: str, align_corners: bool) -> Tensor:
    """The same samples from operations that PyTorch differentiates without end."""
    channels, h, w = planes.shape[1:]
    rows = planes.flatten(2)
    column, row = (_coordinate(grid[..., axis], size, padding_mode, align_corners) for axis, size in enumerate((w, h)))
    left, top = column.detach().floor(), row.detach().floor()
    samples = planes.new_zeros(planes.shape[0], channels, *grid.shape[1:3])
    for corner_row, corner_column in product((top, top + 1), (left, left + 1)):
        inside = (corner_row >= 0) & (corner_row < h) & (corner_column >= 0) & (corner_column < w)
        share = (1 - (row - corner_row).abs()) * (1 - (column - corner_column).abs()) * inside
        pixel = corner_row.clamp(0, h - 1).long() * w + corner_column.clamp(0, w - 1).long()
        corners = rows.gather(2, pixel.flatten(1)[:, None].expand(-1, channels, -1))
        samples = samples + corners.view_as(samples) * share[:, None]
    return samples


def _coordinate(position: Tensor, size: int, padding_mode: str, align_corners: bool) -> Tensor:
    """Returns the pixel coordinate of a position in -1..1; under border padding one moved to an end has no slope."""
    coordinate = (position + 1) / 2 * (size - 1) if align_corners else ((position + 1) * size - 1) / 2
    if padding_mode == "zeros":
        return coordinate
    between = (coordinate > 0) & (coordinate < size - 1)
    return torch.where(between, coordinate, coordinate.detach().clamp(0, size - 1))
