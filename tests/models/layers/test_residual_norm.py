import pytest
import torch

from models.layers.residual_norm import ResidualNorm

WIDTH = 12


def build(dropout: float) -> ResidualNorm:
    norm = ResidualNorm(WIDTH, dropout=dropout, fused=True)
    torch.nn.init.normal_(norm.weight)
    torch.nn.init.normal_(norm.bias)
    return norm


def test_by_hand_without_dropout() -> None:
    norm = build(dropout=0.5).eval()
    residual, branch = torch.randn(2, 3, WIDTH)
    summed = residual + branch
    centred = summed - summed.mean(-1, keepdim=True)
    expected = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight + norm.bias
    torch.testing.assert_close(norm(residual, branch, torch.float32), expected)


def test_drops_the_branch_only() -> None:
    norm = build(dropout=1.0)
    residual, branch = torch.randn(2, 3, WIDTH)
    torch.testing.assert_close(norm(residual, branch, torch.float32), norm(residual, 0 * branch, torch.float32))
    assert not torch.allclose(norm.eval()(residual, branch, torch.float32), norm(residual, 0 * branch, torch.float32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_output_has_the_dtype_asked_for(dtype: torch.dtype) -> None:
    residual, branch = torch.randn(3, WIDTH, dtype=torch.bfloat16), torch.randn(3, WIDTH, dtype=torch.bfloat16)
    assert build(dropout=0.0)(residual, branch, dtype).dtype == dtype
