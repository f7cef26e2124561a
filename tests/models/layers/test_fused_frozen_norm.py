from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torchvision.ops import FrozenBatchNorm2d

from models.layers.frozen_norm import FoldedBatchNorm2d
from models.layers.residual_blocks import norm_relu, norm_residual_relu
from parity.tolerances import GRADIENT, OUTPUT

pytest.importorskip("triton")

from models.layers.fused_frozen_norm import frozen_norm_relu, frozen_norm_residual_relu

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(2, 64, 3, 5), (1, 20, 4, 3), (3, 5, 1, 1), (1, 192, 13, 11)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
RESIDUALS = ["none", "plain", "normalised"]


pytestmark = pytest.mark.usefixtures("poisoned_memory")


def make_norm(channels: int, seed: int) -> FoldedBatchNorm2d:
    generator = torch.Generator().manual_seed(seed)
    norm = FoldedBatchNorm2d(channels)
    for name, buffer in norm.named_buffers():
        values = torch.randn(channels, generator=generator)
        buffer.copy_(values.abs() + 0.3 if name == "running_var" else values)
    return norm.to(DEVICE)


def make_inputs(shape: tuple[int, ...], dtype: torch.dtype, residual_dtype: torch.dtype) -> list[Tensor]:
    """Returns input, residual and upstream gradient, channels last."""
    generator = torch.Generator().manual_seed(0)
    dtypes = (dtype, residual_dtype, dtype)
    tensors = [torch.randn(shape, generator=generator).to(DEVICE, each) for each in dtypes]
    return [tensor.contiguous(memory_format=torch.channels_last) for tensor in tensors]


