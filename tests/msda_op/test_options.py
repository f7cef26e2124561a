"""Padding, aligned corners and layouts: definition, reference, `grid_sample` and kernels agree."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from msda_op import ms_deform_attn
from msda_op.naive import ms_deform_attn_naive, ms_deform_attn_naive_gradients
from msda_op.options import Options
from msda_op.reference import ms_deform_attn_reference
from parity.cases import DEFAULT_CASES, INPUT_NAMES, OPTION_SETS, Case, make_inputs, suited_to
from parity.comparisons import compare_op, evaluate
from parity.tolerances import NAIVE_FLOAT64

CPU = torch.device("cpu")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def words(options: Options) -> str:
    return " ".join(map(str, options))


@pytest.mark.parametrize("options", OPTION_SETS, ids=words)
@pytest.mark.parametrize("case", DEFAULT_CASES, ids=lambda case: case.name)
def test_reference_equals_the_definition(case: Case, options: Options) -> None:
    inputs = make_inputs(suited_to(case, options), torch.float64, CPU, seed=1, options=options)
    arguments = (inputs.value, inputs.spatial_shapes, inputs.sampling_locations, inputs.attention_weights)
    gradients = ms_deform_attn_naive_gradients(inputs.grad_output, *arguments, options)
    expected = (ms_deform_attn_naive(*arguments, options), *gradients)
    actual = evaluate(partial(ms_deform_attn_reference, options=options), inputs, INPUT_NAMES)
    for name, expected_tensor in zip(("output", *INPUT_NAMES), expected, strict=True):
        torch.testing.assert_close(actual[name], expected_tensor, rtol=0, atol=10 * NAIVE_FLOAT64, msg=name)


@pytest.mark.parametrize("align_corners", [False, True])
@pytest.mark.parametrize("padding_mode", ["zeros", "border"])
@pytest.mark.parametrize("shape", [(2, 3), (1, 4), (5, 1)])
def test_definition_equals_grid_sample(shape: tuple[int, int], padding_mode: str, align_corners: bool) -> None:
    h, w = shape
    generator = torch.Generator().manual_seed(0)
    planes = torch.randn(1, 2, h, w, generator=generator, dtype=torch.float64, requires_grad=True)
    grid = (torch.rand(1, 9, 2, 2, generator=generator, dtype=torch.float64) * 5 - 2.5).requires_grad_()
    sampled = F.grid_sample(planes, grid, padding_mode=padding_mode, align_corners=align_corners)
    upstream = torch.randn(sampled.shape, generator=generator, dtype=torch.float64)
    grad_planes, grad_grid = torch.autograd.grad(sampled, (planes, grid), upstream)

    options = Options(padding_mode, align_corners)
    value = planes.detach().flatten(2).transpose(1, 2)[:, :, None]
    locations = ((grid.detach() + 1) / 2).view(1, 18, 1, 1, 1, 2)
    arguments = (value, (shape,), locations, torch.ones(1, 18, 1, 1, 1, dtype=torch.float64))
    output = ms_deform_attn_naive(*arguments, options)
    grad_output = upstream.flatten(2).transpose(1, 2)
    grad_value, grad_locations, _ = ms_deform_attn_naive_gradients(grad_output, *arguments, options)
    close = partial(torch.testing.assert_close, rtol=0, atol=NAIVE_FLOAT64)
    close(output, sampled.detach().flatten(2).transpose(1, 2))
    close(grad_value[:, :, 0], grad_planes.flatten(2).transpose(1, 2))
    close(grad_locations.view(1, 9, 2, 2) / 2, grad_grid)


# Every pair of case, options and dtype; the full product would take three times as long and find nothing new.
PAIRS = [
    (case, options, DTYPES[(row + column) % len(DTYPES)])
    for row, case in enumerate(DEFAULT_CASES)
    for column, options in enumerate(OPTION_SETS)
]


@pytest.mark.parametrize(
    ("case", "options", "dtype"), PAIRS, ids=[f"{case.name} {words(options)} {dtype}" for case, options, dtype in PAIRS]
)
def test_kernels(case: Case, options: Options, dtype: torch.dtype, poisoned_memory: None) -> None:
    def op(value, shapes, locations, weights):  # type: ignore[no-untyped-def]
        conventions = options._asdict()
        return ms_deform_attn(
            value, shapes, None, locations, weights, **conventions, deterministic=False, backend="triton"
        )

    inputs = make_inputs(suited_to(case, options), dtype, DEVICE, seed=0, options=options)
    results = compare_op(op, inputs, case.gradients, options)
    assert [result for result in results if not result.passed] == []
    assert {result.name for result in results} == {"output", *case.gradients}


@pytest.mark.parametrize(
    ("option", "wrong"),
    [("padding_mode", "zeros"), ("align_corners", False)],
)
def test_the_wrong_convention_fails(option: str, wrong: str | bool) -> None:
    right = Options("border", True)
    mistaken = right._replace(**{option: wrong})
    inputs = make_inputs(DEFAULT_CASES[0], torch.float32, CPU, seed=0, options=right)
    results = compare_op(partial(ms_deform_attn_reference, options=mistaken), inputs, INPUT_NAMES, right)
    assert not any(result.passed for result in results)


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize(
    ("name", "given"),
    [("padding_mode", "reflection"), ("value_layout", "NCHW"), ("sampling_locations_layout", "BQHLP")],
)
def test_unknown_names_are_refused(name: str, given: str, backend: str) -> None:
    inputs = make_inputs(DEFAULT_CASES[0], torch.float32, CPU, seed=0)
    arguments = (inputs.value, inputs.spatial_shapes, None, inputs.sampling_locations, inputs.attention_weights)
    with pytest.raises(ValueError, match=f"{name} must be one of .*, got '{given}'; pass one of them"):
        ms_deform_attn(*arguments, backend=backend, **{name: given})


def test_a_value_in_the_other_layout_is_refused() -> None:
    inputs = make_inputs(DEFAULT_CASES[0], torch.float32, CPU, seed=0)
    arguments = (inputs.value, inputs.spatial_shapes, None, inputs.sampling_locations, inputs.attention_weights)
    with pytest.raises(ValueError, match="sampling_locations must be"):
        ms_deform_attn(*arguments, value_layout="BNLC")
