"""Adapters to the original CUDA op, with a stand-in package that computes by the reference."""

import importlib.util
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from msda_op import compat, ms_deform_attn
from msda_op.levels import read_shapes
from msda_op.reference import ms_deform_attn_reference
from parity.cases import INPUT_NAMES, Case, make_inputs
from parity.comparisons import compare_op

SHAPES = ((3, 4), (1, 2))
TABLES = (torch.tensor(SHAPES, dtype=torch.int32), torch.tensor([0, 12], dtype=torch.int32))


def original(value, shapes, starts, locations, weights):  # type: ignore[no-untyped-def]
    assert {value.dtype, locations.dtype, weights.dtype} == {torch.float32}
    assert {shapes.dtype, starts.dtype} == {torch.int64}
    assert all(tensor.is_contiguous() for tensor in (value, locations, weights))
    return ms_deform_attn_reference(value, read_shapes(shapes), locations, weights)


def packaged() -> ModuleType:
    module = ModuleType("torch_ms_deform_attn")
    module.ms_deform_attn = original  # type: ignore[attr-defined]
    return module


def extension() -> ModuleType:
    module = ModuleType("MultiScaleDeformableAttention")

    def forward(*arguments):  # type: ignore[no-untyped-def]
        *inputs, step = arguments
        assert inputs[0].shape[0] % step == 0
        return original(*inputs)

    def backward(*arguments):  # type: ignore[no-untyped-def]
        *inputs, grad_output, _ = arguments
        leaves = [inputs[index].detach().requires_grad_() for index in (0, 3, 4)]
        with torch.enable_grad():
            output = original(leaves[0], *inputs[1:3], *leaves[1:])
        return torch.autograd.grad(output, leaves, grad_output)

    module.ms_deform_attn_forward = forward  # type: ignore[attr-defined]
    module.ms_deform_attn_backward = backward  # type: ignore[attr-defined]
    return module


def mmcv_function() -> ModuleType:
    module = ModuleType("mmcv.ops.multi_scale_deform_attn")

    class MultiScaleDeformableAttnFunction:
        @staticmethod
        def apply(*arguments):  # type: ignore[no-untyped-def]
            *inputs, step = arguments
            assert inputs[0].shape[0] % step == 0
            return original(*inputs)

    module.MultiScaleDeformableAttnFunction = MultiScaleDeformableAttnFunction  # type: ignore[attr-defined]
    return module


STAND_INS = {"torch_ms_deform_attn": packaged, "MultiScaleDeformableAttention": extension, "mmcv": mmcv_function}


@pytest.fixture(autouse=True)
def _fresh_look_for_packages() -> Iterator[None]:
    for cached in (compat._installed_package, compat._load_original_op):
        cached.cache_clear()
    yield
    for cached in (compat._installed_package, compat._load_original_op):
        cached.cache_clear()


@pytest.fixture(params=STAND_INS)
def installed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name = request.param
    module = STAND_INS[name]()
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(compat, "find_spec", lambda wanted: importlib.util if wanted == name else None)
    return name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch", [1, 3, 67])
def test_every_package_gives_value_dtype_and_gradients(installed: str, dtype: torch.dtype, batch: int) -> None:
    generator = torch.Generator().manual_seed(0)
    value = torch.randn(batch, 14, 2, 4, generator=generator).to(dtype).requires_grad_()
    locations = torch.rand(batch, 2, 2, 3, 2, 5, generator=generator).permute(0, 5, 1, 2, 3, 4).requires_grad_()
    weights = torch.rand(batch, 5, 2, 2, 3, generator=generator).to(dtype).requires_grad_()
    inputs = (value, locations, weights)
    output = compat.original_ms_deform_attn(value, *TABLES, locations, weights)
    expected = ms_deform_attn_reference(value, SHAPES, locations, weights)
    assert output.dtype == dtype
    assert torch.equal(output, expected)
    gradients = torch.autograd.grad(output.float().square().sum(), inputs)
    for gradient, other in zip(gradients, torch.autograd.grad(expected.float().square().sum(), inputs), strict=True):
        torch.testing.assert_close(gradient, other)


def test_no_queries_never_reach_the_package(installed: str) -> None:
    value = torch.rand(2, 14, 2, 4, requires_grad=True)
    output = compat.original_ms_deform_attn(value, *TABLES, torch.rand(2, 0, 2, 2, 3, 2), torch.rand(2, 0, 2, 2, 3))
    assert output.shape == (2, 0, 8)
    (gradient,) = torch.autograd.grad(output.sum(), value)
    assert gradient.abs().max() == 0


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match=r"torch_ms_deform_attn, MultiScaleDeformableAttention, mmcv, got none"):
        compat.require_original_op("cuda")


def test_cpu_is_refused(installed: str) -> None:
    with pytest.raises(RuntimeError, match="must run on an NVIDIA GPU, got device type 'cpu'"):
        compat.require_original_op("cpu")
    compat.require_original_op("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [2, 67])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_original_op_keeps_the_bounds(dtype: torch.dtype, batch: int) -> None:
    if compat._installed_package() is None:
        pytest.skip("no package with the original CUDA op is installed")
    case = Case("original", ((12, 17), (6, 9), (1, 1)), num_queries=29, batch=batch, head_dim=32)
    inputs = make_inputs(case, dtype, torch.device("cuda"), seed=0)

    def op(value, shapes, locations, weights):  # type: ignore[no-untyped-def]
        return ms_deform_attn(value, shapes, None, locations, weights, backend="cuda")

    assert [result for result in compare_op(op, inputs, INPUT_NAMES) if not result.passed] == []


@pytest.mark.parametrize(("batch", "step"), [(1, 1), (6, 6), (64, 64), (65, 13), (67, 1), (128, 64)])
def test_step_divides_the_batch(batch: int, step: int) -> None:
    assert compat.batch_step(batch) == step


@pytest.mark.parametrize("drop_in", [compat.MultiScaleDeformableAttnFunction, compat.MSDeformAttnFunction])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_drop_ins_have_the_signature_of_the_original(drop_in: type, dtype: torch.dtype) -> None:
    inputs = make_inputs(Case("drop-in", SHAPES, num_queries=5), dtype, torch.device("cpu"), seed=0)
    value, locations, weights = (getattr(inputs, name).to(dtype).requires_grad_() for name in INPUT_NAMES)
    output = drop_in.apply(value, *TABLES, locations, weights, 64)  # type: ignore[attr-defined]
    expected = ms_deform_attn_reference(value, SHAPES, locations.float(), weights)
    assert output.dtype == dtype
    assert torch.equal(output, expected)
    for gradient, leaf in zip(
        torch.autograd.grad(output.sum(), (value, locations, weights)), (value, locations, weights), strict=True
    ):
        assert gradient.dtype == leaf.dtype
        assert gradient.abs().max() > 0
