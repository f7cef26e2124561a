"""Percentiles, and the order in which a measurement queues its work; clocks are injected."""

from subprocess import CalledProcessError, CompletedProcess
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from parity.timing import (
    CudaMeter,
    CudaStopwatch,
    Summary,
    capture_graph,
    measure_copy_bandwidth,
    measure_device_time,
    measure_host_time,
    measure_wall_time,
    medians_by_name,
    percentile,
    read_gpu_state,
    summarize,
    summary_fields,
)


class RecordingStopwatch:
    """A queue on a virtual device: each entry takes its time, and the log keeps their order."""

    def __init__(self, clocks_mhz: tuple[float, ...] = (2000.0,)) -> None:
        self.log: list[str] = []
        self.now_ms = 0.0
        self._clocks = list(clocks_mhz)

    def work(self, name: str, milliseconds: float) -> None:
        self.log.append(name)
        self.now_ms += milliseconds

    def flush_caches(self) -> None:
        self.work("flush", 0.1)

    def spin(self, cycles: int) -> None:
        clock = self._clocks.pop(0) if len(self._clocks) > 1 else self._clocks[0]
        self.work("spin", cycles / clock / 1000)

    def mark(self) -> float:
        self.log.append("mark")
        return self.now_ms

    def reached(self, stamp: float) -> bool:
        return self.now_ms >= stamp

    def synchronize(self) -> None:
        self.log.append("synchronize")

    def elapsed_ms(self, begin: float, end: float) -> float:
        return end - begin


@pytest.mark.parametrize(
    ("samples", "fraction", "expected"),
    [((3.0,), 0.2, 3.0), ((1.0, 2.0), 0.5, 1.5), ((5, 1, 4, 2, 3), 0.2, 1.8), ((5, 1, 4, 2, 3), 0.8, 4.2)],
)
def test_percentiles_interpolate(samples: tuple[float, ...], fraction: float, expected: float) -> None:
    assert percentile(samples, fraction) == pytest.approx(expected)


def test_percentiles_agree_with_torch() -> None:
    samples = torch.rand(37, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for fraction in (0.0, 0.2, 0.5, 0.8, 1.0):
        assert percentile(samples.tolist(), fraction) == pytest.approx(samples.quantile(fraction).item())


@pytest.mark.parametrize(("samples", "fraction"), [((), 0.5), ((1.0,), 1.1)])
def test_percentiles_of_nothing_are_refused(samples: tuple[float, ...], fraction: float) -> None:
    with pytest.raises(ValueError, match=r"samples must not be empty and fraction must lie in 0\.\.1, got"):
        percentile(samples, fraction)


def test_summary_is_not_moved_by_an_outlier() -> None:
    assert summarize([1.0] * 9 + [100.0]) == Summary(1.0, 1.0, 1.0, 10)
    assert summary_fields("forward_ms", Summary(2.0, 1.0, 3.0, 5)) == {
        "forward_ms_median": 2.0,
        "forward_ms_p20": 1.0,
        "forward_ms_p80": 3.0,
    }


def test_device_time_is_the_call_alone_with_the_host_ahead() -> None:
    stopwatch = RecordingStopwatch()
    time = measure_device_time(lambda: stopwatch.work("call", 0.25), stopwatch, repeats=6, warmup=2)
    assert stopwatch.log[:2] == ["call", "call"]
    assert stopwatch.log[2:9] == ["flush", "mark", "spin", "mark", "call", "mark", "synchronize"]
    assert time.ms.median == pytest.approx(0.25)
    assert time.ms.repeats == 6
    assert time.clock_mhz is not None
    assert time.clock_mhz.median == pytest.approx(2000)
    assert not time.clocks_dropped


def test_a_dropped_clock_is_reported() -> None:
    stopwatch = RecordingStopwatch(clocks_mhz=(1980.0, 1980.0, 1500.0, 1980.0))
    assert measure_device_time(lambda: None, stopwatch, repeats=5).clocks_dropped
    steady = RecordingStopwatch(clocks_mhz=(1980.0, 1965.0))
    assert not measure_device_time(lambda: None, steady, repeats=5).clocks_dropped


def test_a_drained_queue_and_a_warm_cache_are_measured_when_asked_for() -> None:
    stopwatch = RecordingStopwatch()
    time = measure_device_time(lambda: None, stopwatch, 5, flushes=False, keeps_host_ahead=False)
    assert "flush" not in stopwatch.log
    assert "spin" not in stopwatch.log
    assert stopwatch.log[:4] == ["mark", "synchronize", "mark", "mark"]
    assert time.clock_mhz is None


def test_wall_time_holds_the_wait() -> None:
    now = SimpleNamespace(seconds=0.0)

    def advance(seconds: float) -> None:
        now.seconds += seconds

    time = measure_wall_time(lambda: advance(0.001), lambda: advance(0.010), lambda: now.seconds, repeats=5)
    assert time.median == pytest.approx(11)


class SpinningStopwatch:
    """A device that spins for 10 ms of the host's virtual clock, and a launch queue that holds eight kernels."""

    def __init__(self) -> None:
        self.now_s = self._free_s = 0.0
        self._queued = 0
        self.rows: list[int] = []

    def launch(self, host_s: float) -> None:
        self.now_s += host_s
        self._queued += 1
        self.rows[-1] += 1
        if self._queued > 8:
            self.now_s = max(self.now_s, self._free_s)

    def flush_caches(self) -> None: ...

    def spin(self, cycles: int) -> None:
        self._free_s = self.now_s + cycles / 2e9

    def mark(self) -> float:
        self.rows.append(0)
        return self._free_s

    def reached(self, stamp: float) -> bool:
        return self.now_s >= stamp

    def synchronize(self) -> None:
        self.now_s, self._queued = max(self.now_s, self._free_s), 0

    def elapsed_ms(self, begin: float, end: float) -> float:
        return (end - begin) * 1000


@pytest.mark.parametrize(("host_s", "calls"), [(0.0001, 5), (0.004, 2), (0.02, 1)])
def test_host_time_is_that_of_queueing_alone(host_s: float, calls: int) -> None:
    stopwatch = SpinningStopwatch()
    time = measure_host_time(
        lambda: stopwatch.launch(host_s), stopwatch, lambda: stopwatch.now_s, repeats=5, warmup=0, calls=20
    )
    assert time.median == pytest.approx(1000 * host_s)
    assert stopwatch.rows[0] == 20
    assert stopwatch.rows[-5:] == [calls] * 5


@pytest.fixture
def known_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="12-34"))


