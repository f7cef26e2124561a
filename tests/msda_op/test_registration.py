"""The registered ops: schema, fake implementations, gradients, autocast."""

import pytest
import torch

from msda_op import ms_deform_attn, registration
from parity.cases import INPUT_NAMES, Case, make_inputs

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CASE = Case("small", ((3, 4), (1, 2)), num_queries=3, head_dim=5, num_points=3)
TABLES = (torch.tensor(CASE.spatial_shapes, device=DEVICE), torch.tensor([0, 12], device=DEVICE))


def op_arguments(requires_grad: bool) -> tuple[torch.Tensor, ...]:
    inputs = make_inputs(CASE, torch.float32, DEVICE, seed=0)
    value, locations, weights = (getattr(inputs, name).requires_grad_(requires_grad) for name in INPUT_NAMES)
    return value, *TABLES, locations, weights


@pytest.mark.parametrize("requires_grad", [True, False])
def test_opcheck_forward(requires_grad: bool) -> None:
    torch.library.opcheck(registration.forward, op_arguments(requires_grad))


@pytest.mark.parametrize("needs", [(True, True, True), (True, False, False), (False, True, True)])
def test_opcheck_backward(needs: tuple[bool, bool, bool]) -> None:
    grad_output = torch.randn(2, 3, 10, device=DEVICE)
    torch.library.opcheck(registration.backward, (grad_output, *op_arguments(False), *needs))
    gradients = registration.backward(grad_output, *op_arguments(False), *needs)
    assert len(gradients) == sum(needs)


def test_second_derivative_is_refused_and_names_the_reference() -> None:
    value, _, _, locations, weights = op_arguments(True)
    output = ms_deform_attn(value, CASE.spatial_shapes, None, locations, weights, backend="triton")
    (gradient,) = torch.autograd.grad(output.square().sum(), value, create_graph=True)
    with pytest.raises(RuntimeError, match="pass backend='reference'"):
        torch.autograd.grad(gradient.sum(), locations)


def test_compiled_whole() -> None:
    value, _, _, locations, weights = op_arguments(True)

    def attend(value: torch.Tensor, locations: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return ms_deform_attn(2 * value, CASE.spatial_shapes, None, locations, weights, backend="triton")

    inputs = (value, locations, weights)
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)(*inputs)
    expected = attend(*inputs)
    torch.testing.assert_close(compiled, expected)
    gradients = torch.autograd.grad(compiled.square().sum(), inputs)
    for gradient, other in zip(gradients, torch.autograd.grad(expected.square().sum(), inputs), strict=True):
        torch.testing.assert_close(gradient, other)


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_autocast_leaves_locations_in_float32(backend: str) -> None:
    value, _, _, locations, weights = op_arguments(True)
    arguments = (value.bfloat16(), CASE.spatial_shapes, None, locations, weights)
    expected = ms_deform_attn(*arguments, backend=backend)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        output = ms_deform_attn(*arguments, backend=backend)
    assert output.dtype == torch.bfloat16
    assert torch.equal(output, expected)
    grad_value, grad_locations, grad_weights = torch.autograd.grad(output.sum(), (value, locations, weights))
    assert {grad_value.dtype, grad_locations.dtype, grad_weights.dtype} == {torch.float32}
    assert grad_locations.abs().max() > 0
