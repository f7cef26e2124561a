"""Negative controls: which level sees which fault, and how small a one?"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

from parity.arms import Arm, Experiment
from parity.cases import Case
from parity.ensemble import compare_outcomes, outcome
from parity.evaluation import compare_evaluations, control_arms, evaluate_arm, take_yardstick
from parity.faults import FAULTS, Fault
from parity.interception import op_of
from parity.model_level import in_strict_fp32, judge_model, take_baseline, take_snapshot
from parity.op_level import compare_cases
from parity.recording import Progress, record, train_weights
from parity.results import Check, LevelResult, Verdict, judge
from parity.trajectory import check_curves, compare_curves, record_controls, segments_of
from parity.workers import Workers

QUESTION = "Does each level fail a broken op, and how small a fault does it still see?"

Detect = Callable[[Fault, float], bool]

Measured = tuple[str, dict[str, float | None]]
"""A level and the smallest size at which it sees each of some faults."""

_UNTRAINED = ("op", "model")
# A part begins with the sound op and its controls, which cost as much as some faults.
_FAULTS_OF_A_PART = 3

# Many queries share a small coarse level, where sums in a half type go wrong.
_CASES = (
    Case("uneven levels", ((6, 9), (3, 5), (1, 1)), num_queries=13),
    Case("crowded levels", ((6, 9), (2, 2)), num_queries=1000),
)


def run_sensitivity(
    experiment: Experiment,
    progress: Progress,
    workers: Workers | None = None,
    begun: Mapping[str, Sequence[Future[Measured]]] | None = None,
) -> LevelResult:
    """Breaks the op that is compared with, and looks for the smallest fault that each level tells from the sound op.

    Args:
        experiment: settings of the levels.
        progress: called with a line now and then.
        workers: processes that share the faults of each level; None measures all of them here.
        begun: what `begin_untrained` returned, if it was called.
    """
    sizes = sizes_by_level(experiment)
    if workers is None:
        found = [work(experiment, progress) for level in sizes for work in _share_faults(level, 1)]
    else:
        pieces = dict(begun or {})
        for level in sizes:
            if level not in pieces:
                pieces[level] = [workers.start(work) for work in _share_faults(level, workers.count)]
        found = [piece.result() for level in sizes for piece in pieces[level]]
    smallest: dict[str, dict[str, float | None]] = {fault.name: {} for fault in FAULTS}
    for level, by_fault in found:
        for name, size in by_fault.items():
            smallest[name][level] = size
    in_half = experiment.configs[experiment.against].precision.lightning != "32-true"
    checks = check_faults(smallest, list(sizes), in_half)
    rows = [
        {
            "fault": fault.name,
            "smallest": smallest[fault.name],
            "required": required_levels(fault, list(sizes), in_half),
        }
        for fault in FAULTS
    ]
    data = {"levels": list(sizes), "rows": rows}
    return LevelResult("sensitivity", QUESTION, tuple(checks), _describe_sizes(sizes), data)


def begin_untrained(experiment: Experiment, workers: Workers) -> dict[str, list[Future[Measured]]]:
    """Has processes measure the levels that train nothing, behind what they have begun; returns what they will find."""
    levels = [level for level in sizes_by_level(experiment) if level in _UNTRAINED]
    return {level: [workers.start(work) for work in _share_faults(level, workers.count)] for level in levels}


def sizes_by_level(experiment: Experiment) -> dict[str, list[float]]:
    """Returns the sizes of faults, in 0..1, that are tried in each level in which any are."""
    return {level: list(values) for level, values in experiment.settings.sensitivity.sizes.items() if values}


def _share_faults(level: str, num_processes: int) -> list[partial[Measured]]:
    num_parts = min(num_processes, -(-len(FAULTS) // _FAULTS_OF_A_PART))
    return [partial(_measure, level, range(part, len(FAULTS), num_parts)) for part in range(num_parts)]


def _measure(level: str, numbers: Sequence[int], experiment: Experiment, progress: Progress) -> Measured:
    """Returns a level and the smallest size at which it sees each of the faults with these numbers."""
    detect = _DETECTORS[level](experiment, progress)
    smallest: dict[str, float | None] = {}
    for fault in (FAULTS[number] for number in numbers):
        if level == "op" and fault.damage is None:
            continue
        smallest[fault.name] = find_smallest(detect, fault, sizes_by_level(experiment)[level])
        progress(f"sensitivity: {level} sees {fault.name} down to {smallest[fault.name]}")
    return level, smallest


def find_smallest(detect: Detect, fault: Fault, ladder: list[float]) -> float | None:
    """Walks down from the largest size to the first one that goes unseen; returns the last one seen, None without one.

    Args:
        detect: whether a level fails the fault at a size.
        fault: what to look for.
        ladder: sizes in 0..1, in any order.
    """
    smallest = None
    for size in sorted(ladder, reverse=True):
        if not detect(fault, size):
            break
        smallest = size
    return smallest


def check_faults(smallest: dict[str, dict[str, float | None]], levels: list[str], in_half: bool) -> list[Check]:
    """Checks that every fault is seen by all levels that ran and must see it.

    Args:
        smallest: smallest size seen, by fault and level.
        levels: those that ran.
        in_half: whether training ran under half-precision autocast, where a trajectory may miss a faint fault.
    """
    checks = []
    for fault in FAULTS:
        found = smallest[fault.name]
        required = required_levels(fault, levels, in_half)
        missed = [level for level in required if found.get(level) is None]
        detail = f"seen by {', '.join(level for level in found if found[level] is not None) or 'no level'}"
        detail += f"; must be seen by {', '.join(missed)} too" if missed else ""
        verdict = judge(not missed) if required else Verdict.INCONCLUSIVE
        checks.append(Check(fault.name, verdict, detail))
    return checks


def required_levels(fault: Fault, levels: Sequence[str], in_half: bool) -> list[str]:
    """Returns those of the levels that must see the whole fault.

    Under half-precision autocast a trajectory may miss a faint fault: the op level, in that half type, and the model
    level, in float32 whatever the precision, still must not.
    """
    may_miss = ("trajectory",) if fault.faint and in_half else ()
    return [level for level in fault.seen_by if level in levels and level not in may_miss]


def _detect_in_op(experiment: Experiment, progress: Progress) -> Detect:
    precision = experiment.configs[experiment.against].precision.lightning
    dtype_name = {"32-true": "fp32", "bf16-mixed": "bf16", "16-mixed": "fp16"}[precision]

    def detect(fault: Fault, size: float) -> bool:
        broken = fault.break_op(op_of(experiment.against), size)
        found = compare_cases(broken, _CASES, dtype_name, experiment.device, num_seeds=1)
        return not all(comparison.passed for _, comparison in found)

    return detect


def _detect_in_model(experiment: Experiment, progress: Progress) -> Detect:
    strict = in_strict_fp32(experiment)
    baseline = take_baseline(strict)

    def detect(fault: Fault, size: float) -> bool:
        arm = Arm("broken", strict.against, strict.seed, fault=fault.name, fault_size=size)
        checks, _ = judge_model(baseline, take_snapshot(strict, arm, baseline.batch))
        return _failed(checks)

    return detect


def _detect_in_trajectory(experiment: Experiment, progress: Progress) -> Detect:
    settings = experiment.settings.trajectory
    segments = segments_of(experiment)
    recorded = [record_controls(experiment, experiment.against, segment, progress) for segment in segments]

    def detect_in(number: int, fault: Fault, size: float) -> bool:
        (base, controls), num_steps = recorded[number], segments[number].steps
        arm = replace(base.arm, name="broken", fault=fault.name, fault_size=size)
        first = min(experiment.settings.sensitivity.steps, num_steps)
        other = record(experiment, arm, first, progress, total_steps=num_steps)
        compared = [compare_curves(name, base, controls, other, settings) for name in base.curves]
        return _failed(check_curves(compared, settings))

    # Trained weights, the last segment, show more.
    return lambda fault, size: any(detect_in(number, fault, size) for number in reversed(range(len(segments))))


def _detect_in_ensemble(experiment: Experiment, progress: Progress) -> Detect:
    settings = experiment.settings.ensemble

    def detect(fault: Fault, size: float) -> bool:
        outcomes = []
        for seed in range(experiment.seed, experiment.seed + settings.pairs):
            base = Arm("A", experiment.against, seed)
            broken = replace(base, name="broken", fault=fault.name, fault_size=size)
            recordings = [record(experiment, arm, settings.steps, progress) for arm in (base, broken)]
            outcomes.append(tuple(outcome(recording, settings.last_steps) for recording in recordings))
        test = compare_outcomes(outcomes, settings.margin, settings.confidence, settings.min_pairs)
        return test.verdict is Verdict.FAIL

    return detect


def _detect_in_evaluation(experiment: Experiment, progress: Progress) -> Detect:
    weights = train_weights(experiment, progress)
    base, *controls = (evaluate_arm(experiment, arm, weights, progress) for arm in control_arms(experiment))
    yardstick = take_yardstick(base, controls, experiment)
    arm = Arm("A", experiment.against, experiment.seed)

    def detect(fault: Fault, size: float) -> bool:
        broken = replace(arm, name="broken", fault=fault.name, fault_size=size)
        other = evaluate_arm(experiment, broken, weights, progress)
        checks, _ = compare_evaluations(yardstick, [other], experiment)
        return _failed(checks)

    return detect


def _describe_sizes(sizes: dict[str, list[float]]) -> dict[str, str]:
    return {f"sizes tried in {level}": " ".join(f"{size:g}" for size in ladder) for level, ladder in sizes.items()}


def _failed(checks: list[Check]) -> bool:
    return any(check.verdict is Verdict.FAIL for check in checks)


_DETECTORS: dict[str, Callable[[Experiment, Progress], Detect]] = {
    "op": _detect_in_op,
    "model": _detect_in_model,
    "trajectory": _detect_in_trajectory,
    "ensemble": _detect_in_ensemble,
    "evaluation": _detect_in_evaluation,
}
