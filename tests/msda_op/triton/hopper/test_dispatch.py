"""The public op reaches the Hopper kernels, and they answer as the reference does: 2x / 3x rule, memory full of NaN."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from msda_op import fused_ms_deform_attn, ms_deform_attn, ms_deform_attn_backward
from msda_op.triton import hopper, launch
from msda_op.triton.hopper import tuning
from parity.cases import INPUT_NAMES, Case, make_inputs
from parity.comparisons import compare_op, evaluate
from parity.fused import FUSED_INPUT_NAMES, FusedInputs, compare_fused, evaluate_fused, make_fused_inputs

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CASE = Case("small", ((6, 9), (3, 5)), num_queries=5, head_dim=32, num_points=3)

pytestmark = [
    pytest.mark.usefixtures("hopper_kernels", "poisoned_memory"),
    pytest.mark.filterwarnings("ignore:.*does not have a deterministic implementation"),
    pytest.mark.filterwarnings("ignore:invalid value encountered"),
]


@pytest.fixture(params=["atomics", "records", "deterministic"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """Arguments of the op that take one of the three ways to the gradient of value, whatever the size."""
    monkeypatch.setattr(tuning, "_MIN_RECORDS", 0 if request.param == "records" else 10**9)
    return {"deterministic": request.param == "deterministic"}


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of the functions of the Hopper path that a test has reached; there must be some."""
    reached: list[str] = []

    def record(name: str, original: Callable, *args, **kwargs) -> Any:
        reached.append(name)
        return original(*args, **kwargs)

    for module, name in (
        (hopper.launch, "forward_launch"),
        (hopper.launch, "main_launch"),
        (hopper, "forward"),
        (hopper, "backward"),
        (hopper, "fused_backward"),
    ):
        monkeypatch.setattr(module, name, partial(record, name, getattr(module, name)))
    yield reached
    assert reached


