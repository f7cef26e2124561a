"""Bilinear sampling against `grid_sample`, and its derivatives."""

import pytest
import torch
import torch.nn.functional as F

from msda_op.bilinear import bilinear_sample


def planes_and_grid() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    planes = torch.randn(2, 3, 4, 5, generator=generator, dtype=torch.float64)
    grid = torch.rand(2, 6, 2, 2, generator=generator, dtype=torch.float64) * 3 - 1.5  # some of it outside
    return planes.requires_grad_(), grid.requires_grad_()


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True)])
def test_samples_and_first_derivatives_equal_grid_sample(needs: tuple[bool, bool], create_graph: bool) -> None:
    inputs = [tensor.detach().requires_grad_(need) for tensor, need in zip(planes_and_grid(), needs, strict=True)]
    needed = [tensor for tensor in inputs if tensor.requires_grad]
    actual, expected = bilinear_sample(*inputs, "zeros", False), F.grid_sample(*inputs, align_corners=False)
    assert torch.equal(actual, expected)
    upstream = torch.randn(actual.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gradients = torch.autograd.grad(actual, needed, upstream, create_graph=create_graph)
    for gradient, other in zip(gradients, torch.autograd.grad(expected, needed, upstream), strict=True):
        torch.testing.assert_close(gradient, other, rtol=0, atol=1e-12)


def test_second_derivatives() -> None:
    assert torch.autograd.gradgradcheck(lambda *inputs: bilinear_sample(*inputs, "zeros", False), planes_and_grid())
