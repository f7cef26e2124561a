"""The definition against numbers worked out by hand."""

import math

import pytest
import torch

from msda_op.naive import ms_deform_attn_naive, ms_deform_attn_naive_gradients

# One level, h = 2, w = 3, one head, one channel:   1  2  3
#                                                   4  5  6
VALUE = torch.arange(1.0, 7.0, dtype=torch.float64).view(1, 6, 1, 1)
SHAPES = ((2, 3),)


def sample(x: float, y: float, weight: float = 1.0) -> float:
    locations = torch.tensor([x, y], dtype=torch.float64).view(1, 1, 1, 1, 1, 2)
    weights = torch.full((1, 1, 1, 1, 1), weight, dtype=torch.float64)
    return ms_deform_attn_naive(VALUE, SHAPES, locations, weights).item()


@pytest.mark.parametrize(
    ("x", "y", "expected"),
    [
        (1 / 6, 1 / 4, 1.0),  # centre of pixel (row 0, column 0)
        (5 / 6, 3 / 4, 6.0),  # centre of pixel (row 1, column 2)
        (1 / 2, 1 / 2, 3.5),  # between 2 and 5
        (1 / 3, 1 / 2, 3.0),  # between 1, 2, 4 and 5
        (0.0, 1 / 4, 0.5),  # left edge: half of 1, half of the padding
        (0.0, 0.0, 0.25),  # corner: a quarter of 1
        (1.0, 1.0, 1.5),  # the opposite corner: a quarter of 6
        (-1 / 6, 1 / 4, 0.0),  # a whole pixel outside
        (math.nan, 1 / 4, 0.0),
        (1 / 6, math.inf, 0.0),
    ],
)
def test_samples_of_the_two_by_three_level(x: float, y: float, expected: float) -> None:
    assert sample(x, y) == pytest.approx(expected, abs=1e-14)
    assert sample(x, y, weight=-2.0) == pytest.approx(-2 * expected, abs=1e-14)


def test_gradients_of_the_two_by_three_level() -> None:
    locations = torch.tensor([0.4, 0.6], dtype=torch.float64).view(1, 1, 1, 1, 1, 2)  # column 0.7, row 0.7
    weights = torch.full((1, 1, 1, 1, 1), 0.5, dtype=torch.float64)
    upstream = torch.full((1, 1, 1), 2.0, dtype=torch.float64)
    grad_value, grad_locations, grad_weights = ms_deform_attn_naive_gradients(
        upstream, VALUE, SHAPES, locations, weights
    )
    shares = torch.tensor([0.09, 0.21, 0.0, 0.21, 0.49, 0.0], dtype=torch.float64)
    torch.testing.assert_close(grad_value.flatten(), shares, rtol=0, atol=1e-14)
    # The level is the plane 1 + column + 3 * row: slope 1 a column (3 columns) and 3 a row (2 rows).
    torch.testing.assert_close(grad_locations.flatten(), torch.tensor([3.0, 6.0]).double(), rtol=0, atol=1e-13)
    assert grad_weights.item() == pytest.approx(2 * (1 + 0.7 + 3 * 0.7), abs=1e-13)


def test_levels_and_heads_are_added_up_and_kept_apart() -> None:
    value = torch.tensor([[1.0, 10.0], [2.0, 20.0]], dtype=torch.float64).view(1, 2, 2, 1)  # two 1x1 levels, two heads
    locations = torch.full((1, 1, 2, 2, 1, 2), 0.5, dtype=torch.float64)
    weights = torch.tensor([[0.25, 0.75], [1.0, 0.0]], dtype=torch.float64).view(1, 1, 2, 2, 1)
    output = ms_deform_attn_naive(value, ((1, 1), (1, 1)), locations, weights)
    assert output.tolist() == [[[0.25 * 1 + 0.75 * 2, 10.0]]]
