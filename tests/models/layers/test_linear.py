from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from models.layers import linear as layer
from models.layers.linear import Linear, can_sum, linear_relu_dropout
from parity.tolerances import GRADIENT

pytest.importorskip("triton")

from models.layers import row_sum
from models.layers.dropout_kernels import STEPS, round_probability
from models.layers.in_place import apply_relu_dropout, clear_rows
from models.layers.row_sum import add_partial_sums, sum_passed_rows, sum_rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


pytestmark = pytest.mark.usefixtures("poisoned_memory")


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)


def assert_rounded(actual: Tensor, expected: Tensor) -> None:
    """Allows a unit in the last place: the interpreter cuts off what a GPU rounds."""
    eps = torch.finfo(actual.dtype).eps
    torch.testing.assert_close(actual.double(), expected.double(), rtol=eps, atol=0)


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


@pytest.mark.parametrize("shape", [(1, 1), (3, 20), (300, 129)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("clears", [True, False])
@pytest.mark.parametrize("activates", [True, False])
def test_what_passes_and_its_sums_against_float64(
    shape: tuple[int, int], dtype: torch.dtype, clears: bool, activates: bool
) -> None:
    gradient, activated = draw(*shape, dtype=dtype), draw(*shape, dtype=dtype).flip(0).relu()
    padding_mask = draw(shape[0]) < 0
    expected = gradient.double()
    if activates:
        expected = torch.where(activated > 0, 1.25 * expected, 0.0)
    if clears:
        expected = torch.where(padding_mask[:, None], 0.0, expected)
    passed, sums = sum_passed_rows(gradient, padding_mask if clears else None, activated if activates else None, 1.25)
    assert passed.dtype == sums.dtype == dtype
    assert_rounded(passed, expected)
    size = float(expected.abs().sum(0).max())
    assert (sums - expected.sum(0)).abs().max() <= GRADIENT.limit(0.0, size, dtype)


def test_partial_sums_are_added_up() -> None:
    sums = draw(300, 70)
    torch.testing.assert_close(add_partial_sums(sums, sums), sums.sum(0))
    assert add_partial_sums(sums, sums.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("shape", [(2, 50, 20), (1, 1, 1), (3, 33, 300)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_padding_are_cleared_and_nothing_else(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    matrix, padding_mask = draw(*shape, dtype=dtype), draw(*shape[:2]) < 0.3
    expected = torch.where(padding_mask.unsqueeze(-1), 0.0, matrix)
    clear_rows(matrix, padding_mask)
    assert torch.equal(matrix, expected)


@pytest.mark.parametrize("probability", [0.1, 0.5, 1 / STEPS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_relu_and_dropout_in_place(probability: float, dtype: torch.dtype) -> None:
    threshold, scale = round_probability(probability)
    features, results = draw(90, 100, dtype=dtype), []
    for seed in (5, 5, 6):
        results.append(features.clone())
        apply_relu_dropout(results[-1], torch.tensor([seed], device=DEVICE), threshold, scale)
    assert torch.equal(results[0], results[1])
    kept = results[0] > 0
    assert_rounded(results[0], torch.where(kept, features.float() * scale, 0.0))
    share = kept.sum() / (features > 0).sum()
    assert abs(share - (1 - probability)) < 0.03  # four deviations of 4,500 draws
    assert (probability < 0.01) == torch.equal(results[0], results[2])


def test_what_is_not_a_number_stays() -> None:
    features = torch.full((40, 8), torch.nan, device=DEVICE)
    apply_relu_dropout(features, torch.tensor([1], device=DEVICE), *round_probability(0.5))
    assert features.isnan().any()


def test_probabilities_are_rounded_and_made_up_for() -> None:
    assert round_probability(0.0) == (0, 1.0)
    assert round_probability(0.5) == (STEPS // 2, 2.0)
    assert round_probability(1 - 1e-9) == (STEPS - 1, STEPS)
    threshold, scale = round_probability(0.1)
    assert abs(threshold / STEPS - 0.1) < 1e-5
    assert scale * (1 - threshold / STEPS) == pytest.approx(1)


@pytest.mark.parametrize(("autocast", "dtype"), [(False, torch.float32), (True, torch.bfloat16), (True, torch.float32)])
def test_relu_and_dropout_behind_a_layer(autocast: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer, "can_sum", lambda *tensors: True)
    torch.manual_seed(0)
    linear = nn.Linear(20, 24).to(DEVICE, dtype)
    features = draw(2, 150, 20, dtype=dtype).requires_grad_()
    with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
        output = linear_relu_dropout(linear, features, 0.25, training=True)
    leaves = [features, linear.weight, linear.bias]
    upstream = draw(2, 150, 24, dtype=output.dtype)
    gradients = torch.autograd.grad(output, leaves, upstream)
    kept = output > 0
    double = [leaf.detach().double().requires_grad_() for leaf in leaves]
    plain = functional.linear(*double)
    expected = torch.where(kept, plain * 4 / 3, 0.0)
    expected_gradients = torch.autograd.grad(expected, double, upstream.double())
    assert output.dtype == upstream.dtype == (torch.bfloat16 if autocast else dtype)
    tolerance = 2e-2 if autocast else 1e-5
    for mine, exact in zip((output, *gradients), (expected, *expected_gradients), strict=True):
        assert (mine - exact).abs().max() <= tolerance * exact.abs().max()
    assert abs(kept.sum() / (plain > 0).sum() - 0.75) < 0.03
    assert not (kept & (plain < -0.1)).any()


def test_without_the_kernel_it_is_relu_and_dropout() -> None:
    torch.manual_seed(0)
    linear, features = nn.Linear(20, 24), draw(3, 20).cpu()
    assert torch.equal(linear_relu_dropout(linear, features, 0.5, training=False), linear(features).relu())
    dropped = linear_relu_dropout(linear, features, 0.5, training=True)
    assert (dropped == 0).sum() > (linear(features) <= 0).sum()


@pytest.mark.parametrize("frozen", [None, "features", "weight"])
@pytest.mark.parametrize("clears", [True, False])
@pytest.mark.parametrize(("autocast", "dtype"), [(False, torch.float32), (True, torch.bfloat16), (True, torch.float32)])
def test_the_layer_is_that_of_pytorch(
    frozen: str | None, clears: bool, autocast: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer, "can_sum", lambda *tensors: True)
    tensors = {"features": draw(2, 150, 20), "weight": draw(24, 20), "bias": draw(24)}
    padding_mask = draw(2, 150) < 0 if clears else None

    def plain(features: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        output = functional.linear(features, weight, bias)
        return output if padding_mask is None else torch.where(padding_mask.unsqueeze(-1), 0.0, output)

    results = []
    for function in (partial(layer.linear, padding_mask=padding_mask), plain):
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
    padding_mask = torch.arange(4096) % 3 == 0
    expected = torch.where(padding_mask[:, None], 0.0, linear(features))
    assert torch.equal(mine(features, padding_mask), expected)


@pytest.mark.gpu
def test_padding_is_cleared_on_a_gpu_with_and_without_gradients() -> None:
    module = Linear(256, 384).cuda()
    padding_mask = torch.rand(4, 2000, device="cuda") < 0.3
    features = torch.randn(4, 2000, 256, device="cuda")
    expected = torch.where(padding_mask.unsqueeze(-1), 0.0, functional.linear(features, module.weight, module.bias))
    assert torch.equal(module(features, padding_mask), expected)
    with torch.no_grad():
        assert torch.equal(module(features, padding_mask), expected)


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