@pytest.mark.usefixtures("known_gpu")
def test_state_is_read_and_nothing_is_set() -> None:
    def run(command: list[str], **_: Any) -> CompletedProcess[str]:
        assert command[:2] == ["nvidia-smi", "--id=GPU-12-34"]
        assert all(word.startswith(("--id", "--query-gpu", "--format")) for word in command[1:])
        return CompletedProcess(command, 0, "H200, 570.1, 1980 MHz, 1980 MHz, 3201 MHz, 41, 120.5 W\n")

    state = read_gpu_state(run)
    assert state is not None
    assert (state["name"], state["clocks.sm"], state["power.draw"]) == ("H200", "1980 MHz", "120.5 W")


@pytest.mark.usefixtures("known_gpu")
@pytest.mark.parametrize("error", [FileNotFoundError(), CalledProcessError(9, "nvidia-smi")])
def test_without_the_tool_there_is_no_state(error: Exception) -> None:
    def run(*_: Any, **__: Any) -> CompletedProcess[str]:
        raise error

    assert read_gpu_state(run) is None


@pytest.mark.gpu
def test_device_time_grows_with_the_work_and_not_with_the_host() -> None:
    stopwatch = CudaStopwatch()
    short, long = (
        measure_device_time(lambda cycles=cycles: torch.cuda._sleep(cycles), stopwatch).ms.median
        for cycles in (200_000, 2_000_000)
    )
    assert 5 < long / short < 15
    meter = CudaMeter(repeats=5)
    assert meter.wall_time(lambda: torch.cuda._sleep(2_000_000)).median > 0.9 * long
    assert meter.host_time(lambda: torch.cuda._sleep(2_000_000)).median < 0.5 * long
    assert meter.peak_mib(lambda: torch.empty(64 * 2**20, dtype=torch.int8, device="cuda")) == pytest.approx(64)


def test_kernels_are_counted_from_one_flush_to_the_next() -> None:
    one, other, last = [("add", 1.0), ("copy", 5.0), ("add", 2.0)], [("add", 9.0), ("copy", 7.0)], [("add", 4.0)]
    flush = ("flush", 100.0)
    assert medians_by_name([flush, *one, flush, *other, flush, *last]) == {"add": 4.0, "copy": 5.0}
    assert medians_by_name([]) == {}


@pytest.mark.gpu
def test_the_kernels_of_a_call_are_found_by_name() -> None:
    numbers = torch.rand(1 << 20, device="cuda")
    found = CudaMeter(repeats=5).kernel_times(lambda: (numbers.add_(1.0), numbers.sort()))
    assert any("add" in name.lower() for name in found)
    assert len(found) >= 2
    assert not any("FillFunctor<signed char>" in name for name in found)
    assert 0 < sum(found.values()) < 5


@pytest.mark.gpu
def test_copy_bandwidth_is_that_of_a_gpu_and_its_state_is_known() -> None:
    assert 1e11 < measure_copy_bandwidth(CudaStopwatch()) < 2e13
    state = read_gpu_state()
    assert state is None or state["name"] in torch.cuda.get_device_name()


@pytest.mark.gpu
def test_a_replayed_graph_repeats_the_call() -> None:
    total = torch.zeros((), device="cuda")
    replay = capture_graph(lambda: total.add_(1), calls=4)
    before = total.item()
    replay()
    assert total.item() == before + 4


@pytest.mark.gpu
def test_a_graph_leaves_out_the_gaps_between_calls() -> None:
    meter, tensor = CudaMeter(repeats=5), torch.zeros(1, device="cuda")
    assert meter.graph_time(lambda: tensor.add_(1)).median < meter.wall_time(lambda: tensor.add_(1)).median
