"""The gradient of value in a fixed order: right, and the same bits whatever order the programs run in."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from msda_op import fused_ms_deform_attn, ms_deform_attn
from msda_op.options import DEFAULT_OPTIONS
from msda_op.triton import launch
from parity.cases import DEFAULT_CASES, LARGE_CASES, Case, OpInputs, make_inputs
from parity.comparisons import compare_op, evaluate

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
CROWDED = Case("crowded", ((2, 2), (1, 1)), num_queries=21, batch=1, num_heads=1, head_dim=32)


def ordered_op(value: Tensor, shapes: tuple[tuple[int, int], ...], locations: Tensor, weights: Tensor) -> Tensor:
    return ms_deform_attn(value, shapes, None, locations, weights, deterministic=True, backend="triton")


def atomic_op(value: Tensor, shapes: tuple[tuple[int, int], ...], locations: Tensor, weights: Tensor) -> Tensor:
    return ms_deform_attn(value, shapes, None, locations, weights, deterministic=False, backend="triton")


@pytest.mark.parametrize("index", range(len(DEFAULT_CASES)), ids=[case.name for case in DEFAULT_CASES])
def test_default_cases(index: int, poisoned_memory: None) -> None:
    case, dtype = DEFAULT_CASES[index], DTYPES[index % 3]
    if "value" not in case.gradients:
        pytest.skip("asks for no gradient of value")
    small = Case(
        **{**case.__dict__, "num_queries": min(case.num_queries, 5), "batch": min(case.batch, 1), "num_heads": 1}
    )
    results = compare_op(ordered_op, make_inputs(small, dtype, DEVICE, seed=0), ("value",))
    assert [result for result in results if not result.passed] == []


@pytest.fixture
def shuffle_programs(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Lets the interpreter run the programs of a launch in an order drawn from a seed."""
    if torch.cuda.is_available():
        pytest.skip("a GPU orders programs by itself")
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    in_order = builder.set_grid_idx

    def shuffle(seed: int) -> None:
        def set_shuffled(x: int, y: int, z: int) -> None:
            programs = torch.randperm(builder.grid_dim[0], generator=torch.Generator().manual_seed(seed))
            in_order(programs[x].item(), y, z)

        monkeypatch.setattr(builder, "set_grid_idx", set_shuffled)

    return shuffle


def test_same_bits_in_any_order_of_programs_where_atomics_differ(shuffle_programs: Callable[[int], None]) -> None:
    inputs = make_inputs(CROWDED, torch.float32, DEVICE, seed=0)
    ordered, atomic = [], []
    for seed in range(4):
        shuffle_programs(seed)
        ordered.append(evaluate(ordered_op, inputs, ("value",))["value"])
        atomic.append(evaluate(atomic_op, inputs, ("value",))["value"])
    assert all(torch.equal(gradient, ordered[0]) for gradient in ordered)
    assert not all(torch.equal(gradient, atomic[0]) for gradient in atomic)
    torch.testing.assert_close(ordered[0], atomic[0])


def test_same_bits_at_every_position_in_the_batch() -> None:
    single = make_inputs(Case("item", ((2, 3), (1, 1)), num_queries=9, batch=1), torch.float32, DEVICE, seed=0)
    other = make_inputs(Case("other", ((2, 3), (1, 1)), num_queries=9, batch=1), torch.float32, DEVICE, seed=1)
    names = ("value", "sampling_locations", "attention_weights", "grad_output")
    both = {name: torch.cat([getattr(each, name) for each in (other, single)]) for name in names}
    batch = OpInputs(spatial_shapes=single.spatial_shapes, **both)
    alone = evaluate(ordered_op, single, ("value",))["value"]
    assert torch.equal(evaluate(ordered_op, batch, ("value",))["value"][1:], alone)


@pytest.mark.parametrize("asked", [None, True, False])
@pytest.mark.parametrize("mode", [True, False])
def test_none_follows_pytorch(mode: bool, asked: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def record(grad_output: Tensor, inputs: launch.Inputs, dtype: torch.dtype, options: object) -> Tensor:
        calls.append(options)
        return torch.zeros_like(inputs.value)

    monkeypatch.setattr(launch, "sorted_value_gradient", record)
    inputs = make_inputs(CROWDED, torch.float32, DEVICE, seed=0)
    value = inputs.value.requires_grad_()
    arguments = (value, inputs.spatial_shapes, None, inputs.sampling_locations, inputs.attention_weights)
    torch.use_deterministic_algorithms(mode)
    try:
        output = ms_deform_attn(*arguments, deterministic=asked, backend="triton")
    finally:
        torch.use_deterministic_algorithms(False)
    output.sum().backward()
    assert calls == ([DEFAULT_OPTIONS] if asked or (asked is None and mode) else [])


@pytest.mark.parametrize("op", [ordered_op, atomic_op])
def test_a_non_finite_upstream_row_reaches_only_the_pixels_of_its_samples(op: Callable[..., Tensor]) -> None:
    case = Case("one sample a query", ((4, 5),), num_queries=2, batch=1, num_heads=1, head_dim=3, num_points=1)
    inputs = make_inputs(case, torch.float32, DEVICE, seed=0)
    inputs.sampling_locations.copy_(torch.tensor([[0.3, 0.375], [0.9, 0.9]]).view(1, 2, 1, 1, 1, 2))
    inputs.grad_output[0, 0] = torch.nan
    gradient = evaluate(op, inputs, ("value",))["value"].view(4, 5, 3).isnan().any(-1)
    rows, columns = gradient.nonzero(as_tuple=True)
    assert set(rows.tolist()) == {1, 2}
    assert set(columns.tolist()) == {1, 2}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", LARGE_CASES, ids=lambda case: case.name)
def test_large_cases_are_right_and_equal_over_fifty_runs(case: Case, dtype: torch.dtype) -> None:
    inputs = make_inputs(case, dtype, DEVICE, seed=0)
    assert [result for result in compare_op(ordered_op, inputs, ("value",)) if not result.passed] == []
    first = evaluate(ordered_op, inputs, ("value",))["value"]
    for _ in range(50):
        assert torch.equal(evaluate(ordered_op, inputs, ("value",))["value"], first)


@pytest.mark.gpu
def test_fused_encoder_is_equal_over_ten_runs() -> None:
    inputs = make_inputs(LARGE_CASES[0], torch.bfloat16, DEVICE, seed=0)
    points = torch.rand(2, LARGE_CASES[0].num_queries, 4, 2, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    offsets = inputs.sampling_locations.bfloat16()
    gradients = []
    for _ in range(10):
        value = inputs.value.detach().requires_grad_()
        output = fused_ms_deform_attn(
            value, inputs.spatial_shapes, None, points, offsets, inputs.attention_weights, deterministic=True
        )
        gradients.append(torch.autograd.grad(output, value, inputs.grad_output)[0])
    assert all(torch.equal(gradient, gradients[0]) for gradient in gradients)
