"""L6: how much faster is a training step?"""

import random
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from parity.arms import Arm, Experiment
from parity.phases import PHASES, clock_of, split_phases, synchronize, timing_parts
from parity.recording import Progress
from parity.results import Check, LevelResult, Verdict, guard
from parity.statistics import Ratio, bootstrap_ratio
from parity.timing import percentile, read_gpu_state
from parity.training import TrainingLoop

QUESTION = "How much faster is a step, and where does its time go?"
_MIB = 2**20


@dataclass
class Timed:
    """Measurements of one arm.

    Attributes:
        loop: the arm in training.
        step_ms: wall time of each measured step, data included.
        phases_ms: of each step that was split, by phase.
        peak_memory_mib: largest memory that a step adds to what is allocated before it; None on a CPU.
    """

    loop: TrainingLoop
    step_ms: list[float] = field(default_factory=list)
    phases_ms: list[dict[str, float]] = field(default_factory=list)
    peak_memory_mib: float | None = None


def run_speed(experiment: Experiment, progress: Progress) -> LevelResult:
    """Times steps of A, A' and B, interleaved in random order in one process.

    A step is timed from the request for its batch until the device has done its last work. Warm-up, where kernels are
    compiled and tuned, is not timed; phases are measured in steps of their own, which the ratio does not contain.
    """
    seed = experiment.seed
    arms = [
        Arm("A", experiment.against, seed),
        Arm("A'", experiment.against, seed, repeat=1),
        experiment.arm_under_test(seed),
    ]
    settings = experiment.settings.speed
    total = settings.warmup + settings.repeats + settings.split_repeats
    with ExitStack() as stack:
        loops = {arm.name: stack.enter_context(closing(TrainingLoop(experiment, arm, total))) for arm in arms}
        return _time_arms({name: Timed(loop) for name, loop in loops.items()}, experiment, progress)


def _time_arms(timed: Mapping[str, Timed], experiment: Experiment, progress: Progress) -> LevelResult:
    settings = experiment.settings.speed
    for name, each in timed.items():
        progress(f"speed: arm {name}, {settings.warmup} steps of warm-up")
        for _ in range(settings.warmup):
            each.loop.step(each.loop.next_batch())
    state_before = gpu_state(experiment.device)
    order = random.Random(experiment.seed)
    for number in range(settings.repeats):
        for name in order.sample(sorted(timed), len(timed)):
            timed[name].step_ms.append(_time_step(timed[name]))
        if (number + 1) % max(1, settings.repeats // 4) == 0:
            progress(f"speed: {number + 1} of {settings.repeats} steps of each arm")
    for _ in range(settings.split_repeats):
        for name in order.sample(sorted(timed), len(timed)):
            timed[name].phases_ms.append(_split_step(timed[name]))
    state_after = gpu_state(experiment.device)
    return judge_speed(
        {name: each.step_ms for name, each in timed.items()},
        experiment,
        {
            "phases": {name: _median_phases(each.phases_ms) for name, each in timed.items()},
            "peak_memory_mib": {name: each.peak_memory_mib for name, each in timed.items()},
            "gpu_before": state_before,
            "gpu_after": state_after,
        },
    )


def judge_speed(step_ms: dict[str, list[float]], experiment: Experiment, data: dict[str, Any]) -> LevelResult:
    """Returns the ratios of step times; the run is void where the ratio of an op with itself does not cover 1."""
    settings = experiment.settings.speed
    chosen = (settings.confidence, settings.resamples, experiment.seed)
    repeat: Ratio = bootstrap_ratio(step_ms["A"], step_ms["A'"], *chosen)
    ratio: Ratio = bootstrap_ratio(step_ms["A"], step_ms["B"], *chosen)
    covers = repeat.low <= 1 <= repeat.high
    words = "covers 1" if covers else "refused: does not cover 1, something else used the machine"
    checks = (
        guard("ratio of A with itself", covers, f"{words}: {_describe(repeat)}"),
        Check("ratio of A to B", Verdict.PASS, f"a step of {experiment.op} is {_describe(ratio)} times as fast"),
    )
    times = {
        name: {"median": percentile(values, 0.5), "p20": percentile(values, 0.2), "p80": percentile(values, 0.8)}
        for name, values in step_ms.items()
    }
    ratios = {"A / A'": asdict(repeat), "A / B": asdict(ratio)}
    found = {"step_ms": times, "samples_ms": step_ms, "ratios": ratios, **data}
    return LevelResult("speed", QUESTION, checks, {"confidence": settings.confidence}, found)


def gpu_state(device: torch.device) -> dict[str, str] | None:
    """Returns clocks, temperature and power of the GPU; None on a CPU."""
    return read_gpu_state() if device.type == "cuda" else None


def _time_step(timed: Timed) -> float:
    loop = timed.loop
    synchronize(loop.device)
    before = 0
    if loop.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    begin = time.perf_counter()
    loop.backward(loop.next_batch())
    loop.update()
    synchronize(loop.device)
    elapsed = 1000 * (time.perf_counter() - begin)
    if loop.device.type == "cuda":
        added = (torch.cuda.max_memory_allocated() - before) / _MIB
        timed.peak_memory_mib = max(timed.peak_memory_mib or 0.0, added)
    return elapsed


def _split_step(timed: Timed) -> dict[str, float]:
    """Runs one step with stamps around its parts; on a GPU they are events in its queue."""
    loop = timed.loop
    clock = clock_of(loop.device)
    synchronize(loop.device)
    with clock.span("data"):
        batch = loop.next_batch()
    with timing_parts(loop.detector, clock):
        with clock.span("forward and backward"):
            loop.backward(batch)
        with clock.span("optimiser"):
            loop.update()
    synchronize(loop.device)
    return split_phases(clock.totals_ms())


def _median_phases(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    return {phase: percentile([step[phase] for step in steps], 0.5) for phase in PHASES}


def _describe(ratio: Ratio) -> str:
    return f"{ratio.ratio:.3f} ({ratio.low:.3f} to {ratio.high:.3f})"
