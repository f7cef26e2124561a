"""Each limit is refused with its reason, and only beyond it."""

import pytest
import torch

from msda_op.triton.hopper import supports

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def ask(
    shapes=((4, 5), (2, 2)), dtype=torch.bfloat16, head_dim=32, num_queries=3, num_points=4, fused=False, layout="BLNC"
) -> str | None:
    value = torch.empty(1, 1, 1, 1, dtype=dtype, device=DEVICE).expand(2, sum(h * w for h, w in shapes), 2, head_dim)
    samples = torch.empty(1, 1, 1, 1, 1, 1, device=DEVICE).expand(2, num_queries, 2, len(shapes), num_points, 2)
    return supports(value, shapes, samples, fused=fused, value_layout=layout)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": torch.float16, "head_dim": 64},
        {"layout": "BNLC"},
        {"shapes": ((2, 2),) * 8, "num_points": 16},
        {"shapes": ((4, 5),) * 4, "fused": True},
        {"shapes": ((4, 5),), "num_points": 16, "fused": True},
        {"num_queries": 2**17},
    ],
    ids=str,
)
def test_supported(options: dict) -> None:
    assert ask(**options) is None


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"dtype": torch.float32}, "bfloat16 or float16"),
        ({"head_dim": 48}, "D must"),
        ({"layout": "BCLN"}, "value_layout"),
        ({"shapes": ((4, 5), (1, 7))}, "2 rows"),
        ({"shapes": ((6, 1),)}, "2 columns"),
        ({"shapes": ((4097, 4097),)}, "pixels"),
        ({"shapes": ((2, 2),) * 9}, "L must"),
        ({"num_points": 17}, "K at most"),
        ({"shapes": ((4, 5),) * 5, "fused": True}, "fused"),
        ({"num_points": 9, "fused": True}, "fused"),
        ({"num_queries": 2**17 + 1}, "Q must"),
    ],
    ids=str,
)
def test_refused(options: dict, reason: str) -> None:
    assert reason in (ask(**options) or "")


def test_devices_without_the_kernels_are_refused() -> None:
    value = torch.empty(2, 20, 2, 32, dtype=torch.bfloat16, device="meta")
    samples = torch.empty(2, 3, 2, 1, 4, 2, device="meta")
    assert "capability 9.0" in (supports(value, ((4, 5),), samples) or "")
