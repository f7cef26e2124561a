"""The fused op against its composition: 2x / 3x rule, all gradients, uninitialised memory full of NaN."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from msda_op import fused_ms_deform_attn, ms_deform_attn, sampling_locations_from_offsets
from msda_op.options import DEFAULT_OPTIONS, Options
from parity.cases import DEFAULT_CASES, LARGE_CASES, OPTION_SETS, Case
from parity.fused import FUSED_INPUT_NAMES, FusedInputs, compare_fused, evaluate_fused, make_fused_inputs

CPU = torch.device("cpu")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
WITHOUT_REFERENCE = tuple(name for name in FUSED_INPUT_NAMES if name != "reference_points")


def triton_op(options: Options = DEFAULT_OPTIONS, **changes: Any) -> partial[Tensor]:
    padding_mode, align_corners, value_layout, _ = options
    settings = {"padding_mode": padding_mode, "align_corners": align_corners, "value_layout": value_layout}
    return partial(fused_ms_deform_attn, **settings, backend="triton", **{"deterministic": False, **changes})


def failures(case: Case, dtype: torch.dtype, num_coordinates: int, options: Options, **changes: Any) -> list[object]:
    inputs = make_fused_inputs(case, dtype, DEVICE, 0, num_coordinates, options)
    # A box stretches an infinite offset to an infinite gradient of its size, times zero, in the composition.
    undefined = case.placement == "broken" and num_coordinates == 4
    gradients = WITHOUT_REFERENCE if undefined else FUSED_INPUT_NAMES
    results = compare_fused(triton_op(options, **changes), inputs, gradients, options)
    assert {result.name for result in results} == {"output", *gradients}
    return [result for result in results if not result.passed]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("index", range(len(DEFAULT_CASES)), ids=[case.name for case in DEFAULT_CASES])
def test_default_cases(index: int, dtype: torch.dtype, poisoned_memory: None) -> None:
    num_coordinates = (2, 4)[(index + DTYPES.index(dtype)) % 2]
    assert failures(DEFAULT_CASES[index], dtype, num_coordinates, DEFAULT_OPTIONS) == []


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", OPTION_SETS, ids=lambda options: " ".join(map(str, options)))
def test_options(options: Options, dtype: torch.dtype, poisoned_memory: None) -> None:
    for num_coordinates in (2, 4):
        assert failures(DEFAULT_CASES[0], dtype, num_coordinates, options) == []


@pytest.mark.parametrize(("num_coordinates", "dtype"), [(2, torch.bfloat16), (4, torch.float32)], ids=str)
def test_sums_in_a_fixed_order(num_coordinates: int, dtype: torch.dtype, poisoned_memory: None) -> None:
    case = Case("tiny", ((2, 3), (1, 2)), num_queries=5, batch=1)
    assert failures(case, dtype, num_coordinates, OPTION_SETS[1], deterministic=True) == []


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*does not have a deterministic implementation")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", LARGE_CASES, ids=lambda case: case.name)
def test_large_cases(case: Case, dtype: torch.dtype, poisoned_memory: None) -> None:
    for num_coordinates in (2, 4):
        assert failures(case, dtype, num_coordinates, DEFAULT_OPTIONS) == []


@pytest.mark.parametrize("name", FUSED_INPUT_NAMES)
def test_one_gradient_alone(name: str, poisoned_memory: None) -> None:
    inputs = make_fused_inputs(DEFAULT_CASES[0], torch.float32, DEVICE, 0, 4)
    assert all(result.passed for result in compare_fused(triton_op(), inputs, (name,)))


def test_offsets_and_logits_may_be_half_beside_a_wide_value() -> None:
    inputs = make_fused_inputs(DEFAULT_CASES[0], torch.float32, DEVICE, 0, 2)
    offsets, logits = inputs.sampling_offsets.bfloat16(), inputs.attention_logits.half()
    mixed = FusedInputs(
        inputs.value, inputs.spatial_shapes, inputs.reference_points, offsets, logits, inputs.grad_output
    )
    results = evaluate_fused(triton_op(), mixed, FUSED_INPUT_NAMES)
    assert results["sampling_offsets"].dtype == torch.bfloat16
    assert results["attention_logits"].dtype == torch.float16
    assert {results[name].dtype for name in ("output", "value", "reference_points")} == {torch.float32}
    assert all(result.passed for result in compare_fused(triton_op(), mixed, FUSED_INPUT_NAMES))


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_is_the_plain_op_on_locations_and_softmax(backend: str) -> None:
    inputs = make_fused_inputs(DEFAULT_CASES[0], torch.float32, DEVICE, 0, 4)
    shapes = inputs.spatial_shapes
    locations = sampling_locations_from_offsets(inputs.reference_points, inputs.sampling_offsets, shapes)
    weights = inputs.attention_logits.flatten(3).softmax(-1).view(inputs.attention_logits.shape)
    expected = ms_deform_attn(inputs.value, shapes, None, locations, weights, backend=backend)
    arguments = (inputs.value, shapes, None, inputs.reference_points, inputs.sampling_offsets)
    for logits in (inputs.attention_logits, inputs.attention_logits.flatten(3)):
        torch.testing.assert_close(fused_ms_deform_attn(*arguments, logits, backend=backend), expected)


def test_very_large_logits_do_not_overflow() -> None:
    inputs = make_fused_inputs(DEFAULT_CASES[0], torch.float32, DEVICE, 0, 2)
    arguments = (inputs.value, inputs.spatial_shapes, None, inputs.reference_points, inputs.sampling_offsets)
    expected = fused_ms_deform_attn(*arguments, inputs.attention_logits, backend="triton")
    torch.testing.assert_close(
        fused_ms_deform_attn(*arguments, inputs.attention_logits + 512, backend="triton"), expected, rtol=0, atol=1e-3
    )


def swap_axes(value, shapes, starts, points, offsets, logits):  # type: ignore[no-untyped-def]
    return triton_op()(value, shapes, starts, points, offsets.flip(-1), logits)


def forget_softmax(value, shapes, starts, points, offsets, logits):  # type: ignore[no-untyped-def]
    locations = sampling_locations_from_offsets(points, offsets, shapes)
    return ms_deform_attn(value, shapes, starts, locations, logits, backend="reference")


def move_points(value, shapes, starts, points, offsets, logits):  # type: ignore[no-untyped-def]
    return triton_op()(value, shapes, starts, points + 0.01, offsets, logits)


@pytest.mark.parametrize("sabotage", [swap_axes, forget_softmax, move_points])
def test_broken_boundaries_fail_everywhere(sabotage: Any) -> None:
    inputs = make_fused_inputs(DEFAULT_CASES[0], torch.float32, DEVICE, 0, 2)
    assert not any(result.passed for result in compare_fused(sabotage, inputs, FUSED_INPUT_NAMES))


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("attention_logits", (2, 13, 2, 11), r"attention_logits must end in L\*K = 12 logits, got shape"),
        ("attention_logits", (2, 13, 2, 4, 3), r"attention_logits must have shape \(2, 13, 2, 3, 4\)"),
        ("reference_points", (2, 13, 3, 3), r"reference_points must have shape \(2, 13, 3\).*end in 2"),
        ("reference_points", (2, 13, 2), r"reference_points must have 4 dimensions"),
        ("sampling_offsets", (2, 13, 2, 3, 4, 3), r"sampling_offsets must be \[B=2, Q, M=2"),
    ],
)
def test_refuses(name: str, shape: tuple[int, ...], message: str) -> None:
    inputs = make_fused_inputs(DEFAULT_CASES[0], torch.float32, CPU, 0, 2)
    tensors = {each: getattr(inputs, each) for each in FUSED_INPUT_NAMES} | {name: torch.rand(shape)}
    value, *others = tensors.values()
    with pytest.raises(ValueError, match=message):
        fused_ms_deform_attn(value, inputs.spatial_shapes, None, *others)


def test_half_reference_points_are_refused() -> None:
    inputs = make_fused_inputs(DEFAULT_CASES[0], torch.float32, CPU, 0, 2)
    points = inputs.reference_points.half()
    with pytest.raises(ValueError, match=r"reference_points must be float32, got torch\.float16"):
        fused_ms_deform_attn(
            inputs.value, inputs.spatial_shapes, None, points, inputs.sampling_offsets, inputs.attention_logits
        )