def by_one_launch(way: dict[str, bool]) -> bool:
    """Tells whether a backward pass does without the functions of the path, which others call."""
    return tuning._MIN_RECORDS > 0 and not way["deterministic"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_plain_op(dtype: torch.dtype, way: dict, calls: list[str]) -> None:
    def op(value: Tensor, shapes, locations: Tensor, weights: Tensor) -> Tensor:
        return ms_deform_attn(value, shapes, None, locations, weights, backend="triton", **way)

    results = compare_op(op, make_inputs(CASE, dtype, DEVICE, seed=0), INPUT_NAMES)
    assert [result for result in results if not result.passed] == []
    tiles = dtype == torch.float32 and way["deterministic"]
    backward = ["main_launch"] if by_one_launch(way) else ["backward", "main_launch"]
    assert calls == ["forward_launch", *([] if tiles else backward)]


@pytest.mark.parametrize("shapes", [((6, 9), (3, 5)), ((6, 9), (15, 1))])
@pytest.mark.parametrize("on_device", [False, True])
def test_pairs_of_thick_levels_alone_save_the_work_for_thin_ones(
    shapes: tuple, on_device: bool, monkeypatch: pytest.MonkeyPatch, calls: list[str]
) -> None:
    told = []
    original = hopper.call.prepare_call
    for module in (launch, hopper.op):
        monkeypatch.setattr(module, "prepare_call", lambda *args: told.append(args[-1]) or original(*args))
    inputs = make_inputs(replace(CASE, spatial_shapes=shapes), torch.bfloat16, DEVICE, seed=0)
    table = (shapes, None)
    if on_device:
        table = (torch.tensor(shapes, device=DEVICE), torch.tensor((0, 54), device=DEVICE))
    value = inputs.value.requires_grad_()
    samples = (inputs.sampling_locations, inputs.attention_weights)
    output = ms_deform_attn(value, *table, *samples, deterministic=False, backend="triton")
    output.sum().backward()
    ms_deform_attn_backward(inputs.grad_output, value, *table, *samples, deterministic=False, backend="triton")
    assert told == [on_device or shapes[1][1] == 1] * 3


@pytest.mark.parametrize("num_coordinates", [2, 4])
def test_fused_op(num_coordinates: int, way: dict, calls: list[str]) -> None:
    op = partial(fused_ms_deform_attn, backend="triton", **way)
    inputs = make_fused_inputs(CASE, torch.bfloat16, DEVICE, 0, num_coordinates)
    results = compare_fused(op, inputs, FUSED_INPUT_NAMES)
    assert [result for result in results if not result.passed] == []
    assert calls == ["forward_launch", "fused_backward", "main_launch"]  # which asks for all gradients


def parts_of_a_product(inputs: FusedInputs, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Returns offsets and logits as the parts of one tensor, and that."""
    offsets, logits = inputs.sampling_offsets, inputs.attention_logits
    rows = torch.cat((offsets.flatten(2), logits.flatten(2)), -1).to(dtype)
    parts = rows.split((offsets[0, 0].numel(), logits[0, 0].numel()), dim=-1)
    return parts[0].view(offsets.shape), parts[1].view(logits.shape), rows


@pytest.mark.parametrize(("num_coordinates", "dtype"), [(2, torch.float32), (4, torch.bfloat16)], ids=str)
def test_parts_of_a_product_give_the_bits_of_copies(
    num_coordinates: int, dtype: torch.dtype, way: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = replace(CASE, num_points=4)
    inputs = make_fused_inputs(case, dtype, DEVICE, 0, num_coordinates)
    offsets, logits, _ = parts_of_a_product(inputs, dtype)
    launched: list[dict[str, Any]] = []
    for name in ("forward_launch", "main_launch", "count_launch"):
        original = getattr(hopper.launch, name)

        def note(*arguments: Any, original: Callable = original) -> Any:
            launch = original(*arguments)
            launched.append(launch.arguments)
            return launch

        monkeypatch.setattr(hopper.launch, name, note)
    results = []
    for samples in ((offsets, logits), (offsets.contiguous(), logits.contiguous())):
        leaves = [tensor.detach().requires_grad_() for tensor in (inputs.value, *samples)]
        value, *parts = leaves
        rest = (case.spatial_shapes, None, inputs.reference_points, *parts)
        output = fused_ms_deform_attn(value, *rest, backend="triton", **way)
        results.append((output, *torch.autograd.grad(output, leaves, inputs.grad_output)))
    ours, copies = (launched[: len(launched) // 2], launched[len(launched) // 2 :])
    tiles = dtype == torch.float32 and way["deterministic"]
    assert len(ours) == len(copies) == (1 if tiles else 3 if way["deterministic"] else 2)
    if not tiles:
        assert all(arguments["offsets"].data_ptr() == offsets.data_ptr() for arguments in ours)
        assert all(arguments["weights"].data_ptr() == logits.data_ptr() for arguments in ours)
        grad_offsets, grad_logits = results[0][2:]
        assert (grad_offsets.stride(), grad_logits.stride()) == (offsets.stride(), logits.stride())
        assert grad_offsets.untyped_storage().data_ptr() == grad_logits.untyped_storage().data_ptr()
    assert all(tensor.is_contiguous() for tensor in results[1])
    for name, one, other in zip(("output", "value", "offsets", "logits"), *results, strict=True):
        if name == "value" and DEVICE.type == "cuda" and not way["deterministic"]:
            torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-3)
        else:
            assert torch.equal(one, other), name
    assert not torch.equal(results[0][2], torch.zeros_like(offsets))


@pytest.mark.parametrize("fused", [False, True])
def test_backward_uses_what_the_forward_counted_any_number_of_times(
    fused: bool, monkeypatch: pytest.MonkeyPatch, calls: list[str]
) -> None:
    monkeypatch.setattr(tuning, "_MIN_RECORDS", 0)
    runs = []
    for name in ("run_counting_forward", "count_samples", "take_seats"):
        original = getattr(hopper.launch, name)
        monkeypatch.setattr(hopper.launch, name, lambda *args, n=name, run=original: runs.append(n) or run(*args))
    keywords = {"deterministic": False, "backend": "triton"}
    if fused:
        inputs = make_fused_inputs(CASE, torch.bfloat16, DEVICE, 0, 2)
        value = inputs.value.requires_grad_()
        rest = (inputs.reference_points, inputs.sampling_offsets, inputs.attention_logits)
        output = fused_ms_deform_attn(value, CASE.spatial_shapes, None, *rest, **keywords)
    else:
        inputs = make_inputs(CASE, torch.bfloat16, DEVICE, seed=0)
        value = inputs.value.requires_grad_()
        rest = (inputs.sampling_locations, inputs.attention_weights)
        output = ms_deform_attn(value, CASE.spatial_shapes, None, *rest, **keywords)
    first, again = (torch.autograd.grad(output, value, inputs.grad_output, retain_graph=True)[0] for _ in range(2))
    torch.testing.assert_close(first, again, rtol=1e-2, atol=1e-3)
    assert first.abs().max() > 0.1
    assert runs == ["run_counting_forward", "take_seats", "take_seats"]


def test_forward_counts_nothing_where_value_needs_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "_MIN_RECORDS", 0)
    monkeypatch.setattr(hopper.launch, "run_counting_forward", None)
    inputs = make_inputs(CASE, torch.bfloat16, DEVICE, seed=0)
    weights = inputs.attention_weights.requires_grad_()
    rest = (CASE.spatial_shapes, None, inputs.sampling_locations, weights)
    output = ms_deform_attn(inputs.value, *rest, deterministic=False, backend="triton")
    assert torch.autograd.grad(output.sum(), weights)[0].isfinite().all()


@pytest.mark.parametrize("placement", ["far", "broken"])
def test_fused_op_with_boxes_at_offsets_outside(placement: str) -> None:
    case = Case("outside", CASE.spatial_shapes, num_queries=3, head_dim=32, num_points=2, placement=placement)
    op = partial(fused_ms_deform_attn, deterministic=False, backend="triton")
    inputs = make_fused_inputs(case, torch.bfloat16, DEVICE, 0, 4)
    results = compare_fused(op, inputs, FUSED_INPUT_NAMES)
    failed = {result.name for result in results if not result.passed}
    # PyTorch multiplies zero gradients by infinite offsets; here samples without gradient count as zero.
    assert failed == ({"reference_points"} if placement == "broken" else set())
    assert evaluate_fused(op, inputs, ("reference_points",))["reference_points"].isfinite().all()


def test_half_accumulation_takes_tiles_backward(calls: list[str]) -> None:
    inputs = make_inputs(CASE, torch.float16, DEVICE, seed=0)  # no bfloat16 atomics in the interpreter

    def op(value: Tensor, shapes, locations: Tensor, weights: Tensor) -> Tensor:
        return ms_deform_attn(
            value, shapes, None, locations, weights, fp32_grad_accum=False, deterministic=False, backend="triton"
        )

    evaluate(op, inputs, INPUT_NAMES)
    assert calls == ["forward_launch"]


def test_levels_in_any_order_with_gaps_between() -> None:
    """Rows of value that no level holds neither count nor get a gradient."""
    case = Case("two levels", ((4, 5), (3, 9)), num_queries=4, head_dim=32)
    inputs = make_inputs(case, torch.bfloat16, DEVICE, seed=0)
    first, second = inputs.value.split((20, 27), dim=1)
    gap = torch.full_like(first[:, :7], torch.nan)
    spread = torch.cat((gap, second, gap, first), dim=1)
    shapes, starts = torch.tensor(case.spatial_shapes, device=DEVICE), torch.tensor((41, 7), device=DEVICE)
    rest = (shapes, inputs.sampling_locations, inputs.attention_weights)
    packed = torch.tensor((0, 20), device=DEVICE)
    output = hopper.forward(spread, *rest, level_start_index=starts)
    assert torch.equal(output, hopper.forward(inputs.value, *rest, level_start_index=packed))
    for deterministic in (False, True):
        expected, *others = hopper.backward(
            inputs.grad_output, inputs.value, *rest, level_start_index=packed, deterministic=deterministic
        )
        actual, *same = hopper.backward(
            inputs.grad_output, spread, *rest, level_start_index=starts, deterministic=deterministic
        )
        grad_before, grad_second, grad_between, grad_first = actual.split((7, 27, 7, 20), dim=1)
        assert not grad_before.any()
        assert not grad_between.any()
        torch.testing.assert_close(torch.cat((grad_first, grad_second), dim=1), expected, rtol=1e-2, atol=1e-2)
        assert all(torch.equal(*pair) for pair in zip(same, others, strict=True))


def test_gradients_add_to_one_buffer(way: dict, monkeypatch: pytest.MonkeyPatch, calls: list[str]) -> None:
    inputs = make_inputs(CASE, torch.bfloat16, DEVICE, seed=0)
    runs = []
    original = hopper.launch.run_backward
    monkeypatch.setattr(hopper.launch, "run_backward", lambda *args: runs.append(args) or original(*args))
    rest = (inputs.value, inputs.spatial_shapes, None, inputs.sampling_locations, inputs.attention_weights)
    buffer = torch.ones(1, *inputs.value.shape, device=DEVICE)
    keywords = {"backend": "triton", **way}
    fresh = ms_deform_attn_backward(inputs.grad_output.float(), *rest, **keywords)
    added = ms_deform_attn_backward(inputs.grad_output.float(), *rest, grad_value_buffer=buffer, **keywords)
    assert len(runs) == 2
    torch.testing.assert_close(buffer[0] - 1, fresh.value.float(), rtol=1e-2, atol=1e-4)
    assert torch.equal(added.sampling_locations, fresh.sampling_locations)
    assert torch.equal(added.attention_weights, fresh.attention_weights)
    calls.append("by their launches")


def test_deterministic_gradients_have_equal_bits_in_every_order_of_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make_inputs(CASE, torch.bfloat16, DEVICE, seed=0)
    rest = (inputs.value, inputs.spatial_shapes, None, inputs.sampling_locations, inputs.attention_weights)
    first = ms_deform_attn_backward(inputs.grad_output, *rest, deterministic=True, backend="triton").value
    monkeypatch.setattr(hopper.buckets, "expect_buckets", lambda *sizes: 1)  # a program takes all buckets in turn
    again = ms_deform_attn_backward(inputs.grad_output, *rest, deterministic=True, backend="triton").value
    assert torch.equal(first, again)
    ms_deform_attn(*rest, backend="triton")


def test_split_tiles_keep_their_order_whatever_the_memory_for_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper.buckets, "BUCKET_LIMIT", 4)  # so that tiles are split

    def op(value: Tensor, shapes, locations: Tensor, weights: Tensor) -> Tensor:
        return ms_deform_attn(value, shapes, None, locations, weights, deterministic=True, backend="triton")

    inputs = make_inputs(replace(CASE, batch=1), torch.bfloat16, DEVICE, seed=0)
    assert all(result.passed for result in compare_op(op, inputs, INPUT_NAMES))
    first = evaluate(op, inputs, INPUT_NAMES)["value"]
    for budget in (0, 10**5):
        monkeypatch.setattr(hopper.launch, "PART_BYTES", budget)
        assert torch.equal(evaluate(op, inputs, INPUT_NAMES)["value"], first)
