"""The bounds."""

import pytest
import torch

from parity.tolerances import FLOAT32_ROUNDOFF, GRADIENT, OUTPUT


def test_factors_are_two_and_three() -> None:
    assert (OUTPUT.factor, GRADIENT.factor) == (2.0, 3.0)
    assert OUTPUT.limit(0.5, 0.0, torch.float32) == 1.0
    assert GRADIENT.limit(0.5, 0.0, torch.float32) == 1.5


@pytest.mark.parametrize(("dtype", "digits"), [(torch.float32, 23), (torch.float16, 10), (torch.bfloat16, 7)])
def test_floor_is_one_unit_in_the_last_place_and_grows_with_the_numbers(dtype: torch.dtype, digits: int) -> None:
    assert OUTPUT.limit(0.0, 8.0, dtype) == pytest.approx(8 * (2.0**-digits + 4 * FLOAT32_ROUNDOFF))


def test_every_bound_has_a_reason() -> None:
    assert OUTPUT.reason
    assert GRADIENT.reason
