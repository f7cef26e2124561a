"""The registered ops: schema, fake implementations, gradients, autocast, tracing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from msda_op import fused_ms_deform_attn, ms_deform_attn, registration
from parity.cases import INPUT_NAMES, Case, make_inputs

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CASE = Case("small", ((3, 4), (1, 2)), num_queries=3, head_dim=5, num_points=3)
TABLES = (torch.tensor(CASE.spatial_shapes, device=DEVICE), torch.tensor([0, 12], device=DEVICE))
CONVENTIONS = ("zeros", False, "BLNC", "BQHLP2", True)


def op_arguments(requires_grad: bool) -> tuple[Tensor, ...]:
    inputs = make_inputs(CASE, torch.float32, DEVICE, seed=0)
    value, locations, weights = (getattr(inputs, name).requires_grad_(requires_grad) for name in INPUT_NAMES)
    return value, *TABLES, locations, weights


def reference_points(num_coordinates: int, requires_grad: bool) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    points = torch.rand(2, 3, 2, num_coordinates, generator=generator).to(DEVICE)
    return points.requires_grad_(requires_grad)


@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("num_coordinates", [0, 2, 4])
def test_opcheck_forward(num_coordinates: int, requires_grad: bool) -> None:
    points = reference_points(num_coordinates, requires_grad) if num_coordinates else None
    torch.library.opcheck(registration.forward, (*op_arguments(requires_grad), points, *CONVENTIONS, False))


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("needs", [(True, True, True, True), (True, False, False, False), (False, True, True, False)])
def test_opcheck_backward(needs: tuple[bool, ...], deterministic: bool) -> None:
    grad_output = torch.randn(2, 3, 10, device=DEVICE)
    points = reference_points(2, False)
    arguments = (grad_output, *op_arguments(False), points, *CONVENTIONS, deterministic, *needs)
    torch.library.opcheck(registration.backward, arguments)
    assert len(registration.backward(*arguments)) == sum(needs)


def test_opcheck_accumulate_backward() -> None:
    value, *others = op_arguments(False)
    buffer, grad_output = torch.zeros(2, *value.shape, device=DEVICE), torch.randn(2, 3, 10, device=DEVICE)
    grad_locations = torch.empty_like(others[2])
    arguments = (buffer, grad_locations, None, grad_output, value, *others, *CONVENTIONS[:4], False)
    torch.library.opcheck(registration.accumulate_backward, arguments)


@pytest.mark.parametrize("fused", [False, True])
def test_second_derivative_is_refused_and_names_the_reference(fused: bool) -> None:
    value, _, _, locations, weights = op_arguments(True)
    if fused:
        points = reference_points(2, False)
        output = fused_ms_deform_attn(value, CASE.spatial_shapes, None, points, locations, weights, backend="triton")
    else:
        output = ms_deform_attn(value, CASE.spatial_shapes, None, locations, weights, backend="triton")
    (gradient,) = torch.autograd.grad(output.square().sum(), value, create_graph=True)
    with pytest.raises(RuntimeError, match="pass backend='reference'"):
        torch.autograd.grad(gradient.sum(), locations)


class Attention(torch.nn.Module):
    """Both forms of the op, on doubled values."""

    def __init__(self, backend: str) -> None:
        super().__init__()
        self.backend = backend

    def forward(self, value: Tensor, locations: Tensor, weights: Tensor, points: Tensor) -> Tensor:
        table = (CASE.spatial_shapes, None)
        plain = ms_deform_attn(2 * value, *table, locations, weights, backend=self.backend)
        return plain + fused_ms_deform_attn(2 * value, *table, points, locations, weights, backend=self.backend)


def traced_inputs(num_queries: int) -> tuple[Tensor, ...]:
    case = Case("traced", CASE.spatial_shapes, num_queries=num_queries, head_dim=5, num_points=3)
    inputs = make_inputs(case, torch.float32, DEVICE, seed=num_queries)
    points = torch.rand(2, num_queries, 2, 4, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    return tuple(tensor.requires_grad_() for tensor in (*(getattr(inputs, name) for name in INPUT_NAMES), points))


def assert_same_function(actual: torch.nn.Module, expected: torch.nn.Module, inputs: tuple[Tensor, ...]) -> None:
    outputs = actual(*inputs), expected(*inputs)
    torch.testing.assert_close(*outputs)
    gradients = [torch.autograd.grad(output.square().sum(), inputs) for output in outputs]
    for gradient, other in zip(*gradients, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_compiled_whole(backend: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(Attention(backend), backend="aot_eager", fullgraph=True)
    assert_same_function(compiled, Attention(backend), traced_inputs(6))


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_compiled_once_for_all_numbers_of_queries(backend: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(Attention(backend), backend="aot_eager", fullgraph=True, dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for num_queries in (6, 9, 7):  # sizes of their own: equal ones are taken for the same
            assert_same_function(compiled, Attention(backend), traced_inputs(num_queries))


@pytest.mark.gpu
def test_inductor_compiles_the_kernels_whole() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(Attention("triton"), fullgraph=True)
    assert_same_function(compiled, Attention("triton"), traced_inputs(6))


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_exported_with_a_free_number_of_queries(backend: str) -> None:
    queries = torch.export.Dim("queries", min=2, max=1000)
    axes = ({}, {1: queries}, {1: queries}, {1: queries})
    with torch.no_grad():
        exported = torch.export.export(Attention(backend), traced_inputs(6), dynamic_shapes=axes)
        inputs = traced_inputs(9)
        torch.testing.assert_close(exported.module()(*inputs), Attention(backend)(*inputs))
    if backend == "triton" and DEVICE.type == "cpu":  # on a GPU an exporter may look into the op
        names = {str(node.target) for node in exported.graph.nodes if node.op == "call_function"}
        assert "msda_op.forward.default" in names


# Without the interpreter the ops are traceable: AOTAutograd turns their bodies into kernel launches, on fake tensors.
TRACE = """
import torch
from functorch.compile import aot_function
from msda_op import registration

def step(value, shapes, starts, points, scores, reference, grad_output, buffer):
    inputs = (value, shapes, starts, points, scores)
    conventions = ("border", False, "BNLC", "BQHLP2")
    results = [registration.forward(*inputs, reference, *conventions, True, False)]
    for deterministic in (False, True):
        needs = (True, True, True, True)
        results += registration.backward(grad_output, *inputs, reference, *conventions, True, deterministic, *needs)
    registration.accumulate_backward(buffer, None, None, grad_output, *inputs, *conventions, False)
    return results

def count_launches(graph, inputs):
    print(sum("triton_kernel_wrapper" in str(node.target) for node in graph.graph.nodes))
    results = graph.graph.output_node().args[0]
    return lambda *_: [torch.zeros(result.meta["val"].shape) for result in results]

with torch.no_grad():
    aot_function(step, fw_compiler=count_launches)(
        torch.rand(2, 2, 14, 5), torch.tensor([[3, 4], [1, 2]]), torch.tensor([0, 12]), torch.rand(2, 3, 2, 2, 3, 2),
        torch.rand(2, 3, 2, 2, 3), torch.rand(2, 3, 2, 4), torch.rand(2, 3, 10), torch.rand(3, 2, 2, 14, 5),
    )
"""


def test_bodies_become_kernel_launches_in_a_graph() -> None:
    environment = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(Path(__file__).resolve().parents[2])
    finished = subprocess.run(
        [sys.executable, "-c", TRACE], env=environment, capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stderr
    # Forward; backward; backward without value, cells and gather; backward into buffers.
    assert int(finished.stdout) == 6, finished.stderr


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
