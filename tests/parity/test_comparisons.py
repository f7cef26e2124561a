"""Comparisons pass what is right and fail what is broken (negative controls)."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from msda_op.reference import ms_deform_attn_reference
from parity.cases import DEFAULT_CASES, INPUT_NAMES, make_inputs
from parity.comparisons import compare, compare_op, evaluate
from parity.tolerances import OUTPUT

CPU = torch.device("cpu")
CASE = DEFAULT_CASES[0]
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
Shapes = tuple[tuple[int, int], ...]


def swap_axes(value: Tensor, shapes: Shapes, locations: Tensor, weights: Tensor) -> Tensor:
    return ms_deform_attn_reference(value, shapes, locations.flip(-1), weights)


def shift_half_a_pixel(value: Tensor, shapes: Shapes, locations: Tensor, weights: Tensor) -> Tensor:
    sizes_wh = torch.tensor([(w, h) for h, w in shapes])[:, None]
    return ms_deform_attn_reference(value, shapes, locations + 0.5 / sizes_wh, weights)


def drop_a_level(value: Tensor, shapes: Shapes, locations: Tensor, weights: Tensor) -> Tensor:
    kept = torch.ones(len(shapes), 1, dtype=weights.dtype)
    kept[-1] = 0
    return ms_deform_attn_reference(value, shapes, locations, weights * kept)


def permute_heads(value: Tensor, shapes: Shapes, locations: Tensor, weights: Tensor) -> Tensor:
    return ms_deform_attn_reference(value.flip(2), shapes, locations, weights)


SABOTAGES = (swap_axes, shift_half_a_pixel, drop_a_level, permute_heads)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reference_passes_itself(dtype: torch.dtype) -> None:
    results = compare_op(ms_deform_attn_reference, make_inputs(CASE, dtype, CPU, seed=0), INPUT_NAMES)
    assert [result.name for result in results] == ["output", *INPUT_NAMES]
    for result in results:
        assert result.passed
        assert result.max_error == result.competitor_max_error


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sabotage", SABOTAGES)
def test_broken_sampling_fails_everywhere(sabotage: Callable[..., Tensor], dtype: torch.dtype) -> None:
    results = compare_op(sabotage, make_inputs(CASE, dtype, CPU, seed=0), INPUT_NAMES)
    assert [result.name for result in results if result.passed] == []


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", INPUT_NAMES)
def test_gradient_scaled_by_nine_tenths_fails_alone(name: str, dtype: torch.dtype) -> None:
    def scale_gradient(value: Tensor, shapes: Shapes, locations: Tensor, weights: Tensor) -> Tensor:
        tensors = dict(zip(INPUT_NAMES, (value, locations, weights), strict=True))
        tensors[name] = tensors[name].clone()
        tensors[name].register_hook(lambda gradient: 0.9 * gradient)
        return ms_deform_attn_reference(
            tensors["value"], shapes, tensors["sampling_locations"], tensors["attention_weights"]
        )

    results = compare_op(scale_gradient, make_inputs(CASE, dtype, CPU, seed=0), INPUT_NAMES)
    assert [result.name for result in results if not result.passed] == [name]


def test_one_nan_fails() -> None:
    expected = torch.ones(5, dtype=torch.float64)
    actual = expected.float()
    actual[2] = torch.nan
    assert not compare("output", expected, expected.float(), actual, OUTPUT).passed


def test_errors_are_largest_and_mean_difference() -> None:
    expected = torch.zeros(4, dtype=torch.float64)
    competitor, actual = torch.tensor([0.0, 1.0, 0.0, -1.0]), torch.tensor([0.0, -3.0, 1.0, 0.0])
    result = compare("output", expected, competitor, actual, OUTPUT)
    assert (result.max_error, result.mean_error) == (3.0, 1.0)
    assert (result.competitor_max_error, result.competitor_mean_error) == (1.0, 0.5)
    assert (result.max_limit, result.mean_limit) == (2.0, 1.0)
    assert not result.passed


def test_results_that_cannot_be_compared_are_refused() -> None:
    expected = torch.zeros(4, dtype=torch.float64)
    with pytest.raises(ValueError, match="output must have one shape"):
        compare("output", expected, expected.float(), torch.zeros(3), OUTPUT)
    with pytest.raises(ValueError, match=r"output must be torch.float32 as the competitor, got torch.float16"):
        compare("output", expected, expected.float(), torch.zeros(4).half(), OUTPUT)


def test_evaluate_leaves_its_inputs_alone() -> None:
    inputs = make_inputs(CASE, torch.float32, CPU, seed=0)
    results = evaluate(ms_deform_attn_reference, inputs, ("value",))
    assert set(results) == {"output", "value"}
    assert not any(getattr(inputs, name).requires_grad for name in INPUT_NAMES)
