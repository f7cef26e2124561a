"""The instructive variants, on a GPU; the direction of each effect, not its size."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from parity import variants
from parity.presets import PRESETS, make_preset_inputs
from parity.sweep import plain_launches, start_launch
from parity.timing import CudaStopwatch, Summary
from parity.variants import (
    backward_shapes,
    coalescing_and_unrolling,
    half_atomics,
    norm_gradients,
    timing_pitfalls,
)

gpu = pytest.mark.gpu


def test_both_ways_to_add_up_the_gradients_of_a_norm_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[int] = []

    def measure(call: Callable[[], torch.Tensor], stopwatch: object, repeats: int) -> SimpleNamespace:
        called.append(call().numel())
        return SimpleNamespace(ms=Summary(median=1.0, p20=1.0, p80=1.0, repeats=repeats))

    monkeypatch.setattr(variants, "measure_device_time", measure)  # no device here has a clock
    gradient = torch.randn(70, 12, generator=torch.Generator().manual_seed(0))
    partial_sums, atomics = norm_gradients(gradient, stopwatch=None, repeats=5)
    assert called == [24, 24]
    assert (partial_sums["shipped"], atomics["shipped"]) == (True, False)
    assert partial_sums["repeatable"]
    for row in (partial_sums, atomics):
        assert row["relative_error"] < 1e-6
        assert row["median"] == 1.0


@gpu
def test_spoiled_gathers_are_slower() -> None:
    rows = coalescing_and_unrolling(torch.device("cuda"), torch.bfloat16, CudaStopwatch(), repeats=5)
    medians = {row["variant"]: row["median"] for row in rows}
    assert len(medians) == 4
    assert medians["channels far apart"] > 1.5 * medians["rows of contiguous channels, unrolled"]


@gpu
def test_half_atomics_are_less_accurate() -> None:
    inputs = make_preset_inputs(PRESETS["encoder"], 1, torch.bfloat16, torch.device("cuda"), seed=0)
    full, half = half_atomics(inputs, CudaStopwatch(), repeats=5)
    assert half["relative_error"] > 3 * full["relative_error"]
    assert full["relative_error"] < 1e-4


@gpu
def test_pitfalls_make_a_short_call_look_slow() -> None:
    inputs = make_preset_inputs(PRESETS["decoder"], 1, torch.bfloat16, torch.device("cuda"), seed=0)
    forward = plain_launches(inputs)["forward"]
    right, *_, wall = timing_pitfalls(lambda: start_launch(forward), CudaStopwatch(), repeats=20)
    assert wall["median"] > right["median"]


@gpu
def test_every_shape_of_the_backward_is_timed() -> None:
    inputs = make_preset_inputs(PRESETS["decoder"], 1, torch.bfloat16, torch.device("cuda"), seed=0)
    rows = backward_shapes(inputs, CudaStopwatch(), repeats=5)
    assert len(rows) > 8
    assert sum(row["shipped"] for row in rows) == 1


@gpu
def test_atomics_add_up_the_gradients_of_a_norm_in_any_order() -> None:
    gradient = torch.randn(90000, 256, device="cuda", generator=torch.Generator("cuda").manual_seed(0)).bfloat16()
    partial_sums, atomics = norm_gradients(gradient, CudaStopwatch(), repeats=5)
    assert partial_sums["repeatable"]
    assert not atomics["repeatable"]
    assert max(row["relative_error"] for row in (partial_sums, atomics)) < 1e-4
