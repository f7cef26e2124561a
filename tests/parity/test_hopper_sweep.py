"""Hopper kernels in another launch shape compute the same; a sweep tries registers, then shapes."""

from dataclasses import replace

import pytest
import torch

from msda_op.triton.hopper import tuning
from msda_op.triton.hopper.support import CAPABILITY
from msda_op.triton.hopper.tuning import LaunchShape
from parity.hopper_sweep import hopper_sweeps, sweep_shapes
from parity.presets import Preset, make_preset_inputs
from parity.timing import Summary

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PRESET = Preset("tiny", ((4, 6), (2, 3)), num_queries=9, num_heads=2, head_dim=32, num_points=4)


@pytest.fixture(autouse=True)
def needs_hopper() -> None:
    if DEVICE.type == "cuda" and torch.cuda.get_device_capability() != CAPABILITY:
        pytest.skip("made for compute capability 9.0")


@pytest.mark.parametrize("least", [0, 10**9], ids=["records", "atomics"])
def test_a_reshaped_launch_computes_the_same(least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "_MIN_RECORDS", least)
    inputs = make_preset_inputs(PRESET, 1, torch.bfloat16, DEVICE, seed=0)
    written = {"forward": "output", "backward": "grad_weights", "reduce": "target", "count": "counters"}
    found = hopper_sweeps(inputs, CAPABILITY)
    assert set(found) == {
        f"{word}{name}"
        for word in ("", "fused ")
        for name in ("forward", "backward", *(("counting forward", "count", "reduce") if least == 0 else ()))
    }
    for name, sweep in found.items():
        if name.startswith("fused") or name.split()[-1] not in written:
            continue
        target = sweep.launch.arguments[written[name.split()[-1]]]
        results = []
        for launch in (sweep.launch, sweep.reshaped(LaunchShape(2, 2, 80))):
            target.zero_()
            for each in (*sweep.prepare, launch):
                each.run(inputs.value)
            results.append(target.clone())
        assert results[0].count_nonzero() > 0, name
        torch.testing.assert_close(*results)


def test_unsupported_workloads_have_nothing_to_time() -> None:
    inputs = make_preset_inputs(replace(PRESET, head_dim=8), 1, torch.bfloat16, DEVICE, seed=0)
    assert hopper_sweeps(inputs, CAPABILITY) == {}


def test_sweep_tries_registers_and_then_shapes() -> None:
    inputs = make_preset_inputs(PRESET, 1, torch.bfloat16, DEVICE, seed=0)
    sweep = hopper_sweeps(inputs, CAPABILITY)["forward"]
    times = iter([5.0, 4.0, 1.0, *[3.0] * 100])

    def measure(call: object) -> Summary:
        time = next(times)
        return Summary(time, time, time, 5)

    rows = sweep_shapes(sweep, inputs.value, measure)
    assert (rows[0]["warps"], rows[0]["iterations"]) == (sweep.shipped.warps, sweep.shipped.iterations)
    others = [row for row in rows if (row["warps"], row["iterations"]) != (rows[0]["warps"], rows[0]["iterations"])]
    assert {row["registers"] for row in others} == {rows[0]["registers"]}
    assert len(others) == 15
    assert [row["shipped"] for row in rows].count(True) == 1
    assert len(rows) == 30
