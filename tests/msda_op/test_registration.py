"""The registered ops: schema, fake implementations, gradients, autocast, tracing."""

import os
import subprocess
import sys

import pytest
import torch
import torch.fx.experimental.proxy_tensor
from torch import Tensor

from msda_op import fused_ms_deform_attn, ms_deform_attn, registration
from parity.cases import INPUT_NAMES, Case, make_inputs

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CASE = Case("small", ((3, 4), (1, 2)), num_queries=3, head_dim=5, num_points=3)
TABLES = (torch.tensor(CASE.spatial_shapes, device=DEVICE), torch.tensor([0, 12], device=DEVICE))
CONVENTIONS = (True, "zeros", False, "BLNC", "BQHLP2", True)


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
    arguments = (buffer, grad_locations, None, grad_output, value, *others, *CONVENTIONS[:5], False)
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


def traced_inputs(num_queries: int, head_dim: int = 5) -> tuple[Tensor, ...]:
    case = Case("traced", CASE.spatial_shapes, num_queries=num_queries, head_dim=head_dim, num_points=3)
    inputs = make_inputs(case, torch.float32, DEVICE, seed=num_queries)
    points = torch.rand(2, num_queries, 2, 4, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    return tuple(tensor.requires_grad_() for tensor in (*(getattr(inputs, name) for name in INPUT_NAMES), points))


def assert_same_function(actual: torch.nn.Module, expected: torch.nn.Module, inputs: tuple[Tensor, ...]) -> None:
    outputs = actual(*inputs), expected(*inputs)
    torch.testing.assert_close(*outputs)
    gradients = [torch.autograd.grad(output.square().sum(), inputs) for output in outputs]
    for gradient, other in zip(*gradients, strict=True):  # of value: added up in any order, and then rounded
        rtol = 1e-4 if gradient.dtype == torch.float32 else 2 * torch.finfo(gradient.dtype).eps
        torch.testing.assert_close(gradient, other, rtol=rtol, atol=rtol / 10)


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
@pytest.mark.parametrize("head_dim", [5, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_inductor_compiles_the_kernels_whole(dtype: torch.dtype, head_dim: int) -> None:
    """The numbers of both plans on a Hopper GPU: its kernels take heads of 32 channels."""
    torch._dynamo.reset()
    value, *others = traced_inputs(6, head_dim=head_dim)
    inputs = (value.detach().to(dtype).requires_grad_(), *others)
    try:
        assert_same_function(torch.compile(Attention("triton"), fullgraph=True), Attention("triton"), inputs)
    except torch._dynamo.exc.TorchDynamoException as error:  # its trace holds whole programs
        pytest.fail(f"{type(error).__name__}: {str(error)[-2000:]}", pytrace=False)


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_exported_with_a_free_number_of_queries(backend: str) -> None:
    if backend == "reference" and torch.__version__ < (2, 12):
        pytest.skip("PyTorch 2.11 takes the guards of grid_sample for a fixed number of queries")
    queries = torch.export.Dim("queries", min=2, max=1000)
    axes = ({}, {1: queries}, {1: queries}, {1: queries})
    with torch.no_grad():
        exported = torch.export.export(Attention(backend), traced_inputs(6), dynamic_shapes=axes)
        inputs = traced_inputs(9)
        torch.testing.assert_close(exported.module()(*inputs), Attention(backend)(*inputs))
    if backend == "triton" and DEVICE.type == "cpu":  # on a GPU an exporter may look into the op
        names = {str(node.target) for node in exported.graph.nodes if node.op == "call_function"}
        assert "msda_op.forward.default" in names


# Without the interpreter the forward is traceable: `torch.compile` finds kernel launches, and what each of them writes,
# for a GPU that need not be there. The graphs are printed instead of run.
TRACE = """
from itertools import product

import torch
import torch.fx.experimental.proxy_tensor
import triton
from torch._dynamo.backends.common import aot_autograd
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

from msda_op import backends, fused_ms_deform_attn, ms_deform_attn
from msda_op.triton import launch
from parity.compilation import CompileOnlyDriver

triton.runtime.driver.set_active(CompileOnlyDriver(90))
backends._is_interpreted = lambda: True  # the tensors are on the CPU
plans = {"tiles": launch._capability_of, "hopper": lambda tensor: (9, 0)}

def print_graph(graph, inputs):
    for node in graph.graph.nodes:
        if "triton_kernel_wrapper" in str(node.target):
            kernel = kernel_side_table.get_kernel(node.kwargs["kernel_idx"])
            print(getattr(kernel, "fn", kernel).__name__, *node.kwargs["tensors_to_clone"])
        elif "msda_op" in str(node.target) or node.target is torch.ops.aten.copy_.default:
            print(node.target)
    results = [node if node is None else node.meta["val"] for node in graph.graph.output_node().args[0]]
    return lambda *_: [None if like is None else torch.zeros(like.shape, dtype=like.dtype) for like in results]

def step(value, points, scores, reference):
    table = (((3, 4), (1, 2)), None)
    plain = ms_deform_attn(2 * value, *table, points, scores, backend="triton")
    return plain + fused_ms_deform_attn(2 * value, *table, reference, points, scores, backend="triton")

for plan, dtype in product(plans, (torch.bfloat16, torch.float32)):
    torch._dynamo.reset()
    launch._capability_of = plans[plan]
    print(plan, dtype)
    graphs = aot_autograd(fw_compiler=print_graph, bw_compiler=print_graph)
    value, points = torch.rand(2, 14, 2, 32).to(dtype), torch.rand(2, 3, 2, 2, 3, 2)
    inputs = (value, points, torch.rand(2, 3, 2, 2, 3), torch.rand(2, 3, 2, 4))
    inputs = [tensor.requires_grad_() for tensor in inputs]
    torch.compile(step, backend=graphs, fullgraph=True)(*inputs).sum().backward()
"""


def test_forward_becomes_kernel_launches_that_write_their_results_alone() -> None:
    environment = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", TRACE]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    traced = 2 * ["forward_kernel output"] + 2 * ["msda_op.backward.default"]
    calls = [f"{plan} torch.{dtype}" for plan in ("tiles", "hopper") for dtype in ("bfloat16", "float32")]
    assert finished.stdout.splitlines() == [line for call in calls for line in (call, *traced)]


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


def attend(value: Tensor, locations: Tensor, weights: Tensor) -> Tensor:
    return ms_deform_attn(value, CASE.spatial_shapes, None, locations, weights, backend="triton")


@pytest.mark.parametrize("mapped", [(0, 0, 0), (None, 1, 0)], ids=str)
def test_vmap_equals_a_loop(mapped: tuple[int | None, ...]) -> None:
    """Output and gradients, of tensors of which some are shared by all calls."""
    leaves = [
        tensor if dim is None else torch.stack([tensor, 0.5 * tensor, tensor.flip(0)], dim)
        for tensor, dim in zip((op_arguments(False)[index] for index in (0, 3, 4)), mapped, strict=True)
    ]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    singles = [
        attend(*(leaf if dim is None else leaf.select(dim, index) for leaf, dim in zip(leaves, mapped, strict=True)))
        for index in range(3)
    ]
    outputs = torch.vmap(attend, mapped)(*leaves), torch.stack(singles)
    torch.testing.assert_close(*outputs)
    gradients = [torch.autograd.grad(output.square().sum(), leaves) for output in outputs]
    for gradient, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-6)


def test_vmap_refuses_mapped_tables() -> None:
    value, shapes, starts, locations, weights = op_arguments(False)
    arguments = (value, shapes.expand(3, -1, -1), starts, locations, weights, None, *CONVENTIONS, False)
    with pytest.raises(ValueError, match="map over the others"):
        torch.vmap(registration.forward, (None, 0, *(None,) * 11))(*arguments)


def test_eager_calls_do_without_the_registered_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    value, _, _, locations, weights = op_arguments(True)
    expected = torch.autograd.grad(attend(value, locations, weights).square().sum(), value)
    monkeypatch.setattr(registration, "forward", None)
    monkeypatch.setattr(registration, "backward", None)
    actual = torch.autograd.grad(attend(value, locations, weights).square().sum(), value)
    torch.testing.assert_close(actual, expected)


def test_traces_see_the_registered_op() -> None:
    value, _, _, locations, weights = op_arguments(False)
    graph = torch.fx.experimental.proxy_tensor.make_fx(attend)(value, locations, weights).graph
    assert "msda_op.forward.default" in {str(node.target) for node in graph.nodes}
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        assert isinstance(attend(value, locations, weights), torch._subclasses.FakeTensor)
