"""Each limit is refused with its reason, and only beyond it."""

import pytest
import torch

from msda_op.options import DEFAULT_OPTIONS, Options, Sizes
from msda_op.triton.hopper import supports

SIZES = Sizes(batch=4, value_length=100, num_heads=8, head_dim=32, num_queries=30, num_levels=4, num_points=4)


def ask(dtype=torch.bfloat16, options=DEFAULT_OPTIONS, fused=False, capability=(9, 0), **sizes) -> str | None:
    return supports(SIZES._replace(**sizes), dtype, options, fused=fused, capability=capability)


@pytest.mark.parametrize(
    "call",
    [
        {},
        {"dtype": torch.float16, "head_dim": 64},
        {"dtype": torch.float32},
        {"options": Options(value_layout="BNLC")},
        {"num_levels": 8, "num_points": 16},
        {"fused": True},
        {"num_levels": 1, "num_points": 16, "fused": True},
        {"num_queries": 2**17},
        {"num_queries": 0, "batch": 0},
    ],
    ids=str,
)
def test_supported(call: dict) -> None:
    assert ask(**call) is None


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ({"dtype": torch.float64}, "got torch.float64"),
        ({"head_dim": 48}, "D of"),
        ({"options": Options("border")}, "'border'"),
        ({"options": Options(align_corners=True)}, "align_corners"),
        ({"options": Options(sampling_locations_layout="B2QHLP")}, "'B2QHLP'"),
        ({"num_levels": 9}, "L of at most"),
        ({"num_points": 17}, "K of at most"),
        ({"num_levels": 5, "fused": True}, "when fused"),
        ({"num_levels": 2, "num_points": 9, "fused": True}, "when fused"),
        ({"num_queries": 2**17 + 1}, "Q of at most"),
        ({"value_length": 2}, "S of at least"),
        ({"value_length": 2**24 + 1}, "S of at most"),
        ({"capability": (8, 0)}, "(8, 0)"),
        ({"capability": (10, 0)}, "(10, 0)"),
        ({"capability": None}, "9.0"),
    ],
    ids=str,
)
def test_refused(call: dict, reason: str) -> None:
    assert reason in (ask(**call) or "")
