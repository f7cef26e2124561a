"""The backward pass as a function: the gradients of autograd, buffers, shares."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from msda_op import ms_deform_attn, ms_deform_attn_backward
from msda_op.gradients import Gradients
from parity.cases import INPUT_NAMES, OPTION_SETS, Case, OpInputs, make_inputs
from parity.comparisons import evaluate
from parity.tolerances import FLOAT32_ROUNDOFF

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CASE = Case("small", ((3, 4), (1, 2)), num_queries=7, batch=1, head_dim=5, num_points=3)


def run(inputs: OpInputs, **changes: Any) -> Gradients:
    tensors = (inputs.sampling_locations, inputs.attention_weights)
    return ms_deform_attn_backward(inputs.grad_output, inputs.value, inputs.spatial_shapes, None, *tensors, **changes)


def expected_gradients(inputs: OpInputs, **options: Any) -> dict[str, Tensor]:
    def op(value: Tensor, shapes: Any, locations: Tensor, weights: Tensor) -> Tensor:
        return ms_deform_attn(value, shapes, None, locations, weights, backend="reference", **options)

    return evaluate(op, inputs, INPUT_NAMES)


def assert_close(actual: Tensor | None, expected: Tensor) -> None:
    assert actual is not None
    assert actual.dtype == expected.dtype
    bound = 40 * max(FLOAT32_ROUNDOFF, torch.finfo(expected.dtype).eps / 20) * expected.abs().max().item()
    torch.testing.assert_close(actual, expected, rtol=0, atol=bound)


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("asked", list(product([True, False], repeat=3)))
def test_computes_what_is_asked_for(asked: tuple[bool, bool, bool], backend: str, poisoned_memory: None) -> None:
    inputs = make_inputs(CASE, torch.float32, DEVICE, seed=0)
    names = ("compute_grad_value", "compute_grad_sampling_locations", "compute_grad_attention_weights")
    gradients = run(inputs, **dict(zip(names, asked, strict=True)), deterministic=False, backend=backend)
    expected = expected_gradients(inputs)
    for gradient, name, needed in zip(gradients, INPUT_NAMES, asked, strict=True):
        if needed:
            assert_close(gradient, expected[name])
        else:
            assert gradient is None


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_takes_every_option(dtype: torch.dtype, backend: str) -> None:
    options = OPTION_SETS[1]
    inputs = make_inputs(CASE, dtype, DEVICE, seed=0, options=options)
    expected = expected_gradients(inputs, **options._asdict())
    for gradient, name in zip(run(inputs, **options._asdict(), backend=backend), INPUT_NAMES, strict=True):
        assert_close(gradient, expected[name])


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("num_scatter_buffers", [1, 3])
def test_adds_to_buffers_and_gives_back_its_share(num_scatter_buffers: int, deterministic: bool, backend: str) -> None:
    if backend == "reference" and deterministic and DEVICE.type == "cuda":
        pytest.skip("refused")
    inputs = make_inputs(CASE, torch.float32, DEVICE, seed=0)
    share = expected_gradients(inputs)["value"]
    before = torch.randn(num_scatter_buffers, *share.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    buffer, settings = before.clone(), {"deterministic": deterministic, "backend": backend}
    settings |= {"num_scatter_buffers": num_scatter_buffers, "grad_value_buffer": buffer}
    total = run(inputs, **settings).value
    assert_close(total, before.sum(0) + share)
    assert_close((buffer - before).sum(0), share)
    again = run(inputs, **settings, previous_grad_value=total).value
    assert_close(again, share)
    assert_close(buffer.sum(0), before.sum(0) + 2 * share)


def test_neighbouring_tiles_use_all_buffers() -> None:
    inputs = make_inputs(Case("many", ((3, 4),), num_queries=200), torch.float32, DEVICE, seed=0)
    buffer = torch.zeros(3, *inputs.value.shape, device=DEVICE)
    run(inputs, num_scatter_buffers=3, grad_value_buffer=buffer, deterministic=False, backend="triton")
    assert (buffer.abs().amax((1, 2, 3, 4)) > 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_values_have_float32_buffers(dtype: torch.dtype) -> None:
    inputs = make_inputs(CASE, dtype, DEVICE, seed=0)
    buffer = torch.zeros(1, *inputs.value.shape, device=DEVICE)
    gradient = run(inputs, grad_value_buffer=buffer, backend="triton").value
    assert gradient is not None
    assert torch.equal(buffer[0].to(dtype), gradient)
    assert not torch.equal(buffer[0], gradient.float())


def test_half_atomics_on_request() -> None:
    inputs = make_inputs(CASE, torch.float16, DEVICE, seed=0)
    coarse = run(inputs, fp32_grad_accum=False, deterministic=False, backend="triton").value
    fine = run(inputs, fp32_grad_accum=True, deterministic=False, backend="triton").value
    assert coarse is not None
    assert fine is not None
    assert not torch.equal(coarse, fine)
    torch.testing.assert_close(coarse, fine, rtol=0, atol=2e-2 * fine.abs().max().item())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_scatter_buffers": 0}, "num_scatter_buffers must be at least 1, got 0"),
        ({"grad_value_buffer": torch.zeros(2, 14, 2, 5)}, r"grad_value_buffer must be contiguous, \(1, 1, 14, 2, 5\)"),
        ({"grad_value_buffer": torch.zeros(1, 1, 14, 2, 5).double()}, "grad_value_buffer must be .* torch.float32"),
        (
            {"grad_value_buffer": torch.zeros(1, 1, 14, 2, 5), "compute_grad_value": False},
            "grad_value_buffer must be None without compute_grad_value",
        ),
        ({"previous_grad_value": torch.zeros(14, 2, 5)}, r"previous_grad_value must have the shape \(1, 14, 2, 5\)"),
    ],
)
def test_refuses(changes: dict[str, Any], message: str) -> None:
    inputs = make_inputs(CASE, torch.float32, torch.device("cpu"), seed=0)
    with pytest.raises(ValueError, match=message):
        run(inputs, backend="reference", **changes)


def test_refuses_an_upstream_gradient_of_another_shape() -> None:
    inputs = make_inputs(CASE, torch.float32, torch.device("cpu"), seed=0)
    tensors = (inputs.value, inputs.spatial_shapes, None, inputs.sampling_locations, inputs.attention_weights)
    with pytest.raises(ValueError, match=r"grad_output must be a float tensor \(1, 7, 10\)"):
        ms_deform_attn_backward(inputs.grad_output.unflatten(2, (2, 5)), *tensors)
