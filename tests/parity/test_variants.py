"""The instructive variants, on a GPU; the direction of each effect, not its size."""

import pytest
import torch

from parity.presets import PRESETS, make_preset_inputs
from parity.sweep import plain_launches, start_launch
from parity.timing import CudaStopwatch
from parity.variants import backward_shapes, coalescing_and_unrolling, half_atomics, timing_pitfalls

pytestmark = pytest.mark.gpu


def test_spoiled_gathers_are_slower() -> None:
    rows = coalescing_and_unrolling(torch.device("cuda"), torch.bfloat16, CudaStopwatch(), repeats=5)
    medians = {row["variant"]: row["median"] for row in rows}
    assert len(medians) == 4
    assert medians["channels far apart"] > 1.5 * medians["rows of contiguous channels, unrolled"]


def test_half_atomics_are_less_accurate() -> None:
    inputs = make_preset_inputs(PRESETS["encoder"], 1, torch.bfloat16, torch.device("cuda"), seed=0)
    full, half = half_atomics(inputs, CudaStopwatch(), repeats=5)
    assert half["relative_error"] > 3 * full["relative_error"]
    assert full["relative_error"] < 1e-4


def test_pitfalls_make_a_short_call_look_slow() -> None:
    inputs = make_preset_inputs(PRESETS["decoder"], 1, torch.bfloat16, torch.device("cuda"), seed=0)
    forward = plain_launches(inputs)["forward"]
    right, *_, wall = timing_pitfalls(lambda: start_launch(forward), CudaStopwatch(), repeats=20)
    assert wall["median"] > right["median"]


def test_every_shape_of_the_backward_is_timed() -> None:
    inputs = make_preset_inputs(PRESETS["decoder"], 1, torch.bfloat16, torch.device("cuda"), seed=0)
    rows = backward_shapes(inputs, CudaStopwatch(), repeats=5)
    assert len(rows) > 8
    assert sum(row["shipped"] for row in rows) == 1
