from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from models.layers import linear as layer
from models.layers.linear import Linear, can_sum
from parity.tolerances import GRADIENT

pytest.importorskip("triton")

from models.layers import row_sum
from models.layers.row_sum import sum_rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Fills what `torch.empty` returns with NaN, so that an element nobody writes fails a comparison."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(1000).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)


@pytest.mark.parametrize("shape", [(1, 1), (3, 20), (700, 64), (300, 129), (0, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("max_programs", [1, 3, 512])
def test_sums_against_float64(
    shape: tuple[int, int], dtype: torch.dtype, max_programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_sum, "_MAX_PROGRAMS", max_programs)
    matrix = draw(*shape, dtype=dtype)
    expected, competitor, actual = matrix.double().sum(0), matrix.sum(0), sum_rows(matrix)
    assert actual.dtype == dtype
    size = float(matrix.abs().double().sum(0).max())
    limit = GRADIENT.limit(float((competitor - expected).abs().max()), size, dtype)
    assert (actual - expected).abs().max() <= limit
    assert len(matrix) < 2 or (sum_rows(matrix[:-1].contiguous()) - expected).abs().max() > 0


def test_a_strided_matrix_has_the_same_sums() -> None:
    matrix = draw(40, 24)
    assert torch.equal(sum_rows(matrix[:, 8:16]), sum_rows(matrix[:, 8:16].contiguous()))


@pytest.mark.parametrize("frozen", [None, "features", "weight"])
@pytest.mark.parametrize(("autocast", "dtype"), [(False, torch.float32), (True, torch.bfloat16), (True, torch.float32)])
def test_the_layer_is_that_of_pytorch(
    frozen: str | None, autocast: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer, "can_sum", lambda *tensors: True)
    tensors = {"features": draw(2, 150, 20), "weight": draw(24, 20), "bias": draw(24)}
    results = []
    for function in (layer.linear, functional.linear):
        leaves = {name: tensor.to(dtype).requires_grad_(name != frozen) for name, tensor in tensors.items()}
        with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
            output = function(*leaves.values())
        output.backward(draw(2, 150, 24, dtype=output.dtype))
        results.append([output, leaves["features"].grad, leaves["weight"].grad, leaves["bias"].grad])
    for index, (mine, expected) in enumerate(zip(*results, strict=True)):
        if expected is None:
            assert mine is None
        elif index == 3:
            torch.testing.assert_close(mine, expected)
        else:
            assert torch.equal(mine, expected)


def test_a_layer_of_few_rows_or_on_a_cpu_is_not_summed_by_the_kernel() -> None:
    features, bias = torch.ones(4096, 2), nn.Parameter(torch.zeros(3))
    assert not can_sum(features, torch.zeros(3, 2), bias)
    linear, mine = nn.Linear(2, 3), Linear(2, 3)
    mine.load_state_dict(linear.state_dict())
    assert torch.equal(mine(features), linear(features))


@pytest.mark.gpu
def test_the_kernel_is_taken_on_a_gpu_where_it_is_worth_it() -> None:
    module = Linear(256, 384).cuda()
    many, few = (torch.randn(rows, 256, device="cuda", requires_grad=True) for rows in (5000, 300))
    names = [type(module(features).grad_fn).__name__ for features in (many, few)]
    assert names == ["_LinearBackward", "AddmmBackward0"]
    with torch.autocast("cuda", torch.bfloat16):
        assert type(module(many).grad_fn).__name__ == "_LinearBackward"
        assert module(many).dtype == torch.bfloat16
    assert not can_sum(many.bfloat16(), module.weight, module.bias)  # PyTorch says what is wrong
    assert can_sum(many, module.weight, module.bias)
    with torch.no_grad():
        assert not can_sum(many, module.weight, module.bias)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_many_rows_on_a_gpu(dtype: torch.dtype) -> None:
    features, gradient = draw(4, 22223, 256, dtype=dtype), draw(4, 22223, 384, dtype=dtype)
    module = Linear(256, 384).to("cuda", dtype)
    module(features.requires_grad_()).backward(gradient)
    expected = gradient.double().sum((0, 1))
    rounding = torch.finfo(dtype).eps / 2 * expected.abs()
    assert ((module.bias.grad - expected).abs() <= rounding + 3e-3).all()
