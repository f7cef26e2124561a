"""The Hopper path against the reference: 2x / 3x rule, both halves, uninitialised memory full of NaN."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from msda_op.locations import sampling_locations_from_offsets
from msda_op.reference import ms_deform_attn_reference
from msda_op.triton import hopper
from msda_op.triton.hopper import launch
from msda_op.triton.hopper.call import prepare_call
from parity.cases import INPUT_NAMES, Case, OpInputs, make_inputs
from parity.comparisons import Comparison, compare, compare_results, evaluate
from parity.tolerances import GRADIENT, OUTPUT

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WAYS = ({"scatter": "atomics"}, {"scatter": "records"}, {"deterministic": True})

_FOUR = ((6, 9), (3, 5), (4, 2), (2, 2))
CASES = (
    Case("four levels, four points", _FOUR, num_queries=5, head_dim=32),
    Case("wide heads, three points", _FOUR[:2], num_queries=3, batch=1, num_heads=3, head_dim=64, num_points=3),
    Case("one query", _FOUR, num_queries=1, batch=1, head_dim=32),
    Case("no queries", _FOUR, num_queries=0, head_dim=32),
    Case("no batch", _FOUR, num_queries=3, batch=0, head_dim=32),
    Case("far outside", _FOUR, num_queries=3, batch=1, head_dim=32, placement="far"),
    Case("on the edges", _FOUR, num_queries=3, batch=1, head_dim=32, placement="edges"),
    Case("on pixel centres", ((4, 8), (2, 4)), num_queries=3, head_dim=32, placement="centres"),
    Case("broken locations", _FOUR, num_queries=3, batch=1, head_dim=32, placement="broken"),
    Case("strided inputs", _FOUR, num_queries=3, batch=1, head_dim=32, contiguous=False),
    Case("two passes", _FOUR[:3], num_queries=3, batch=1, num_heads=1, head_dim=32, num_points=7),
    Case("most points", ((3, 4),) * 2, num_queries=2, batch=1, num_heads=1, head_dim=32, num_points=16),
    Case("most levels", ((2, 3),) * 8, num_queries=2, batch=1, num_heads=1, head_dim=32, num_points=1),
)
_THIN = ((1, 1), (1, 9), (9, 1), (1, 1))
THIN_CASES = (
    Case("thin levels", _THIN, num_queries=4, head_dim=32),
    Case("edges of thin levels", _THIN, num_queries=3, batch=1, head_dim=32, placement="edges"),
    Case("pixel centres of thin levels", _THIN, num_queries=3, batch=1, head_dim=32, placement="centres"),
    Case("one column, the first", ((3, 1),), num_queries=3, batch=1, head_dim=32),
)

# NaN coordinates are cast to int and masked out, which numpy remarks on.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have a deterministic implementation"),
    pytest.mark.filterwarnings("ignore:invalid value encountered"),
    pytest.mark.usefixtures("poisoned_memory"),
]


@pytest.fixture(autouse=True)
def small_sorts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sorts in small blocks: a large sort takes the interpreter seconds."""
    monkeypatch.setattr(launch, "_SORT_BLOCK", 32)


def run_hopper(inputs: OpInputs, value_layout: str = "BLNC", **way) -> dict[str, Tensor]:
    """Returns output and gradients by name, value and its gradient in the layout of `inputs`."""
    value = inputs.value if value_layout == "BLNC" else inputs.value.transpose(1, 2)
    rest = (inputs.spatial_shapes, inputs.sampling_locations, inputs.attention_weights)
    output = hopper.forward(value, *rest, value_layout=value_layout)
    grad_value, *grads = hopper.backward(inputs.grad_output, value, *rest, value_layout=value_layout, **way)
    grad_value = grad_value if value_layout == "BLNC" else grad_value.transpose(1, 2)
    return {"output": output, **dict(zip(INPUT_NAMES, (grad_value, *grads), strict=True))}


def compare_hopper(inputs: OpInputs, **options) -> tuple[Comparison, ...]:
    return compare_results(
        evaluate(ms_deform_attn_reference, inputs.double(), INPUT_NAMES),
        evaluate(ms_deform_attn_reference, inputs, INPUT_NAMES),
        run_hopper(inputs, **options),
    )


