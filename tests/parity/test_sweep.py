"""Launches in another shape compute the same; the table's entry says what was measured."""

import pytest
import torch

from msda_op.triton.launch_table import LaunchKey, LaunchShape
from parity.presets import Preset, make_preset_inputs
from parity.sweep import candidate_shapes, plain_launches, reshape_launch, start_launch, sweep_launch, table_entry
from parity.timing import Summary

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PRESET = Preset("tiny", ((4, 6), (2, 3)), num_queries=30, num_heads=2, head_dim=8, num_points=4)


def test_candidates_fill_their_lanes_and_no_more() -> None:
    shapes = candidate_shapes(block_k=4, block_d=32)
    assert LaunchShape(4, 1) in shapes
    assert LaunchShape(1, 1) in shapes
    assert LaunchShape(32, 1) not in shapes
    assert LaunchShape(1, 8) not in shapes
    assert len(set(shapes)) == len(shapes)


@pytest.mark.parametrize("shape", [LaunchShape(1, 1), LaunchShape(8, 2), LaunchShape(32, 4)])
def test_a_reshaped_launch_computes_the_same(shape: LaunchShape) -> None:
    inputs = make_preset_inputs(PRESET, 2, torch.float32, DEVICE, seed=0)
    written = {
        "forward": ("output",),
        "backward": ("grad_value", "grad_points", "grad_scores"),
    }
    for kernel, names in written.items():
        first, second = (plain_launches(inputs)[kernel] for _ in range(2))
        second = reshape_launch(second, shape)
        assert second.num_programs == -(-30 // shape.block_q) * 2 * 2
        assert (second.arguments["BLOCK_Q"], second.num_warps) == shape
        for launch in (first, second):
            start_launch(launch)
        for name in names:
            torch.testing.assert_close(first.arguments[name], second.arguments[name])


def test_sweep_times_every_candidate_and_sorts_by_time() -> None:
    inputs = make_preset_inputs(PRESET, 1, torch.float32, DEVICE, seed=0)
    launch = plain_launches(inputs)["forward"]
    times = iter(range(100, 0, -1))

    def measure(call: object) -> Summary:
        time = float(next(times))
        return Summary(time, time, time, 5)

    rows = sweep_launch(launch, measure)
    shapes = candidate_shapes(4, 8)
    assert len(rows) == len(shapes)
    assert [row["median"] for row in rows] == sorted(row["median"] for row in rows)
    assert (rows[0]["block_q"], rows[0]["num_warps"]) == shapes[-1]
    assert [row["shipped"] for row in rows].count(True) == 1


def test_entry_of_the_fastest_shape() -> None:
    inputs = make_preset_inputs(PRESET, 2, torch.bfloat16, DEVICE, seed=0)
    row = {"block_q": 8, "num_warps": 2, "median": 0.25}
    entry = table_entry("backward", plain_launches(inputs)["backward"], inputs, row, 90, "a card, commit abc")
    assert entry.key == LaunchKey(90, "backward", 2, 4, 8, "few")
    assert entry.shape == LaunchShape(8, 2)
    assert (entry.milliseconds, entry.measured_on) == (0.25, "a card, commit abc")
