"""The reference against the definition, against finite differences, and in half precision."""

import pytest
import torch

from msda_op.naive import ms_deform_attn_naive, ms_deform_attn_naive_gradients
from msda_op.reference import ms_deform_attn_reference
from parity.cases import DEFAULT_CASES, INPUT_NAMES, Case, OpInputs, make_inputs
from parity.comparisons import evaluate
from parity.tolerances import NAIVE_FLOAT64

CPU = torch.device("cpu")


@pytest.mark.parametrize("case", DEFAULT_CASES, ids=lambda case: case.name)
def test_equals_the_definition(case: Case) -> None:
    inputs = make_inputs(case, torch.float64, CPU, seed=1)
    arguments = (inputs.value, inputs.spatial_shapes, inputs.sampling_locations, inputs.attention_weights)
    expected = (ms_deform_attn_naive(*arguments), *ms_deform_attn_naive_gradients(inputs.grad_output, *arguments))
    actual = evaluate(ms_deform_attn_reference, inputs, INPUT_NAMES)
    for name, expected_tensor in zip(("output", *INPUT_NAMES), expected, strict=True):
        torch.testing.assert_close(actual[name], expected_tensor, rtol=0, atol=NAIVE_FLOAT64, msg=name)


def differentiable_inputs() -> tuple[torch.Tensor, ...]:
    case = Case("tiny", ((2, 3), (1, 1)), num_queries=2, batch=1, head_dim=2, num_points=2)
    inputs = make_inputs(case, torch.float64, CPU, seed=2)
    return tuple(getattr(inputs, name).requires_grad_() for name in INPUT_NAMES)


def tiny_op(value: torch.Tensor, locations: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return ms_deform_attn_reference(value, ((2, 3), (1, 1)), locations, weights)


def test_first_derivatives() -> None:
    assert torch.autograd.gradcheck(tiny_op, differentiable_inputs())


def test_second_derivatives() -> None:
    assert torch.autograd.gradgradcheck(tiny_op, differentiable_inputs())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_rounds_only_inputs_and_result(dtype: torch.dtype) -> None:
    inputs = make_inputs(DEFAULT_CASES[0], dtype, CPU, seed=3)
    wide = OpInputs(
        inputs.value.float(),
        inputs.spatial_shapes,
        inputs.sampling_locations,
        inputs.attention_weights.float(),
        inputs.grad_output.float(),
    )
    half_results = evaluate(ms_deform_attn_reference, inputs, INPUT_NAMES)
    wide_results = evaluate(ms_deform_attn_reference, wide, INPUT_NAMES)
    assert half_results["sampling_locations"].dtype == torch.float32
    for name in ("output", "value", "attention_weights"):
        assert half_results[name].dtype == dtype
    for name, result in half_results.items():
        torch.testing.assert_close(result, wide_results[name].to(result.dtype), rtol=0, atol=0, msg=name)


def test_padding_fades_over_one_pixel_and_sampling_stops_there() -> None:
    value = torch.ones(1, 4, 1, 1, dtype=torch.float64)
    pixels = torch.tensor([-1.0, -0.75, -0.5, 0.0, 1.0, 1.5, 2.0], dtype=torch.float64)
    locations = torch.stack([(pixels + 0.5) / 2, torch.full_like(pixels, 0.5)], -1).view(1, 7, 1, 1, 1, 2)
    locations.requires_grad_()
    output = ms_deform_attn_reference(value, ((2, 2),), locations, torch.ones(1, 7, 1, 1, 1, dtype=torch.float64))
    assert output.flatten().tolist() == [0.0, 0.25, 0.5, 1.0, 1.0, 0.5, 0.0]
    (gradient,) = torch.autograd.grad(output.sum(), locations)
    assert gradient[0, [0, -1]].abs().max() == 0
