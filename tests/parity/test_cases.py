"""The default list keeps what it promises."""

import pytest
import torch

from parity.cases import DEFAULT_CASES, INPUT_NAMES, Case, make_inputs

CPU = torch.device("cpu")


def test_list_covers_the_required_traits() -> None:
    shapes = {pair for case in DEFAULT_CASES for pair in case.spatial_shapes}
    assert (1, 1) in shapes
    assert any(h != w for h, w in shapes)
    assert any(h % 2 and w % 2 for h, w in shapes - {(1, 1)})
    assert any(case.head_dim & (case.head_dim - 1) for case in DEFAULT_CASES)
    assert {0, 1} <= {case.num_queries for case in DEFAULT_CASES}
    assert 3 in {case.num_points for case in DEFAULT_CASES}
    assert {case.placement for case in DEFAULT_CASES} == {"around", "far", "edges", "centres", "broken"}
    assert {len(case.gradients) for case in DEFAULT_CASES} == {1, 3}
    assert any(not case.contiguous for case in DEFAULT_CASES)
    assert len({case.name for case in DEFAULT_CASES}) == len(DEFAULT_CASES)


@pytest.mark.parametrize("case", DEFAULT_CASES, ids=lambda case: case.name)
def test_inputs_have_their_shapes_and_dtypes(case: Case) -> None:
    inputs = make_inputs(case, torch.bfloat16, CPU, seed=0)
    num_levels = len(case.spatial_shapes)
    sample = (case.batch, case.num_queries, case.num_heads, num_levels, case.num_points)
    assert inputs.value.shape[0] == case.batch
    assert inputs.value.shape[2:] == (case.num_heads, case.head_dim)
    assert inputs.sampling_locations.shape == (*sample, 2)
    assert inputs.attention_weights.shape == sample
    assert inputs.grad_output.shape == (case.batch, case.num_queries, case.num_heads * case.head_dim)
    assert inputs.sampling_locations.dtype == torch.float32
    assert inputs.value.dtype == inputs.attention_weights.dtype == inputs.grad_output.dtype == torch.bfloat16
    if not case.contiguous:
        assert not any(getattr(inputs, name).is_contiguous() for name in INPUT_NAMES)


def test_seed_decides_the_numbers() -> None:
    first, again, other = (make_inputs(DEFAULT_CASES[0], torch.float32, CPU, seed) for seed in (3, 3, 4))
    assert torch.equal(first.value, again.value)
    assert torch.equal(first.sampling_locations, again.sampling_locations)
    assert not torch.equal(first.value, other.value)


def test_strided_inputs_hold_the_same_numbers() -> None:
    case = next(case for case in DEFAULT_CASES if not case.contiguous)
    plain = Case(case.name, case.spatial_shapes, case.num_queries)
    strided, contiguous = (make_inputs(each, torch.float32, CPU, seed=0) for each in (case, plain))
    for name in (*INPUT_NAMES, "grad_output"):
        assert torch.equal(getattr(strided, name), getattr(contiguous, name))


def test_placements_are_what_they_say() -> None:
    inputs = {case.placement: make_inputs(case, torch.float32, CPU, seed=0) for case in DEFAULT_CASES}
    locations = {placement: each.sampling_locations for placement, each in inputs.items()}
    assert set(locations["edges"].unique().tolist()) == {0.0, 1.0}
    assert locations["far"].abs().max() > 10
    assert locations["broken"].isnan().any()
    assert locations["broken"].isinf().any()
    pixels = locations["centres"] * torch.tensor([(8, 4), (1, 2)])[:, None] - 0.5
    assert torch.equal(pixels, pixels.round())
    assert {-1.0, 8.0} <= set(pixels[:, :, :, 0, :, 0].unique().tolist())


def test_ordinary_locations_keep_off_the_pixel_grid() -> None:
    case = DEFAULT_CASES[0]
    locations = make_inputs(case, torch.float32, CPU, seed=0).sampling_locations
    pixels = locations * torch.tensor([(w, h) for h, w in case.spatial_shapes])[:, None] - 0.5
    assert (pixels - pixels.round()).abs().min() > 0.009