def differentiate(function: Callable[[Tensor, Tensor], Tensor], tensors: list[Tensor]) -> list[Tensor]:
    """Returns the output and the gradients of input and residual, zero where the residual is not used."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors[:2]]
    output = function(*leaves)
    upstream = tensors[2].to(output.dtype)
    return [output.detach(), *torch.autograd.grad(output, leaves, upstream, allow_unused=True, materialize_grads=True)]


def fuse(norms: list[FoldedBatchNorm2d], kind: str) -> Callable[[Tensor, Tensor], Tensor]:
    if kind == "none":
        return lambda x, residual: frozen_norm_relu(x, norms[0])
    second = norms[1] if kind == "normalised" else None
    return lambda x, residual: frozen_norm_residual_relu(x, norms[0], residual, second)[0]


def compose(norms: list[FoldedBatchNorm2d], kind: str, kept: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """Composes in the dtype of the input, on given sides of the ReLU."""

    def function(x: Tensor, residual: Tensor) -> Tensor:
        first, second = (FoldedBatchNorm2d(x.shape[1]).to(x) for _ in norms)
        for mine, norm in zip((first, second), norms, strict=True):
            mine.load_state_dict(norm.state_dict())
        summed = first(x)
        if kind != "none":
            summed = summed + (second(residual.to(x)) if kind == "normalised" else residual)
        return torch.where(kept, summed, 0)

    return function


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", RESIDUALS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_output_and_gradients_against_float64(shape: tuple[int, ...], kind: str, dtype: torch.dtype) -> None:
    norms = [make_norm(shape[1], seed) for seed in (1, 2)]
    tensors = make_inputs(shape, dtype, dtype)
    actual = differentiate(fuse(norms, kind), tensors)
    composed = compose(norms, kind, actual[0] > 0)
    expected = differentiate(composed, [tensor.double() for tensor in tensors])
    competitor = differentiate(composed, tensors)
    assert [tensor.dtype for tensor in actual] == [dtype] * 3
    for exact, other, mine, bound in zip(expected, competitor, actual, (OUTPUT, GRADIENT, GRADIENT), strict=True):
        limit = bound.limit(float((other - exact).abs().max()), float(exact.abs().max()), dtype)
        assert (mine - exact).abs().max() <= limit
        assert (mine * 0.9 - exact).abs().max() > limit or exact.abs().max() == 0


@pytest.mark.parametrize("kind", RESIDUALS)
def test_rectifies_on_the_sides_of_the_composed_norm(kind: str) -> None:
    norms = [make_norm(20, seed) for seed in (1, 2)]
    tensors = [tensor.double() for tensor in make_inputs((2, 20, 7, 5), torch.float32, torch.float32)]
    everywhere = torch.ones_like(tensors[0], dtype=torch.bool)
    summed = differentiate(compose(norms, kind, everywhere), tensors)[0]
    clear = summed.abs() > 1e-4
    output, grad_x, _ = differentiate(fuse(norms, kind), [tensor.float() for tensor in tensors])
    assert torch.equal((output > 0)[clear], (summed > 0)[clear])
    assert torch.equal((grad_x != 0)[clear], (summed > 0)[clear])
    assert 0.2 < (summed > 0).float().mean() < 0.8


def test_only_the_gradients_asked_for_are_written() -> None:
    norms = [make_norm(8, seed) for seed in (1, 2)]
    x, residual, upstream = make_inputs((2, 8, 3, 2), torch.float32, torch.float32)
    both = differentiate(fuse(norms, "normalised"), [x, residual, upstream])[1:]
    for index, asked in enumerate((x, residual)):
        leaf = asked.clone().requires_grad_()
        arguments = (leaf, residual) if index == 0 else (x, leaf)
        (alone,) = torch.autograd.grad(fuse(norms, "normalised")(*arguments), leaf, upstream)
        assert torch.equal(alone, both[index])
    assert not fuse(norms, "normalised")(x, residual).requires_grad


@pytest.mark.parametrize("kind", ["plain", "normalised"])
def test_gradients_of_two_readers_are_added(kind: str) -> None:
    norms = [make_norm(20, seed) for seed in (1, 2)]
    *tensors, upstream = make_inputs((2, 20, 3, 5), torch.float32, torch.float32)
    leaves = [tensor.requires_grad_() for tensor in tensors]
    outputs = frozen_norm_residual_relu(leaves[0], norms[0], leaves[1], norms[1] if kind == "normalised" else None)
    assert outputs[0].data_ptr() == outputs[1].data_ptr()
    other = torch.flip(upstream, (0,))
    both = torch.autograd.grad(outputs, leaves, (upstream, other), retain_graph=True)
    summed = torch.autograd.grad(outputs[1], leaves, upstream + other, retain_graph=True)
    alone = torch.autograd.grad(outputs[0], leaves, upstream)
    for one, expected, different in zip(both, summed, alone, strict=True):
        assert torch.equal(one, expected)
        assert not torch.equal(one, different)


def test_a_residual_of_another_dtype_has_a_gradient_of_its_own() -> None:
    norms = [make_norm(8, seed) for seed in (1, 2)]
    tensors = make_inputs((2, 8, 3, 2), torch.bfloat16, torch.float32)
    output, grad_x, grad_residual = differentiate(fuse(norms, "plain"), tensors)
    assert [tensor.dtype for tensor in (output, grad_x, grad_residual)] == [torch.bfloat16] * 2 + [torch.float32]
    assert torch.equal(grad_residual, torch.where(output > 0, tensors[2].float(), 0))


@pytest.mark.parametrize("contiguous", [(0,), (1,), (2,), (0, 1, 2)])
def test_memory_formats_agree(contiguous: tuple[int, ...]) -> None:
    norms = [make_norm(20, seed) for seed in (1, 2)]
    tensors = make_inputs((2, 20, 3, 5), torch.float32, torch.float32)
    mixed = [tensor.contiguous() if index in contiguous else tensor for index, tensor in enumerate(tensors)]
    results = [differentiate(fuse(norms, "normalised"), each) for each in (mixed, tensors)]
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
        assert one.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("shape", [(0, 8, 3, 2), (2, 8, 0, 2)])
def test_no_pixels_give_no_output(shape: tuple[int, ...]) -> None:
    norms = [make_norm(8, seed) for seed in (1, 2)]
    results = differentiate(fuse(norms, "plain"), make_inputs(shape, torch.float32, torch.float32))
    assert all(tensor.shape == shape for tensor in results)


def test_nan_stays_nan() -> None:
    norms = [make_norm(8, seed) for seed in (1, 2)]
    x, residual, upstream = make_inputs((1, 8, 3, 2), torch.float32, torch.float32)
    x[0, 3, 1, 1] = float("nan")
    output, grad_x, _ = differentiate(fuse(norms, "plain"), [x, residual, upstream])
    assert output.isnan().nonzero().tolist() == [[0, 3, 1, 1]]
    assert grad_x.isfinite().all()
    assert grad_x[0, 3, 1, 1] != 0  # as the gradient of PyTorch's ReLU


@pytest.mark.gpu
@pytest.mark.parametrize("kind", RESIDUALS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_large_tensor_on_a_gpu(kind: str, dtype: torch.dtype) -> None:
    norms = [make_norm(256, seed) for seed in (1, 2)]
    tensors = make_inputs((2, 256, 100, 167), dtype, dtype)
    actual = differentiate(fuse(norms, kind), tensors)
    expected = differentiate(compose(norms, kind, actual[0] > 0), [tensor.double() for tensor in tensors])
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 1e-2}[dtype]
    for exact, mine in zip(expected, actual, strict=True):
        torch.testing.assert_close(mine.double(), exact, atol=tolerance, rtol=tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize(("fused", "folded"), [(True, False), (False, False), (True, True)])
def test_norm_relu_fuses_on_a_gpu_what_may_be_fused(fused: bool, folded: bool) -> None:
    norm = make_norm(64, 1)
    norm.fused, norm.folded = fused, folded
    x, residual, _ = make_inputs((2, 64, 5, 7), torch.float32, torch.float32)
    for added in (None, residual):
        features = x.clone().requires_grad_() * 1
        if added is None:
            output = norm_relu(features, norm)
        else:
            output, again = norm_residual_relu(features, norm, added, None)
            assert torch.equal(output, again)
        name = "_FrozenNormReluBackward" if fused and not folded else "ReluBackward0"
        assert type(output.grad_fn).__name__ == name
        normalised = x if folded else FrozenBatchNorm2d.forward(norm, x)
        expected = torch.relu(normalised if added is None else normalised + added)
        torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)
