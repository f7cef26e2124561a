"""What is left open is filled in by documented rules."""

import pytest
import torch

from msda_op.options import DEFAULT_OPTIONS, Options, Sizes
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


ENCODER = Sizes(4, 22223, 8, 32, 22223, 4, 4)
DECODER = ENCODER._replace(num_queries=300)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ({}, ("hopper", "hopper", "records")),
        ({"fused": True}, ("hopper", "hopper", "records")),
        ({"sizes": DECODER}, ("hopper", "hopper", "atomics")),
        ({"sizes": DECODER, "deterministic": True}, ("hopper", "hopper", "records")),
        ({"sizes": DECODER, "num_buffers": 2}, ("hopper", "tiles", "atomics")),
        ({"dtype": torch.float32}, ("hopper", "hopper", "records")),
        ({"dtype": torch.float32, "sizes": DECODER}, ("hopper", "hopper", "atomics")),
        ({"dtype": torch.float32, "deterministic": True}, ("hopper", "tiles", "sorted")),
        ({"fp32_grad_accum": False}, ("hopper", "tiles", "atomics")),
        ({"fp32_grad_accum": False, "deterministic": True}, ("hopper", "tiles", "sorted")),
        ({"capability": (8, 0)}, ("tiles", "tiles", "atomics")),
        ({"capability": None}, ("tiles", "tiles", "atomics")),
        ({"capability": None, "deterministic": True}, ("tiles", "tiles", "sorted")),
        ({"options": Options(align_corners=True)}, ("tiles", "tiles", "atomics")),
    ],
    ids=str,
)
def test_plan_says_what_and_why(call: dict, expected: tuple[str, str, str]) -> None:
    training = {"sizes": ENCODER, "dtype": torch.bfloat16, "options": DEFAULT_OPTIONS}
    plan = choose_kernels(**(training | {"fused": False, "deterministic": False, "capability": (9, 0)} | call))
    assert (plan.forward, plan.backward, plan.grad_value) == expected
    assert plan.reason
