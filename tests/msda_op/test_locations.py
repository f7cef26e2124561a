"""Sampling locations from reference points and offsets."""

import pytest
import torch

from msda_op.locations import sampling_locations_from_offsets

SHAPES = ((4, 8), (2, 5))


def test_point_moves_by_pixels_of_each_level() -> None:
    points = torch.tensor([0.5, 0.25]).expand(1, 1, 2, 2)
    offsets = torch.tensor([2.0, -1.0]).expand(1, 1, 1, 2, 1, 2)
    locations = sampling_locations_from_offsets(points, offsets, SHAPES)
    assert locations[0, 0, 0, :, 0].tolist() == [[0.5 + 2 / 8, 0.25 - 1 / 4], pytest.approx([0.9, -0.25])]


def test_box_moves_by_shares_of_half_its_size() -> None:
    boxes = torch.tensor([0.5, 0.25, 0.4, 0.2]).expand(1, 1, 2, 4)
    offsets = torch.tensor([4.0, -2.0]).expand(1, 1, 1, 2, 4, 2)  # K = 4: one half of the size, a quarter of it
    locations = sampling_locations_from_offsets(boxes, offsets, SHAPES)
    expected = torch.tensor([0.7, 0.2]).expand(1, 1, 1, 2, 4, 2)
    torch.testing.assert_close(locations, expected, rtol=0, atol=1e-7)


@pytest.mark.parametrize("num_coordinates", [2, 4])
def test_equals_the_published_order_of_operations_bit_by_bit(num_coordinates: int) -> None:
    generator = torch.Generator().manual_seed(0)
    points = torch.rand(2, 7, 2, num_coordinates, generator=generator)
    offsets = torch.randn(2, 7, 3, 2, 3, 2, generator=generator)
    expected = torch.empty_like(offsets)
    for level, (h, w) in enumerate(SHAPES):
        for axis, size in enumerate((w, h)):
            start = points[:, :, None, level, None, axis]
            step = offsets[:, :, :, level, :, axis]
            if num_coordinates == 2:
                expected[:, :, :, level, :, axis] = start + step / size
            else:
                expected[:, :, :, level, :, axis] = start + step / 3 * points[:, :, None, level, None, 2 + axis] * 0.5
    assert torch.equal(sampling_locations_from_offsets(points, offsets, SHAPES), expected)
    assert torch.equal(sampling_locations_from_offsets(points, offsets, torch.tensor(SHAPES)), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_offsets_give_float32_locations(dtype: torch.dtype) -> None:
    points, offsets = torch.rand(1, 2, 2, 2), torch.randn(1, 2, 1, 2, 3, 2).to(dtype)
    locations = sampling_locations_from_offsets(points, offsets, SHAPES)
    assert locations.dtype == torch.float32
    assert torch.equal(locations, sampling_locations_from_offsets(points, offsets.float(), SHAPES))


@pytest.mark.parametrize("num_coordinates", [2, 4])
def test_gradients(num_coordinates: int) -> None:
    points = torch.rand(1, 2, 2, num_coordinates, dtype=torch.float64, requires_grad=True)
    offsets = torch.randn(1, 2, 1, 2, 3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *inputs: sampling_locations_from_offsets(*inputs, SHAPES), (points, offsets))


def test_refuses_other_reference_points() -> None:
    with pytest.raises(ValueError, match=r"reference_points must end in 2 .* got shape \(1, 2, 2, 3\)"):
        sampling_locations_from_offsets(torch.rand(1, 2, 2, 3), torch.rand(1, 2, 1, 2, 3, 2), SHAPES)
