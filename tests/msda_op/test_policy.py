"""What is left open is filled in by documented rules."""

import pytest
import torch

from msda_op.options import DEFAULT_OPTIONS, Sizes
from msda_op.policy import accumulates_in_fp32, accumulator_dtype, is_deterministic
from msda_op.triton.plan import choose_kernels


@pytest.mark.parametrize(
    ("dtype", "asked", "expected"),
    [
        (torch.float32, None, torch.float32),
        (torch.float32, False, torch.float32),
        (torch.bfloat16, None, torch.float32),
        (torch.bfloat16, True, torch.float32),
        (torch.bfloat16, False, torch.bfloat16),
        (torch.float16, None, torch.float32),
        (torch.float16, False, torch.float16),
    ],
)
def test_sums_are_float32_unless_half_is_asked_for(
    dtype: torch.dtype, asked: bool | None, expected: torch.dtype
) -> None:
    assert accumulator_dtype(dtype, asked) == expected
    assert accumulates_in_fp32(dtype, asked) == (expected == torch.float32)


def test_order_follows_pytorch_unless_asked_for() -> None:
    assert [is_deterministic(asked) for asked in (None, True, False)] == [False, True, False]
    torch.use_deterministic_algorithms(True)
    try:
        assert [is_deterministic(asked) for asked in (None, True, False)] == [True, True, False]
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("deterministic", "expected"), [(False, "atomics"), (True, "sorted")])
def test_plan_says_what_and_why(deterministic: bool, expected: str) -> None:
    sizes = Sizes(4, 22223, 8, 32, 22223, 4, 4)
    plan = choose_kernels(
        sizes, torch.bfloat16, DEFAULT_OPTIONS, fused=True, deterministic=deterministic, capability=(9, 0)
    )
    assert (plan.forward, plan.backward, plan.grad_value) == ("tiles", "tiles", expected)
    assert plan.reason
