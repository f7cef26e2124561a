from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from parity.tolerances import FLOAT32_ROUNDOFF, GRADIENT, OUTPUT

pytest.importorskip("triton")

from models.layers import fused_group_norm
from models.layers.fused_group_norm import group_norm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 1e-5
SIZES = [
    ((2, 256, 3, 5), 32),
    ((1, 64, 37, 41), 8),  # several blocks a chunk, the last one cut short
    ((3, 96, 5, 7), 32),  # three channels a group
    ((2, 20, 4, 3), 4),
    ((2, 24, 1, 1), 2),
    ((1, 16, 3, 6), 1),
    ((2, 16, 3, 6), 16),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


pytestmark = pytest.mark.usefixtures("poisoned_memory")


def make_inputs(shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """Returns x and upstream gradient, channels last, channels with means of their own; and weight and bias."""
    generator = torch.Generator().manual_seed(0)
    x, upstream = torch.randn(2, *shape, generator=generator)
    weight, bias, offset = torch.randn(3, shape[1], generator=generator)
    x += offset.view(-1, 1, 1)
    maps = [tensor.to(DEVICE, dtype).contiguous(memory_format=torch.channels_last) for tensor in (x, upstream)]
    return [maps[0], weight.to(DEVICE), bias.to(DEVICE), maps[1]]


def differentiate(function: Callable[..., Tensor], tensors: list[Tensor]) -> list[Tensor]:
    """Returns the output, and the gradients of x, weight and bias."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors[:3]]
    output = function(*leaves)
    return [output.detach(), *torch.autograd.grad(output, leaves, tensors[3].to(output.dtype))]


def fuse(num_groups: int) -> Callable[..., Tensor]:
    return lambda x, weight, bias: group_norm(x, weight, bias, num_groups, EPS)


def compose(num_groups: int) -> Callable[..., Tensor]:
    """Composes in the dtype of the input."""
    return lambda x, weight, bias: functional.group_norm(x, num_groups, weight.to(x), bias.to(x), EPS)


@pytest.mark.parametrize(("shape", "num_groups"), SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_output_and_gradients_against_float64(shape: tuple[int, ...], num_groups: int, dtype: torch.dtype) -> None:
    tensors = make_inputs(shape, dtype)
    actual = differentiate(fuse(num_groups), tensors)
    expected = differentiate(compose(num_groups), [tensor.double() for tensor in tensors])
    # Sums for the parameters are never rounded to a half precision, so that float32 is their competitor.
    competitor = differentiate(compose(num_groups), tensors)[:2]
    competitor += differentiate(compose(num_groups), [tensor.float() for tensor in tensors])[2:]
    assert [tensor.dtype for tensor in actual] == [dtype, dtype, torch.float32, torch.float32]
    bounds = (OUTPUT, GRADIENT, GRADIENT, GRADIENT)
    for exact, other, mine, bound in zip(expected, competitor, actual, bounds, strict=True):
        limit = bound.limit(float((other - exact).abs().max()), float(exact.abs().max()), mine.dtype)
        assert (mine - exact).abs().max() <= limit
        assert (mine * 0.9 - exact).abs().max() > limit or exact.abs().max() < 1e-3


@pytest.mark.parametrize("spread", [0.0, 300.0])
def test_a_mean_far_from_zero_costs_no_digits(spread: float) -> None:
    x, weight, bias, upstream = make_inputs((2, 64, 13, 11), torch.float32)
    x += 3000 + spread * torch.linspace(-1, 1, 64, device=DEVICE).view(-1, 1, 1)
    tensors = [x, weight, bias, upstream]
    expected = differentiate(compose(8), [tensor.double() for tensor in tensors])
    # The mean itself has a rounding of its size, which any norm passes on, in units of the deviation.
    grouped = x.double().unflatten(1, (8, 8))
    inherent = FLOAT32_ROUNDOFF * float((grouped.mean((2, 3, 4)) / grouped.std((2, 3, 4))).max())
    for exact, mine in zip(expected, differentiate(fuse(8), tensors), strict=True):
        assert (mine - exact).abs().max() <= 4 * inherent * exact.abs().max()

    single = x.unflatten(1, (8, 8))
    naive = single.square().mean((2, 3, 4)) - single.mean((2, 3, 4)).square()
    variance = grouped.var((2, 3, 4), correction=0)
    assert ((naive - variance).abs() / variance).max() > 8 * inherent, "a difference of squares would do as well"


@pytest.mark.parametrize("most", [1, 20])
def test_any_division_of_the_rows_gives_the_norm(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = make_inputs((2, 64, 7, 11), torch.float32)
    expected = differentiate(fuse(16), tensors)
    monkeypatch.setattr(fused_group_norm, "_MAX_PROGRAMS", most)
    fused_group_norm._divide.cache_clear()
    actual = differentiate(fuse(16), tensors)
    fused_group_norm._divide.cache_clear()
    for one, other in zip(actual, expected, strict=True):
        assert (one - other).abs().max() <= 8 * FLOAT32_ROUNDOFF * other.abs().max()


@pytest.mark.parametrize("num_rows", [1, 15, 16, 17, 273, 1050, 4200, 16700])
@pytest.mark.parametrize("batch", [1, 3, 4, 100, 3000])
def test_chunks_cover_all_rows_and_none_is_empty(num_rows: int, batch: int) -> None:
    for num_channels, num_groups, element_bytes in ((256, 32, 2), (256, 32, 8), (96, 32, 4), (2048, 1, 4)):
        num_programs, sizes = fused_group_norm._divide(batch, num_rows, num_channels, num_groups, element_bytes)
        num_tiles = -(-num_groups // sizes["BLOCK_G"])
        assert num_programs == batch * sizes["num_chunks"] * num_tiles
        assert (sizes["num_chunks"] - 1) * sizes["rows_of_chunk"] < num_rows
        assert sizes["num_chunks"] * sizes["rows_of_chunk"] >= num_rows
        assert sizes["rows_of_chunk"] % sizes["BLOCK_R"] == 0
        assert sizes["num_chunks"] <= fused_group_norm._MAX_CHUNKS
        assert num_programs <= max(fused_group_norm._MAX_PROGRAMS, batch * num_tiles)


@pytest.mark.parametrize("contiguous", [(0,), (3,), (0, 3)])
def test_memory_formats_agree(contiguous: tuple[int, ...]) -> None:
    tensors = make_inputs((2, 20, 3, 5), torch.float32)
    mixed = [tensor.contiguous() if index in contiguous else tensor for index, tensor in enumerate(tensors)]
    results = [differentiate(fuse(4), each) for each in (mixed, tensors)]
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
    for output, grad_x, *_ in results:
        assert output.is_contiguous(memory_format=torch.channels_last)
        assert grad_x.is_contiguous(memory_format=torch.channels_last)
        assert output.flatten(2).transpose(1, 2).is_contiguous()


def test_the_gradient_of_a_level_among_several_is_read_where_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    levels = [make_inputs(shape, torch.float32) for shape in ((2, 20, 4, 6), (2, 20, 3, 5))]
    leaves = [level[0].requires_grad_() for level in levels]
    outputs = [fuse(4)(*level[:3]) for level in levels]
    joined = torch.cat([output.flatten(2).transpose(1, 2) for output in outputs], dim=1)
    given: list[Tensor] = []
    monkeypatch.setattr(fused_group_norm, "_with_adjacent_rows", lambda gradient: given.append(gradient) or gradient)
    upstream = torch.randn(joined.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    gradients = torch.autograd.grad(joined, leaves, upstream)
    monkeypatch.undo()
    assert len(given) == 2
    for gradient in given:
        assert fused_group_norm._with_adjacent_rows(gradient) is gradient
        assert gradient.stride(0) == upstream.stride(0)
    for level, gradient, part in zip(levels, gradients, upstream.split([24, 15], dim=1), strict=True):
        copied = part.transpose(1, 2).reshape(level[0].shape)
        assert torch.equal(gradient, differentiate(fuse(4), [*level[:3], copied])[1])


def test_nan_stays_in_its_group_and_image() -> None:
    x, weight, bias, upstream = make_inputs((2, 20, 4, 3), torch.float32)
    x[1, 7, 2, 2] = float("nan")
    output, grad_x, *_ = differentiate(fuse(4), [x, weight, bias, upstream])
    hit = torch.zeros_like(x, dtype=torch.bool)
    hit[1, 5:10] = True
    assert torch.equal(output.isnan(), hit)
    assert torch.equal(grad_x.isnan(), hit)


def test_only_some_gradients_are_asked_for() -> None:
    tensors = make_inputs((2, 20, 4, 3), torch.float32)
    every = differentiate(fuse(4), tensors)[1:]
    for index in range(3):
        leaves = [tensor.clone().requires_grad_(index == place) for place, tensor in enumerate(tensors[:3])]
        (alone,) = torch.autograd.grad(fuse(4)(*leaves), leaves[index], tensors[3])
        assert torch.equal(alone, every[index])
    assert not fuse(4)(*tensors[:3]).requires_grad


def test_a_second_derivative_is_refused() -> None:
    tensors = make_inputs((2, 20, 4, 3), torch.float32)
    leaves = [tensor.requires_grad_() for tensor in tensors]
    (grad_x,) = torch.autograd.grad(fuse(4)(*leaves[:3]), leaves[0], leaves[3], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad_x.sum().backward()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [(100, 167), (50, 84), (25, 42), (13, 21), (1, 1)])
def test_the_levels_of_a_batch_on_a_gpu(size: tuple[int, int], dtype: torch.dtype) -> None:
    tensors = make_inputs((4, 256, *size), dtype)
    actual, again = (differentiate(fuse(32), tensors) for _ in range(2))
    expected = differentiate(compose(32), [tensor.double() for tensor in tensors])
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 1e-2}[dtype]
    for exact, mine, repeated in zip(expected, actual, again, strict=True):
        assert torch.equal(mine, repeated)
        assert (mine - exact).abs().max() <= tolerance * exact.abs().max()
