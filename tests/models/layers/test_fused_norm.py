from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from models.layers.residual_norm import ResidualNorm
from parity.tolerances import GRADIENT, OUTPUT

pytest.importorskip("triton")

from models.layers.dropout_kernels import round_probability
from models.layers.fused_norm import forward, residual_norm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 1e-5
SIZES = [(5, 32), (3, 20), (1, 4), (70, 256)]


def make_inputs(rows: int, channels: int, dtype: torch.dtype, branch_dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    residual, branch, gradient = torch.randn(3, rows, channels, generator=generator)
    weight, bias = torch.randn(2, channels, generator=generator)
    tensors = (residual.to(dtype), branch.to(branch_dtype), weight, bias, gradient.to(dtype))
    return [tensor.to(DEVICE) for tensor in tensors]


def differentiate(function: Callable[..., Tensor], tensors: list[Tensor]) -> list[Tensor]:
    leaves = [tensor.detach().requires_grad_() for tensor in tensors[:4]]
    output = function(*leaves)
    return [output.detach(), *torch.autograd.grad(output, leaves, tensors[4].to(output.dtype))]


def compose(keep: Tensor, scale: float) -> Callable[..., Tensor]:
    def function(residual: Tensor, branch: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        summed = residual + torch.where(keep, branch * scale, 0)
        return layer_norm(summed, summed.shape[-1:], weight.to(summed), bias.to(summed), EPS)

    return function


def fuse(seed: int | None, probability: float, dtype: torch.dtype) -> Callable[..., Tensor]:
    seeds = None if seed is None else torch.tensor([seed], device=DEVICE)
    return lambda *leaves: residual_norm(*leaves, seeds, probability, EPS, dtype)


def kept(seed: int, probability: float, rows: int, channels: int) -> Tensor:
    """What the backward pass keeps: where the branch has a gradient."""
    tensors = make_inputs(rows, channels, torch.float32, torch.float32)
    return differentiate(fuse(seed, probability, torch.float32), tensors)[2] != 0


@pytest.mark.parametrize(("rows", "channels"), SIZES)
@pytest.mark.parametrize("seed", [None, 7])
@pytest.mark.parametrize(
    ("dtype", "branch_dtype"),
    [(torch.float32, torch.float32), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16)],
)
def test_output_and_gradients_against_float64(
    rows: int, channels: int, seed: int | None, dtype: torch.dtype, branch_dtype: torch.dtype
) -> None:
    probability = 0.0 if seed is None else 0.3
    tensors = make_inputs(rows, channels, dtype, branch_dtype)
    keep = torch.ones_like(tensors[0], dtype=torch.bool) if seed is None else kept(seed, probability, rows, channels)
    composed = compose(keep, round_probability(probability)[1])
    expected = differentiate(composed, [tensor.double() for tensor in tensors])
    competitor = differentiate(composed, tensors)
    actual = differentiate(fuse(seed, probability, dtype), tensors)
    assert [tensor.dtype for tensor in actual] == [dtype, dtype, branch_dtype, torch.float32, torch.float32]
    bounds = (OUTPUT, GRADIENT, GRADIENT, GRADIENT, GRADIENT)
    for exact, other, mine, bound in zip(expected, competitor, actual, bounds, strict=True):
        limit = bound.limit(float((other - exact).abs().max()), float(exact.abs().max()), mine.dtype)
        assert (mine - exact).abs().max() <= limit
        assert (mine * 0.9 - exact).abs().max() > limit or exact.abs().max() < 1e-3


def test_drops_the_share_asked_for_by_seed() -> None:
    first, again, other = (kept(seed, 0.3, 256, 64) for seed in (7, 7, 8))
    assert torch.equal(first, again)
    assert 0.25 < (first != other).float().mean() < 0.6  # 2 * 0.3 * 0.7 = 0.42 for independent draws
    assert abs(first.float().mean() - 0.7) < 0.015  # four deviations
    for dimension in (0, 1):
        assert (first.float().mean(dimension) - 0.7).abs().max() < 0.3
    neighbours = (first[:, 1:] & first[:, :-1]).float().mean()
    assert abs(neighbours - 0.49) < 0.02


def test_no_rows_give_no_output() -> None:
    output = fuse(None, 0.0, torch.float32)(*make_inputs(0, 8, torch.float32, torch.float32)[:4])
    assert output.shape == (0, 8)


def test_the_op_is_registered_soundly() -> None:
    tensors = make_inputs(3, 8, torch.float32, torch.float32)
    leaves = [tensor.requires_grad_() for tensor in tensors[:4]]
    seeds = torch.tensor([3], device=DEVICE)
    arguments = (*leaves, seeds, 0.2, EPS, torch.float32)
    torch.library.opcheck(forward, arguments)
    output, expected = forward(*arguments)[0], residual_norm(*arguments)
    assert torch.equal(output, expected)
    gradients = [torch.autograd.grad(result, leaves, tensors[4]) for result in (output, expected)]
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_module_fuses_on_a_gpu(dtype: torch.dtype) -> None:
    residual, branch, gradient = torch.randn(3, 2, 300, 256, device="cuda").to(dtype)
    results = []
    for fused in (True, False):
        norm = ResidualNorm(256, dropout=0.1, fused=fused).cuda().eval()
        leaves = [tensor.clone().requires_grad_() for tensor in (residual, branch)]
        with torch.autocast("cuda", torch.bfloat16, enabled=dtype == torch.bfloat16):
            output = norm(*leaves, dtype)
        output.backward(gradient)
        results.append([output, *(leaf.grad for leaf in leaves), norm.weight.grad, norm.bias.grad])
    tolerance = {torch.float32: 1e-4, torch.bfloat16: 5e-2}[dtype]
    for fused_tensor, composed in zip(*results, strict=True):
        torch.testing.assert_close(fused_tensor, composed, atol=tolerance * float(composed.abs().max()), rtol=0)
    norm = ResidualNorm(256, dropout=0.1, fused=True).cuda()
    outputs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outputs.append(norm(residual, branch, dtype))
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])
