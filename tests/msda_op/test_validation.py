"""Every broken rule is a ValueError that says which argument, what was expected and what came."""

from typing import Any

import pytest
import torch

from msda_op.validation import check_sample_sizes, validate_inputs

SHAPES = ((3, 4), (1, 2))


def arguments(**changes: Any) -> dict[str, Any]:
    sound = {
        "value": torch.rand(2, 14, 3, 5),
        "spatial_shapes": SHAPES,
        "level_start_index": None,
        "sampling_locations": torch.rand(2, 7, 3, 2, 4, 2),
        "attention_weights": torch.rand(2, 7, 3, 2, 4),
    }
    return {**sound, **changes}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"level_start_index": (0, 12)},
        {"spatial_shapes": [[3, 4], [1, 2]]},
        {"spatial_shapes": torch.tensor(SHAPES), "level_start_index": torch.tensor([0, 12])},
        {
            "spatial_shapes": torch.tensor(SHAPES, dtype=torch.int32),
            "level_start_index": torch.tensor([0, 12], dtype=torch.int32),
        },
        {"value": torch.rand(2, 14, 3, 5, dtype=torch.bfloat16)},
        {"value": torch.rand(2, 14, 3, 5).double(), "sampling_locations": torch.rand(2, 7, 3, 2, 4, 2).double()},
        {"sampling_locations": torch.rand(2, 0, 3, 2, 4, 2), "attention_weights": torch.rand(2, 0, 3, 2, 4)},
    ],
)
def test_accepts(changes: dict[str, Any]) -> None:
    validate_inputs(**arguments(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"value": torch.rand(2, 14, 15)}, r"value must have 4 dimensions .* got shape \(2, 14, 15\)"),
        ({"value": torch.ones(2, 14, 3, 5).long()}, r"value must be floating point, got torch.int64"),
        ({"value": torch.rand(2, 14, 3, 0)}, r"value must have M >= 1 and D >= 1, got shape \(2, 14, 3, 0\)"),
        ({"sampling_locations": torch.rand(2, 7, 3, 8, 2)}, r"sampling_locations must have 6 dimensions"),
        ({"sampling_locations": torch.rand(2, 7, 3, 2, 4, 3)}, r"sampling_locations must be .* got shape .*4, 3\)"),
        ({"sampling_locations": torch.rand(1, 7, 3, 2, 4, 2)}, r"sampling_locations must be \[B=2, .* got shape \(1,"),
        (
            {"sampling_locations": torch.rand(2, 7, 4, 2, 4, 2)},
            r"sampling_locations must be .*M=3.* got shape \(2, 7, 4",
        ),
        ({"sampling_locations": torch.rand(2, 7, 3, 2, 0, 2)}, r"sampling_locations must be .* K >= 1"),
        (
            {"sampling_locations": torch.rand(2, 7, 3, 2, 4, 2).half()},
            r"sampling_locations must be float32, got torch.float16; compute locations in float32",
        ),
        (
            {"sampling_locations": torch.rand(2, 7, 3, 2, 4, 2).double()},
            r"sampling_locations must be float32, got torch.float64",
        ),
        ({"attention_weights": torch.rand(2, 7, 3, 8)}, r"attention_weights must have 5 dimensions"),
        (
            {"attention_weights": torch.rand(2, 7, 3, 2, 5)},
            r"attention_weights must have shape \(2, 7, 3, 2, 4\) .* got \(2, 7, 3, 2, 5\)",
        ),
        (
            {"attention_weights": torch.rand(2, 7, 3, 2, 4, device="meta")},
            r"attention_weights must be on the device of value, cpu, got meta",
        ),
        ({"spatial_shapes": ((3, 4),)}, r"spatial_shapes must hold L = 2 pairs of ints \(h, w\), got \(\(3, 4\),\)"),
        ({"spatial_shapes": ((3, 4), (1, 2, 1))}, r"spatial_shapes must hold L = 2 pairs"),
        ({"spatial_shapes": ((3, 4), (1, 2.0))}, r"spatial_shapes must hold L = 2 pairs of ints"),
        ({"spatial_shapes": ((3, 4), 2)}, r"spatial_shapes must hold L = 2 pairs"),
        ({"spatial_shapes": ((3, 4), (-1, -2))}, r"spatial_shapes must hold sizes of at least 1, got .*\(-1, -2\)"),
        ({"spatial_shapes": ((3, 4), (0, 2))}, r"spatial_shapes must hold sizes of at least 1, got .*\(0, 2\)"),
        ({"spatial_shapes": ((3, 4), (1, 3))}, r"spatial_shapes must add up to S = 14 rows of value, got .* = 15 rows"),
        ({"level_start_index": (0, 11)}, r"level_start_index must be \(0, 12\) for .* got \(0, 11\)"),
        ({"level_start_index": torch.tensor([0, 11])}, r"level_start_index must be \(0, 12\) for .* got \(0, 11\)"),
        ({"level_start_index": (0,)}, r"level_start_index must hold L = 2 ints, got \(0,\)"),
        (
            {"level_start_index": torch.tensor([0.0, 12.0])},
            r"level_start_index must be int32 or int64, got torch.float32",
        ),
        ({"spatial_shapes": torch.tensor(SHAPES)}, r"level_start_index must be given where spatial_shapes is a tensor"),
        (
            {"spatial_shapes": torch.tensor([[3, 4, 1], [1, 2, 1]])},
            r"spatial_shapes must have shape \(2, 2\), got \(2, 3\)",
        ),
        ({"spatial_shapes": torch.tensor(SHAPES).float()}, r"spatial_shapes must be int32 or int64, got torch.float32"),
        (
            {"spatial_shapes": torch.tensor(SHAPES, device="meta"), "level_start_index": (0, 12)},
            r"spatial_shapes must be on the CPU or on the device of value, cpu, got meta",
        ),
    ],
)
def test_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        validate_inputs(**arguments(**changes))


def test_table_in_device_memory_is_not_read() -> None:
    tensors = {name: tensor.to("meta") for name, tensor in arguments().items() if isinstance(tensor, torch.Tensor)}
    table = {"spatial_shapes": torch.empty(2, 2, dtype=torch.int64, device="meta")}
    starts = {"level_start_index": torch.empty(2, dtype=torch.int64, device="meta")}
    validate_inputs(**{**tensors, **table, **starts})


def test_items_beyond_int32_are_refused_and_large_batches_are_not() -> None:
    locations = torch.empty(4, 1, 1, 1, 1, 2, device="meta")
    check_sample_sizes(value=torch.empty(4, 2**20, 8, 255, device="meta"), sampling_locations=locations)
    with pytest.raises(ValueError, match=r"value must have at most 2147483647 elements in a batch item"):
        check_sample_sizes(value=torch.empty(4, 2**20, 8, 256, device="meta"))
