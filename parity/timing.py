"""Measures a call on a GPU: device time, wall time, memory, clocks.

Device time is what the kernels take: two events around one call, while the host is ahead of the device, so that its
dispatch is not counted, and after the L2 cache has been flushed. Host time is what a caller spends on queueing a call
behind others, as a training step does. Wall time is what he waits for one call on an idle device, dispatch included.
"""

import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch.profiler import ProfilerActivity, profile

Call = Callable[[], Any]

# About 2 ms at 1.9 GHz: longer than any dispatch that is measured here.
_SPIN_CYCLES = 4_000_000
# About 10 ms: 20 calls of half a millisecond can be queued behind it.
_LONG_SPIN_CYCLES = 20_000_000
_GRAPH_CALLS = 20
_MIB = 2**20
# Boost clocks wander by a few steps of 15 MHz; a lower clock than this share of the highest one is a drop.
_STEADY_CLOCK = 0.95
_STATE_FIELDS = ("name", "driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "temperature.gpu", "power.draw")


@dataclass(frozen=True)
class Summary:
    """Spread of repeated measurements: median, 20th and 80th percentile, and how many there were."""

    median: float
    p20: float
    p80: float
    repeats: int


def percentile(samples: Sequence[float], fraction: float) -> float:
    """Returns the number below which `fraction` of the samples lie, interpolated linearly between neighbours.

    Raises:
        ValueError: if there are no samples, or the fraction is not in 0..1.
    """
    if not samples or not 0 <= fraction <= 1:
        raise ValueError(
            f"samples must not be empty and fraction must lie in 0..1, got {len(samples)} samples and {fraction}; "
            f"measure at least once"
        )
    ordered = sorted(samples)
    position = fraction * (len(ordered) - 1)
    lower = int(position)
    upper = min(lower + 1, len(ordered) - 1)
    return ordered[lower] + (position - lower) * (ordered[upper] - ordered[lower])


def summarize(samples: Sequence[float]) -> Summary:
    """Returns median, 20th and 80th percentile of samples in any unit."""
    return Summary(percentile(samples, 0.5), percentile(samples, 0.2), percentile(samples, 0.8), len(samples))


class Stopwatch(Protocol):
    """A device queue that can be marked with time stamps; the tests bring one without a device."""

    def flush_caches(self) -> None:
        """Queues work that leaves nothing useful in the L2 cache."""

    def spin(self, cycles: int) -> None:
        """Queues a wait of so many cycles of the multiprocessors' clock."""

    def mark(self) -> Any:
        """Queues a time stamp."""

    def reached(self, stamp: Any) -> bool:
        """Tells whether the device has come to a stamp; does not wait."""

    def synchronize(self) -> None:
        """Waits until the queue is empty."""

    def elapsed_ms(self, begin: Any, end: Any) -> float:
        """Returns the time between two stamps that have been reached."""


class CudaStopwatch:
    """`Stopwatch` of the current CUDA device and stream."""

    def __init__(self) -> None:
        cache_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
        self._flushed = torch.empty(4 * cache_bytes, dtype=torch.int8, device="cuda")

    def flush_caches(self) -> None:
        self._flushed.zero_()

    def spin(self, cycles: int) -> None:
        torch.cuda._sleep(cycles)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def reached(self, stamp: torch.cuda.Event) -> bool:
        return stamp.query()

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def elapsed_ms(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return begin.elapsed_time(end)


@dataclass(frozen=True)
class DeviceTime:
    """Device time of one call.

    Args:
        ms: milliseconds.
        clock_mhz: clock of the multiprocessors right before each repeat, from the spin's cycles; None without a spin.
    """

    ms: Summary
    clock_mhz: Summary | None
    clocks_dropped: bool


def measure_device_time(
    call: Call,
    stopwatch: Stopwatch,
    repeats: int = 20,
    warmup: int = 5,
    *,
    flushes: bool = True,
    keeps_host_ahead: bool = True,
) -> DeviceTime:
    """Measures the device time of one call.

    Args:
        call: what to measure; queues its work on the current stream.
        stopwatch: of the device.
        repeats: calls that are measured.
        warmup: calls before them, which compile and fill caches.
        flushes: whether the L2 cache is flushed before each repeat. Without it small inputs are found there.
        keeps_host_ahead: whether the device spins before each repeat until the host has queued the whole call. Without
            it the queue is drained, and the time between the events holds the host's dispatch.
    """
    for _ in range(warmup):
        call()
    times, clocks = [], []
    for _ in range(repeats):
        if flushes:
            stopwatch.flush_caches()
        spin_begin = stopwatch.mark()
        if keeps_host_ahead:
            stopwatch.spin(_SPIN_CYCLES)
        else:
            stopwatch.synchronize()
        begin = stopwatch.mark()
        call()
        end = stopwatch.mark()
        stopwatch.synchronize()
        times.append(stopwatch.elapsed_ms(begin, end))
        if keeps_host_ahead:
            clocks.append(_SPIN_CYCLES / stopwatch.elapsed_ms(spin_begin, begin) / 1000)
    dropped = bool(clocks) and min(clocks) < _STEADY_CLOCK * max(clocks)
    return DeviceTime(summarize(times), summarize(clocks) if clocks else None, dropped)


def measure_host_time(
    call: Call,
    stopwatch: Stopwatch,
    clock_s: Callable[[], float] = time.perf_counter,
    repeats: int = 20,
    warmup: int = 5,
    calls: int = 20,
) -> Summary:
    """Measures how long the host takes to queue one call behind others, in milliseconds.

    Args:
        call: what to measure.
        stopwatch: of the device, which spins while calls are queued.
        clock_s: returns seconds.
        repeats: how often a row of calls is measured.
        warmup: calls before them.
        calls: in a row. Where the device is done with the spin before the last of them is queued, half as many are
            tried: the launch queue holds about 1000 kernels, and a full one makes the host wait.

    Notes:
        The time of a call that itself waits for the device holds the spin, about 10 ms.
    """
    for _ in range(warmup):
        call()
    times: list[float] = []
    while len(times) < repeats:
        stopwatch.synchronize()
        stopwatch.spin(_LONG_SPIN_CYCLES)
        spun = stopwatch.mark()
        begin = clock_s()
        for _ in range(calls):
            call()
        end = clock_s()
        if calls > 1 and stopwatch.reached(spun):
            calls, times = calls // 2, []
        else:
            times.append((end - begin) * 1000 / calls)
    stopwatch.synchronize()
    return summarize(times)


def measure_wall_time(
    call: Call,
    synchronize: Call,
    clock_s: Callable[[], float] = time.perf_counter,
    repeats: int = 50,
    warmup: int = 5,
) -> Summary:
    """Measures how long a caller waits for one call on an idle device, in milliseconds.

    Args:
        call: what to measure.
        synchronize: waits for the device.
        clock_s: returns seconds.
        repeats: calls that are measured.
        warmup: calls before them.
    """
    for _ in range(warmup):
        call()
    times = []
    for _ in range(repeats):
        synchronize()
        begin = clock_s()
        call()
        synchronize()
        times.append((clock_s() - begin) * 1000)
    return summarize(times)


class Meter(Protocol):
    """What a benchmark row needs to know of a call; the tests bring one without a device."""

    def device_time(self, call: Call) -> DeviceTime: ...

    def host_time(self, call: Call) -> Summary: ...

    def wall_time(self, call: Call) -> Summary: ...

    def graph_time(self, call: Call) -> Summary: ...

    def kernel_times(self, call: Call) -> dict[str, float]: ...

    def peak_mib(self, call: Call) -> float: ...

    def gpu_state(self) -> dict[str, str] | None: ...


class CudaMeter:
    """`Meter` of the current CUDA device."""

    def __init__(self, repeats: int) -> None:
        self._stopwatch = CudaStopwatch()
        self._repeats = repeats

    def device_time(self, call: Call) -> DeviceTime:
        return measure_device_time(call, self._stopwatch, self._repeats)

    def host_time(self, call: Call) -> Summary:
        return measure_host_time(call, self._stopwatch, repeats=self._repeats)

    def wall_time(self, call: Call) -> Summary:
        return measure_wall_time(call, torch.cuda.synchronize, repeats=self._repeats)

    def graph_time(self, call: Call) -> Summary:
        """Returns the time of one call in ms when a CUDA graph runs many in a row: no gaps, and warm caches."""
        replay = capture_graph(call, _GRAPH_CALLS)
        whole = measure_device_time(replay, self._stopwatch, self._repeats).ms
        return Summary(whole.median / _GRAPH_CALLS, whole.p20 / _GRAPH_CALLS, whole.p80 / _GRAPH_CALLS, whole.repeats)

    def kernel_times(self, call: Call) -> dict[str, float]:
        """Returns the device time in ms of each kernel of a call by its name, by the profiler, after a cache flush."""
        call()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            for _ in range(self._repeats):
                self._stopwatch.flush_caches()
                call()
            torch.cuda.synchronize()
        kernels = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
        kernels.sort(key=lambda event: event.time_range.start)
        return medians_by_name([(event.name, event.self_device_time_total / 1000) for event in kernels])

    def peak_mib(self, call: Call) -> float:
        """Returns how far memory rises above what was allocated before the call."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / _MIB

    def gpu_state(self) -> dict[str, str] | None:
        return read_gpu_state()


def medians_by_name(events: Sequence[tuple[str, float]]) -> dict[str, float]:
    """Returns the median, over the repeats of a call, of the time that all events of a name took together.

    Args:
        events: (name, time) in their order; every repeat begins with an event of the first one's name, which is left
            out.
    """
    repeats: list[dict[str, float]] = []
    for name, took in events:
        if name == events[0][0]:
            repeats.append({})
        else:
            repeats[-1][name] = repeats[-1].get(name, 0.0) + took
    names = dict.fromkeys(name for repeat in repeats for name in repeat)
    return {name: percentile([repeat.get(name, 0.0) for repeat in repeats], 0.5) for name in names}


def capture_graph(call: Call, calls: int) -> Call:
    """Captures a call several times into one CUDA graph and returns its replay, which has no dispatch between kernels.

    Args:
        call: what to capture; must not wait for the device.
        calls: how often one replay runs it.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    return graph.replay


def measure_copy_bandwidth(stopwatch: Stopwatch) -> float:
    """Returns the bytes a second that a copy inside the device's memory reads and writes, the roof of a roofline."""
    source = torch.empty(1 << 30, dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    milliseconds = measure_device_time(lambda: target.copy_(source), stopwatch).ms.median
    return 2 * source.numel() / (milliseconds / 1000)


def read_gpu_state(run: Callable[..., subprocess.CompletedProcess[str]] = subprocess.run) -> dict[str, str] | None:
    """Returns name, driver, clocks, temperature and power of the current GPU as `nvidia-smi` prints them.

    Args:
        run: starts a program, as `subprocess.run` does.

    Returns:
        The fields by name, or None where `nvidia-smi` is missing or may not ask the driver.
    """
    identity = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    query = f"--query-gpu={','.join(_STATE_FIELDS)}"
    command = ["nvidia-smi", f"--id=GPU-{identity.removeprefix('GPU-')}", query, "--format=csv,noheader"]
    try:
        line = run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (FileNotFoundError, subprocess.CalledProcessError):
        return None
    return dict(zip(_STATE_FIELDS, (word.strip() for word in line.split(",")), strict=True))


def summary_fields(prefix: str, summary: Summary) -> dict[str, float]:
    """Returns median, p20 and p80 as columns of a row, e.g. `forward_device_ms_median`."""
    return {f"{prefix}_{name}": number for name, number in asdict(summary).items() if name != "repeats"}
