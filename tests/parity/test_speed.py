"""Rows of the speed benchmark: what fails its accuracy check is never timed."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from msda_op.reference import ms_deform_attn_reference
from parity.peers import Peer, fused_implementations, fused_reference
from parity.presets import Preset, make_preset_inputs
from parity.speed import Judge, Workload, compare_repeats, format_row, fuse_workload, measure_row, run_workload
from parity.timing import DeviceTime, Summary

PRESET = Preset("tiny", ((4, 6), (2, 3)), num_queries=7, num_heads=2, head_dim=4, num_points=2)
Shapes = tuple[tuple[int, int], ...]


class FixedMeter:
    """Gives the times it was made with, and counts what was measured; still runs each call once."""

    def __init__(self, milliseconds: float = 0.5, clocks_dropped: bool = False) -> None:
        self.measured = 0
        self._time = DeviceTime(Summary(milliseconds, milliseconds, milliseconds, 5), None, clocks_dropped)

    def device_time(self, call: Callable[[], Any]) -> DeviceTime:
        call()
        self.measured += 1
        return self._time

    def host_time(self, call: Callable[[], Any]) -> Summary:
        call()
        return Summary(1.0, 1.0, 1.0, 5)

    def wall_time(self, call: Callable[[], Any]) -> Summary:
        call()
        return Summary(3.0, 2.0, 4.0, 5)

    def graph_time(self, call: Callable[[], Any]) -> Summary:
        call()
        return Summary(0.25, 0.25, 0.25, 5)

    def kernel_times(self, call: Callable[[], Any]) -> dict[str, float]:
        call()
        return {"kernel": 0.125}

    def peak_mib(self, call: Callable[[], Any]) -> float:
        call()
        return 12.0

    def gpu_state(self) -> dict[str, str]:
        return {"clocks.sm": "1980 MHz"}


@pytest.fixture(scope="module", params=["fp32", "bf16"])
def workload(request: pytest.FixtureRequest) -> Workload:
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[request.param]
    return Workload(PRESET, 3, request.param, make_preset_inputs(PRESET, 3, dtype, torch.device("cpu"), seed=0))


def measure(op: Callable[..., Tensor], workload: Workload, meter: FixedMeter) -> dict[str, Any]:
    return measure_row(Peer("under test", op), workload, Judge(workload.inputs), meter)


def test_an_accurate_op_is_timed(workload: Workload) -> None:
    meter = FixedMeter()
    row = measure(ms_deform_attn_reference, workload, meter)
    assert row["status"] == "timed"
    assert meter.measured == 2
    assert (row["preset"], row["batch"], row["dtype"]) == ("tiny", 3, workload.dtype_name)
    assert row["forward_device_ms_median"] == 0.5
    assert (row["backward_wall_ms_p20"], row["backward_wall_ms_p80"]) == (2.0, 4.0)
    assert row["forward_host_ms_median"] == 1.0
    assert row["peak_mib"] == 12.0
    assert row["forward_kernels_ms"] == row["backward_kernels_ms"] == {"kernel": 0.125}
    assert row["gpu_before"] == row["gpu_after"] == {"clocks.sm": "1980 MHz"}
    assert row["forward_gb_s"] == pytest.approx(workload.traffic.forward / 0.5e-3 / 1e9)
    assert set(row["relative_errors"]) == {"output", "value", "sampling_locations", "attention_weights"}
    assert json.loads(json.dumps(row)) == row


def test_only_what_can_be_captured_is_timed_in_a_graph(workload: Workload) -> None:
    peers = [Peer("captured", ms_deform_attn_reference, captured=True), Peer("other", ms_deform_attn_reference)]
    captured, other = run_workload(workload, peers, FixedMeter(), lambda row: None)
    assert captured["forward_graph_ms_median"] == captured["both_graph_ms_p80"] == 0.25
    assert not any("graph" in name for name in other)
    assert "graph 0.2500, both 0.2500 ms" in format_row(captured, 4000.0)


def shift(value: Tensor, shapes: Shapes, locations: Tensor, weights: Tensor) -> Tensor:
    return ms_deform_attn_reference(value, shapes, locations + 0.02, weights)


def spoil_last_item(value: Tensor, shapes: Shapes, locations: Tensor, weights: Tensor) -> Tensor:
    scale = torch.ones(len(value), 1, 1, dtype=value.dtype)
    scale[-1] = 1.1
    return ms_deform_attn_reference(value, shapes, locations, weights) * scale


def detach_value(value: Tensor, shapes: Shapes, locations: Tensor, weights: Tensor) -> Tensor:
    return ms_deform_attn_reference(value.detach() + 0 * value, shapes, locations, weights)


@pytest.mark.parametrize("sabotage", [shift, spoil_last_item, detach_value])
def test_an_inaccurate_op_is_refused_and_never_timed(sabotage: Callable[..., Tensor], workload: Workload) -> None:
    meter = FixedMeter()
    row = measure(sabotage, workload, meter)
    assert row["status"] == "refused"
    assert meter.measured == 0
    assert "allowed" in row["reason"]
    assert not any(name.endswith("_ms_median") for name in row)
    assert "REFUSED" in format_row(row, 1000.0)


def test_only_a_wrong_gradient_is_named(workload: Workload) -> None:
    row = measure(detach_value, workload, FixedMeter())
    assert row["reason"].startswith("value max error")
    assert "output" not in row["reason"]


def test_an_op_that_raises_is_reported_and_the_next_one_runs(workload: Workload) -> None:
    def explode(*_: Any) -> Tensor:
        raise RuntimeError("no kernel for this card")

    seen: list[dict[str, Any]] = []
    peers = [Peer("broken", explode), Peer("sound", ms_deform_attn_reference)]
    rows = run_workload(workload, peers, FixedMeter(), seen.append)
    assert [row["status"] for row in rows] == ["failed", "timed"]
    assert rows[0]["reason"] == "RuntimeError: no kernel for this card"
    assert seen == rows


def test_mistakes_of_ours_are_not_reported_as_a_failed_peer(workload: Workload) -> None:
    def mistake(*_: Any) -> Tensor:
        raise TypeError("a wrong call")

    with pytest.raises(TypeError, match="a wrong call"):
        measure(mistake, workload, FixedMeter())


def test_repeats_of_one_op_give_the_noise(workload: Workload) -> None:
    rows = [measure(ms_deform_attn_reference, workload, FixedMeter(time)) for time in (0.5, 0.55)]
    difference = compare_repeats(rows)["relative_difference"]
    assert difference["forward_device_ms"] == pytest.approx(0.1)
    assert difference["backward_device_ms"] == pytest.approx(0.1)


def test_text_of_a_row_warns_of_dropped_clocks(workload: Workload) -> None:
    text = format_row(measure(ms_deform_attn_reference, workload, FixedMeter(clocks_dropped=True)), 4000.0)
    assert "WARNING clocks dropped" in text
    assert "forward 0.5000 [0.5000, 0.5000] wall 3.0000 host 1.0000 ms" in text
    assert "WARNING" not in format_row(measure(ms_deform_attn_reference, workload, FixedMeter()), 4000.0)


def test_fused_op_and_its_composition_are_judged_and_timed_alike(workload: Workload) -> None:
    fused, points = fuse_workload(workload)
    peers = fused_implementations(points)
    rows = run_workload(fused, peers, FixedMeter(), lambda row: None, fused_reference(points))
    assert [row["implementation"] for row in rows] == [peer.name for peer in peers]
    assert [(row["status"], row["reason"]) for row in rows] == [("timed", None)] * 2
    wrong = [Peer("of moved points", fused_implementations(points + 0.02)[0].op)]
    (row,) = run_workload(fused, wrong, FixedMeter(), lambda row: None, fused_reference(points))
    assert row["status"] == "refused"
