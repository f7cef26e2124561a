"""`grid_sample` through the op against PyTorch's."""

import pytest
import torch
import torch.nn.functional as F

from msda_op import grid_sample

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def planes_and_grid(channels: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    planes = torch.randn(2, channels, 4, 5, generator=generator).to(DEVICE, dtype)
    grid = (torch.rand(2, 3, 4, 2, generator=generator) * 3 - 1.5).to(DEVICE)  # some of it outside
    return planes.requires_grad_(), grid.requires_grad_()


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("align_corners", [False, True])
@pytest.mark.parametrize("padding_mode", ["zeros", "border"])
def test_equals_pytorch(padding_mode: str, align_corners: bool, backend: str) -> None:
    inputs = planes_and_grid(3, torch.float32)
    settings = {"padding_mode": padding_mode, "align_corners": align_corners}
    actual, expected = grid_sample(*inputs, **settings, backend=backend), F.grid_sample(*inputs, **settings)
    torch.testing.assert_close(actual, expected, rtol=0, atol=2e-6)
    upstream = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    gradients = (torch.autograd.grad(output, inputs, upstream) for output in (actual, expected))
    for gradient, other in zip(*gradients, strict=True):
        torch.testing.assert_close(gradient, other, rtol=0, atol=1e-5)


@pytest.mark.parametrize("channels", [1, 300])
def test_any_number_of_channels(channels: int) -> None:
    planes, grid = planes_and_grid(channels, torch.bfloat16)
    output = grid_sample(planes.transpose(2, 3), grid, backend="triton")
    expected = F.grid_sample(planes.transpose(2, 3).float(), grid, align_corners=False)
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.float(), expected, rtol=2**-7, atol=1e-2)


def test_swapped_axes_differ() -> None:
    planes, grid = planes_and_grid(3, torch.float32)
    expected = F.grid_sample(planes, grid, align_corners=False)
    assert (grid_sample(planes, grid.flip(-1)) - expected).abs().max() > 0.1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mode": "nearest"}, "mode must be 'bilinear', got 'nearest'"),
        ({"padding_mode": "reflection"}, "padding_mode must be one of zeros, border, got 'reflection'"),
        ({"input": torch.rand(3, 4, 5)}, r"input must have 4 dimensions \[B, C, H, W\], got shape \(3, 4, 5\)"),
        ({"grid": torch.rand(1, 3, 4, 2)}, r"grid must be \[B=2, height, width, 2\], got shape \(1, 3, 4, 2\)"),
    ],
)
def test_refuses(changes: dict[str, object], message: str) -> None:
    planes, grid = torch.rand(2, 3, 4, 5), torch.rand(2, 3, 4, 2)
    with pytest.raises(ValueError, match=message):
        grid_sample(**{"input": planes, "grid": grid, **changes})
