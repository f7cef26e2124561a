"""The kernels against the reference: 2x / 3x rule, three dtypes, uninitialised memory full of NaN."""

from typing import Literal

import pytest
import torch
from torch import Tensor

from msda_op import ms_deform_attn
from msda_op.options import Sizes
from msda_op.triton import launch
from msda_op.triton.launch_table import LaunchKey, LaunchShape
from parity.cases import DEFAULT_CASES, INPUT_NAMES, LARGE_CASES, Case, make_inputs
from parity.comparisons import compare_op, evaluate

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def triton_op(value: Tensor, shapes: tuple[tuple[int, int], ...], locations: Tensor, weights: Tensor) -> Tensor:
    return ms_deform_attn(value, shapes, None, locations, weights, deterministic=False, backend="triton")


pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.mark.filterwarnings("ignore:.*does not have a deterministic implementation")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", DEFAULT_CASES, ids=lambda case: case.name)
def test_default_cases(case: Case, dtype: torch.dtype) -> None:
    results = compare_op(triton_op, make_inputs(case, dtype, DEVICE, seed=0), case.gradients)
    assert [result for result in results if not result.passed] == []
    assert {result.name for result in results} == {"output", *case.gradients}


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*does not have a deterministic implementation")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", LARGE_CASES, ids=lambda case: case.name)
def test_large_cases(case: Case, dtype: torch.dtype) -> None:
    results = compare_op(triton_op, make_inputs(case, dtype, DEVICE, seed=0), INPUT_NAMES)
    assert [result for result in results if not result.passed] == []


@pytest.mark.gpu
def test_fifty_repeats_show_no_race() -> None:
    inputs = make_inputs(LARGE_CASES[0], torch.float32, DEVICE, seed=0)
    first = evaluate(triton_op, inputs, INPUT_NAMES)
    scale = first["value"].abs().max()
    for _ in range(50):
        again = evaluate(triton_op, inputs, INPUT_NAMES)
        for name in ("output", "sampling_locations", "attention_weights"):
            assert torch.equal(again[name], first[name])
        assert (again["value"] - first["value"]).abs().max() <= 1e-5 * scale  # atomics add in any order


@pytest.mark.gpu
def test_batch_beyond_int32_elements() -> None:
    case = Case("huge batch", ((64, 64),), num_queries=2, batch=2100, num_heads=8, head_dim=32, num_points=1)
    value = torch.zeros(case.batch, 64 * 64, 8, 32, dtype=torch.bfloat16, device=DEVICE)
    value[-1] = 1
    assert value.numel() > 2**31
    locations = torch.full((case.batch, 2, 8, 1, 1, 2), 0.5, device=DEVICE)
    output = triton_op(value, case.spatial_shapes, locations, torch.ones_like(locations[..., 0]))
    assert output[-1].eq(1).all()
    assert output[:-1].eq(0).all()


@pytest.mark.gpu
def test_never_waits_for_the_device() -> None:
    inputs = make_inputs(LARGE_CASES[1], torch.bfloat16, DEVICE, seed=0)
    evaluate(triton_op, inputs, INPUT_NAMES)
    torch.cuda.set_sync_debug_mode("error")
    try:
        evaluate(triton_op, inputs, INPUT_NAMES)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_table_on_the_device_equals_pairs() -> None:
    inputs = make_inputs(DEFAULT_CASES[0], torch.float32, DEVICE, seed=0)
    rest = (inputs.sampling_locations, inputs.attention_weights)
    expected = ms_deform_attn(inputs.value, inputs.spatial_shapes, None, *rest, backend="triton")
    for dtype in (torch.int32, torch.int64):
        shapes = torch.tensor(inputs.spatial_shapes, dtype=dtype, device=DEVICE)
        starts = torch.tensor((0, 54, 69), dtype=dtype, device=DEVICE)
        assert torch.equal(ms_deform_attn(inputs.value, shapes, starts, *rest, backend="triton"), expected)


@pytest.mark.parametrize("weights_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value_dtype", DTYPES, ids=str)
def test_value_and_weights_may_differ_in_dtype(value_dtype: torch.dtype, weights_dtype: torch.dtype) -> None:
    case = Case("mixed", ((3, 4), (1, 2)), num_queries=3, num_points=3)
    inputs = make_inputs(case, torch.float32, DEVICE, seed=0)
    value = inputs.value.to(value_dtype).requires_grad_()
    weights = inputs.attention_weights.to(weights_dtype).requires_grad_()
    output = triton_op(value, case.spatial_shapes, inputs.sampling_locations, weights)
    grad_value, grad_weights = torch.autograd.grad(output.float().sum(), (value, weights))
    assert (output.dtype, grad_value.dtype, grad_weights.dtype) == (value_dtype, value_dtype, weights_dtype)


class OnCard(Tensor):
    """A tensor without memory that says that it is on a GPU."""

    is_cuda = True


@pytest.mark.parametrize("stage", ["forward", "backward"])
def test_tile_is_asked_for_by_architecture_pass_and_sizes(
    stage: Literal["forward", "backward"], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = []

    def choose_shape(key: LaunchKey) -> LaunchShape:
        keys.append(key)
        return LaunchShape(8, 2)

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    monkeypatch.setattr(launch, "choose_shape", choose_shape)
    value = torch.empty(4, 100, 8, 20, dtype=torch.bfloat16, device="meta").as_subclass(OnCard)
    assert launch.choose_tile(stage, value, Sizes(4, 100, 8, 20, 300, 2, 3)) == (8, 4, 32, 2)
    assert keys == [LaunchKey(86, stage, 2, 4, 32, "few")]


def test_tile_of_the_interpreter_follows_the_rule() -> None:
    value = torch.empty(1, 6, 1, 32)
    assert launch.choose_tile("backward", value, Sizes(1, 6, 1, 32, 5, 1, 4)) == (4, 4, 32, 1)
