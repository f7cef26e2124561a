"""L4: are the outcomes of training equivalent over paired seeds?"""

import math
from dataclasses import asdict

from parity.arms import Arm, Experiment
from parity.recording import Progress, Recording, record
from parity.results import Check, LevelResult, Verdict, guard
from parity.statistics import Equivalence, bootstrap_band, paired_tost, simulate_power
from parity.validity import check_arms

QUESTION = "Over paired seeds, are the outcomes of training equivalent within the margin?"
_POWER_PAIRS = (8, 10, 12, 13)


def run_ensemble(experiment: Experiment, progress: Progress) -> LevelResult:
    """Trains pairs of arms, equal in seed, initial weights and data, and tests their outcomes by a paired TOST.

    The outcome of an arm is its mean loss over the last steps; the margin is a share of the mean outcome of the arms
    that are compared with.
    """
    settings = experiment.settings.ensemble
    pairs = []
    for number, arms in enumerate(paired_arms(experiment), start=1):
        progress(f"ensemble: pair {number} of {settings.pairs}")
        pairs.append(tuple(record(experiment, arm, settings.steps, progress) for arm in arms))
    checks = check_pairs(pairs, experiment.settings.min_loss_change)
    outcomes = [tuple(outcome(recording, settings.last_steps) for recording in pair) for pair in pairs]
    test = compare_outcomes(outcomes, settings.margin, settings.confidence, settings.min_pairs)
    checks.append(Check("outcomes", test.verdict, _describe(test, settings.min_pairs)))
    curves = [[other - base for base, other in zip(*(each.loss for each in pair), strict=True)] for pair in pairs]
    band: dict[str, list[float]] = {}
    if all(math.isfinite(value) for curve in curves for value in curve):
        ends = bootstrap_band(curves, settings.confidence, settings.resamples, experiment.seed)
        band = {name: values.tolist() for name, values in zip(("mean", "low", "high"), ends, strict=True)}
    power = {str(n): simulate_power(n, 1.0, settings.confidence, experiment.seed) for n in _POWER_PAIRS}
    data = {"outcomes": [list(pair) for pair in outcomes], "test": asdict(test), "band": band, "power": power}
    margins = {
        "margin": f"{100 * settings.margin:g} % of the mean outcome",
        "fewest pairs that pass": settings.min_pairs,
        "confidence": settings.confidence,
        "last steps": settings.last_steps,
    }
    return LevelResult("ensemble", QUESTION, tuple(checks), margins, data)


def paired_arms(experiment: Experiment) -> list[tuple[Arm, Arm]]:
    """Returns the arms (A, B) of each seed."""
    seeds = range(experiment.seed, experiment.seed + experiment.settings.ensemble.pairs)
    return [(Arm("A", experiment.against, seed), experiment.arm_under_test(seed)) for seed in seeds]


def outcome(recording: Recording, last_steps: int) -> float:
    """Returns the mean loss of the last steps."""
    last = recording.loss[-last_steps:]
    return sum(last) / len(last)


def compare_outcomes(
    outcomes: list[tuple[float, ...]], margin: float, confidence: float, min_pairs: int
) -> Equivalence:
    """Tests paired outcomes (A, B); the margin is a share of the mean |A|."""
    scale = sum(abs(base) for base, _ in outcomes) / len(outcomes)
    absolute = margin * scale if math.isfinite(scale) else 1.0  # a diverged base fails at any margin
    return paired_tost([other - base for base, other in outcomes], absolute, confidence, min_pairs)


def check_pairs(pairs: list[tuple[Recording, ...]], min_loss_change: float) -> list[Check]:
    """Checks the conditions of every pair; returns one check if all are met, else those that are not."""
    unmet = []
    for first, second in pairs:
        for check in check_arms(first, second, min_loss_change):
            if check.verdict is not Verdict.PASS:
                unmet.append(guard(f"seed {first.arm.seed}: {check.name}", False, check.detail))
    detail = "the same start and data in both arms, the op named ran, and the loss moved"
    return unmet or [guard(f"conditions of {len(pairs)} pairs", True, detail)]


def _describe(test: Equivalence, min_pairs: int) -> str:
    text = (
        f"mean difference {test.mean:.4g}, interval {test.low:.4g} to {test.high:.4g}, margin +-{test.margin:.4g}, "
        f"{test.num_pairs} pairs, p = {test.p_value:.2g}"
    )
    return text if test.num_pairs >= min_pairs else f"{text}; fewer than {min_pairs} pairs never pass"