@pytest.mark.parametrize("way", WAYS[:2], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cases(case: Case, way: dict) -> None:
    results = compare_hopper(make_inputs(case, torch.bfloat16, DEVICE, seed=0), **way)
    assert [result for result in results if not result.passed] == []
    assert len(results) == 4


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("case", THIN_CASES, ids=lambda case: case.name)
def test_levels_of_one_row_or_column(case: Case, way: dict) -> None:
    layout = "BLNC" if case.batch == 1 else "BNLC"
    results = compare_hopper(make_inputs(case, torch.bfloat16, DEVICE, seed=0), value_layout=layout, **way)
    assert [result for result in results if not result.passed] == []


def test_thin_levels_read_no_pixel_beyond_value() -> None:
    """The last pixel of a column at the end of value: what follows in memory is not finite and must not be read."""
    case = THIN_CASES[0]
    inputs = make_inputs(case, torch.bfloat16, DEVICE, seed=0)
    rest = (inputs.spatial_shapes, inputs.sampling_locations, inputs.attention_weights)
    longer = torch.full((3, *inputs.value.shape[1:]), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    longer[1:2].copy_(inputs.value[:1])
    item = [tensor[:1] for tensor in rest[1:]]
    expected = hopper.forward(inputs.value[:1], case.spatial_shapes, *item)
    assert torch.equal(hopper.forward(longer[1:2], case.spatial_shapes, *item), expected)
    gradients = hopper.backward(inputs.grad_output[:1], longer[1:2], case.spatial_shapes, *item, scatter="atomics")
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_levels_that_may_be_thin_but_are_not_change_nothing() -> None:
    inputs = make_inputs(CASES[9], torch.bfloat16, DEVICE, seed=0)
    rest = (inputs.value, inputs.spatial_shapes, inputs.sampling_locations, inputs.attention_weights)
    assert torch.equal(hopper.forward(*rest, thin_levels=True), hopper.forward(*rest))
    gradients = [
        hopper.backward(inputs.grad_output, *rest, thin_levels=thin, deterministic=True) for thin in (True, None)
    ]
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


def test_tables_of_int32_and_int64_are_the_same() -> None:
    inputs = make_inputs(CASES[2], torch.bfloat16, DEVICE, seed=0)
    tables = [torch.tensor(numbers, device=DEVICE) for numbers in (_FOUR, (0, 54, 69, 77))]
    samples = (inputs.sampling_locations, inputs.attention_weights)
    results = []
    for shapes, starts in (tables, [table.int() for table in tables]):
        rest = (inputs.value, shapes, *samples)
        gradients = hopper.backward(inputs.grad_output, *rest, level_start_index=starts, deterministic=True)
        results.append((hopper.forward(*rest, level_start_index=starts), *gradients))
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


@pytest.mark.parametrize(("case", "way"), [(CASES[0], WAYS[0]), (CASES[0], WAYS[1]), (CASES[1], WAYS[2])], ids=str)
def test_float16(case: Case, way: dict) -> None:
    results = compare_hopper(make_inputs(case, torch.float16, DEVICE, seed=0), **way)
    assert [result for result in results if not result.passed] == []


FLOAT32_CASES = (CASES[0], CASES[1], CASES[5], CASES[6], CASES[8], CASES[10], THIN_CASES[0])


@pytest.mark.parametrize("way", WAYS[:2], ids=str)
@pytest.mark.parametrize("case", FLOAT32_CASES, ids=lambda case: case.name)
def test_float32(case: Case, way: dict) -> None:
    inputs = make_inputs(case, torch.float32, DEVICE, seed=0)
    results = compare_hopper(inputs, **way)
    assert [result for result in results if not result.passed] == []
    assert len(results) == 4


def test_float32_records_have_no_order() -> None:
    inputs = make_inputs(CASES[0], torch.float32, DEVICE, seed=0)
    with pytest.raises(ValueError, match="deterministic must"):
        run_hopper(inputs, deterministic=True)


@pytest.mark.parametrize("way", WAYS[:2], ids=str)
def test_float32_heads_first(way: dict) -> None:
    inputs = make_inputs(CASES[0], torch.float32, DEVICE, seed=1)
    results = compare_hopper(inputs, value_layout="BNLC", **way)
    assert [result for result in results if not result.passed] == []


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_heads_first(way: dict) -> None:
    case = Case("two queries", _FOUR, num_queries=2, batch=1, head_dim=32)
    results = compare_hopper(make_inputs(case, torch.bfloat16, DEVICE, seed=1), value_layout="BNLC", **way)
    assert [result for result in results if not result.passed] == []


@pytest.mark.parametrize("spoil", ["xy", "level", "half a pixel"])
def test_a_wrong_kernel_fails(spoil: str) -> None:
    inputs = make_inputs(CASES[0], torch.bfloat16, DEVICE, seed=0)
    locations, weights = inputs.sampling_locations, inputs.attention_weights
    if spoil == "xy":
        locations = locations.flip(-1)
    elif spoil == "level":
        weights = weights * torch.tensor([1, 1, 1, 0], device=DEVICE)[:, None]
    else:
        locations = locations + 0.5 / torch.tensor([(w, h) for h, w in _FOUR], device=DEVICE)[:, None]
    wrong = OpInputs(inputs.value, inputs.spatial_shapes, locations, weights.to(inputs.value.dtype), inputs.grad_output)
    results = compare_results(
        evaluate(ms_deform_attn_reference, inputs.double(), INPUT_NAMES),
        evaluate(ms_deform_attn_reference, inputs, INPUT_NAMES),
        run_hopper(wrong, scatter="records"),
    )
    failed = {result.name for result in results if not result.passed}
    assert {"output", "value"} <= failed


def test_weights_may_be_float32() -> None:
    inputs = make_inputs(CASES[0], torch.float32, DEVICE, seed=0)
    mixed = OpInputs(
        inputs.value.bfloat16(),
        inputs.spatial_shapes,
        inputs.sampling_locations,
        inputs.attention_weights,
        inputs.grad_output.bfloat16(),
    )
    results = compare_hopper(mixed, scatter="atomics")
    assert [result for result in results if not result.passed] == []


@pytest.mark.parametrize("asked", [(True, False, False), (False, True, False), (False, False, True), (False,) * 3])
def test_only_gradients_asked_for(asked: tuple[bool, bool, bool]) -> None:
    inputs = make_inputs(CASES[2], torch.bfloat16, DEVICE, seed=0)
    rest = (inputs.value, inputs.spatial_shapes, inputs.sampling_locations, inputs.attention_weights)
    everything = hopper.backward(inputs.grad_output, *rest, deterministic=True)
    some = hopper.backward(
        inputs.grad_output,
        *rest,
        compute_grad_value=asked[0],
        compute_grad_sampling_locations=asked[1],
        compute_grad_attention_weights=asked[2],
        deterministic=True,
    )
    for wanted, gradient, expected in zip(asked, some, everything, strict=True):
        assert torch.equal(gradient, expected) if wanted else gradient is None


def fused_reference(shapes, value, points, offsets, logits) -> Tensor:
    weights = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(3).softmax(-1).view_as(logits)
    return ms_deform_attn_reference(value, shapes, sampling_locations_from_offsets(points, offsets, shapes), weights)


def differentiate(op: Callable, shapes, tensors: tuple[Tensor, ...], upstream: Tensor) -> list[Tensor]:
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    output = op(shapes, *leaves)
    return [output.detach(), *torch.autograd.grad(output, leaves, upstream.to(output.dtype))]


@pytest.mark.parametrize(
    ("coordinates", "boundary_dtype", "way"),
    [
        (2, torch.float32, WAYS[0]),
        (2, torch.bfloat16, WAYS[1]),
        (4, torch.float16, WAYS[1]),
        (4, torch.bfloat16, WAYS[2]),
    ],
    ids=str,
)
def test_fused_boundary(coordinates: int, boundary_dtype: torch.dtype, way: dict) -> None:
    case = Case("fused", _FOUR[:3], num_queries=3, head_dim=32, num_points=3)
    inputs = make_inputs(case, torch.bfloat16, DEVICE, seed=0)
    generator = torch.Generator().manual_seed(1)
    # Points off the pixel grid: offsets in half precision are often whole pixels, where gradients jump.
    points = torch.rand(2, 3, 3, coordinates, generator=generator).to(DEVICE) * 0.9 + 0.0371
    shape = inputs.attention_weights.shape
    offsets = (torch.randn(*shape, 2, generator=generator) * 1.5).to(DEVICE, boundary_dtype)
    logits = torch.randn(shape, generator=generator).to(DEVICE, boundary_dtype)
    tensors = (inputs.value, points, offsets, logits)
    expected = differentiate(fused_reference, _FOUR[:3], tuple(t.double() for t in tensors), inputs.grad_output)
    competitor = differentiate(fused_reference, _FOUR[:3], tensors, inputs.grad_output)

    def judge(actual: tuple[Tensor | None, ...]) -> None:
        names = ("output", "value", "reference_points", "sampling_offsets", "attention_logits")
        for name, exact, other, got in zip(names, expected, competitor, actual, strict=True):
            if got is not None:
                bound = OUTPUT if name == "output" else GRADIENT
                result = compare(name, exact, other, got, bound)
                assert result.passed, result

    arguments = (inputs.value, _FOUR[:3], points, offsets, logits)
    output = hopper.fused_forward(*arguments)
    direct = hopper.fused_backward(inputs.grad_output, *arguments, **way)
    assert direct[1] is None
    judge((output, *direct))
    chained = hopper.fused_backward(inputs.grad_output, *arguments, compute_grad_reference_points=True, **way)
    assert all(gradient is not None for gradient in chained)
    judge((output, *chained))


@pytest.mark.parametrize("way", WAYS[1:], ids=str)
def test_a_broken_gradient_row_stays_in_its_windows(way: dict) -> None:
    inputs = make_inputs(Case("one", ((9, 15),), 2, 1, 1, 32, 1), torch.bfloat16, DEVICE, seed=0)
    locations = torch.tensor([[1.5, 1.5], [11.5, 7.5]], device=DEVICE).view(1, 2, 1, 1, 1, 2)
    locations = locations / torch.tensor([15.0, 9.0], device=DEVICE)  # pixels (1, 1) and (11, 7): another tile
    inputs.grad_output[0, 0, 3] = torch.inf
    weights = torch.ones_like(locations[..., 0]).bfloat16()
    grad_value, _, _ = hopper.backward(inputs.grad_output, inputs.value, ((9, 15),), locations, weights, **way)
    finite = grad_value[0, :, 0].isfinite().view(9, 15, 32)
    window = torch.zeros(9, 15, dtype=torch.bool, device=DEVICE)
    window[:4, :8] = True  # rows 0-3, columns 0-7: the window of the tile of (1, 1)
    assert not finite[1, 1, 3]
    assert finite[~window].all()
    assert finite[..., [0, 1, 2, 4, 31]].all()  # other channels


@pytest.mark.parametrize("way", WAYS[:2], ids=str)
def test_a_broken_pixel_spoils_only_samples_that_hold_it(way: dict) -> None:
    inputs = make_inputs(CASES[0], torch.bfloat16, DEVICE, seed=0)
    exact = run_hopper(inputs, **way)
    inputs.value[0, 5, 0] = torch.nan
    spoilt = run_hopper(inputs, **way)
    assert torch.equal(spoilt["output"][1], exact["output"][1])  # another item
    assert torch.equal(spoilt["output"][0, :, 32:], exact["output"][0, :, 32:])  # another head
    assert spoilt["value"].isfinite().all()


def test_weights_beyond_float16_overflow_as_documented() -> None:
    inputs = make_inputs(Case("one", ((4, 4),), 1, 1, 1, 32, 1), torch.bfloat16, DEVICE, seed=0)
    locations = torch.full((1, 1, 1, 1, 1, 2), 0.375, device=DEVICE)  # the centre of pixel (1, 1)
    value = torch.ones_like(inputs.value)
    rest = (((4, 4),), locations)
    assert hopper.forward(value, *rest, torch.full((1, 1, 1, 1, 1), 6e4, device=DEVICE)).isfinite().all()
    assert not hopper.forward(value, *rest, torch.full((1, 1, 1, 1, 1), 7e4, device=DEVICE)).isfinite().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("thin_levels", [True, False])
def test_a_table_of_zeros_leads_to_no_row_in_front_of_value(thin_levels: bool, dtype: torch.dtype) -> None:
    """AOTInductor tries kernels on tables that are full of zeros, and value may begin where the memory does."""
    sizes, surroundings = (2, 3, 2, 32), torch.full((4, 6, 2, 32), float("nan"), dtype=dtype, device=DEVICE)
    value = surroundings[2:].flatten()[: torch.Size(sizes).numel()].view(sizes).fill_(1.0)
    tables = (torch.zeros(2, 2, dtype=torch.int64, device=DEVICE), torch.zeros(2, dtype=torch.int64, device=DEVICE))
    locations = torch.rand(2, 5, 2, 2, 4, 2, device=DEVICE)
    weights = torch.rand(2, 5, 2, 2, 4, device=DEVICE).to(dtype)
    call = prepare_call(value, tables, locations, None, weights, "BLNC", thin_levels)
    assert launch.run_forward(call).isfinite().all()
