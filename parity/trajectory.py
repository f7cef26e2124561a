"""L3: do N steps follow the same curve, as far as the op that is compared with follows itself?"""

import json
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig

from models.environment import describe_environment
from parity.arms import Arm, Experiment, config_hash
from parity.recording import Curve, Progress, Recording, read_recording, record, steps_of_weights
from parity.results import SCHEMA_VERSION, Check, LevelResult, guard, judge, write_json
from parity.tolerances import FLOAT32_ROUNDOFF
from parity.validity import check_arms

QUESTION = "Do the steps follow the same curve, inside the envelope of the same op run again and from nudged weights?"


class Segment(NamedTuple):
    """Steps that all arms take from the same start.

    Args:
        steps: how many.
        trained_steps: how long the weights were trained before; 0 for initial weights.
    """

    steps: int
    trained_steps: int


@dataclass(frozen=True)
class CurveComparison:
    """One curve of the arm under test beside the envelope of the controls.

    Args:
        name: of the curve, as in `Recording.curves`.
        differences: |A - B| of each step.
        envelope: largest difference allowed at each step.
        share_inside: share of the steps within the envelope, in 0..1.
        first_outside: first step outside; None without one.
    """

    name: str
    differences: Curve
    envelope: Curve
    share_inside: float
    first_outside: int | None


def run_trajectory(experiment: Experiment, progress: Progress) -> LevelResult:
    """Compares the curves of the op under test, or of an imported recording, with those of the op beside it.

    With `export` the op's own curve from initial weights is written to a file; with `import` the curve in a file takes
    the place of the op under test, and the same op, run now, that of the one it is compared with.
    """
    config = experiment.configs[experiment.against]
    settings = experiment.settings.trajectory
    base_op, identity = base_op_of(experiment), config_hash(experiment.configs[experiment.op])
    checks: list[Check] = []
    data: dict[str, Any] = {}
    for segment in segments_of(experiment):
        base, controls = record_controls(experiment, base_op, segment, progress)
        if config["import"] is None:
            arm = replace(experiment.arm_under_test(experiment.seed), trained_steps=segment.trained_steps)
            other = record(experiment, arm, segment.steps, progress)
        else:
            other, its_identity = _import_curve(Path(config["import"]))
            same = its_identity == identity
            words = "the imported curve has this configuration" if same else "refused: it was recorded with another one"
            checks.append(guard("configuration", same, words))
        found, compared = _compare_segment(experiment, base, controls, other)
        if segment.trained_steps:
            checks += [replace(check, name=f"{check.name}, trained weights") for check in found]
            data["trained"] = compared
        else:
            checks += found
            data |= compared
            if config.export is not None:
                _export_curve(Path(config.export), base if base_op == experiment.op else other, identity)
    margins = {
        "envelope": f"{settings.envelope_factor:g} x the largest difference of the controls in the last "
        f"{settings.envelope_steps} steps, at least {settings.floor_ulps} float32 units in the last place",
        "steps inside": f"all of the first {settings.strict_steps}, {100 * settings.min_share_inside:g} % of all",
    }
    return LevelResult("trajectory", QUESTION, tuple(checks), margins, data)


def segments_of(experiment: Experiment) -> list[Segment]:
    """Returns what is compared: steps from initial weights and, where some are trained here, from trained ones.

    From initial weights sampling matters little yet, and rounding changes assignments: in half precision it hides all
    but the largest faults. Trained weights use what they sample. An imported curve starts from initial weights.
    """
    config, settings = experiment.configs[experiment.against], experiment.settings.trajectory
    segments = [Segment(settings.steps, 0)]
    trained_steps = steps_of_weights(experiment)
    if trained_steps and settings.trained_steps and config["import"] is None:
        segments.append(Segment(settings.trained_steps, trained_steps))
    return segments


def _compare_segment(
    experiment: Experiment, base: Recording, controls: Sequence[Recording], other: Recording
) -> tuple[list[Check], dict[str, Any]]:
    """Returns checks of conditions and curves, and what the report draws."""
    settings = experiment.settings.trajectory
    checks = check_arms(base, other, experiment.settings.min_loss_change)
    if experiment.configs[base.arm.op].trainer.deterministic is True:
        same = controls[0].curves == base.curves
        detail = "A again is A bit for bit" if same else "A again is not A bit for bit"
        checks.append(Check("deterministic mode", judge(same), detail))
    comparisons = [compare_curves(name, base, controls, other, settings) for name in base.curves]
    data = {
        "steps": base.num_steps,
        "base": _curves_of(base),
        "controls": [_curves_of(control) for control in controls],
        "other": _curves_of(other),
        "comparisons": [asdict(comparison) for comparison in comparisons],
        "divergence": {
            each.arm.name: divergence_step(base.loss, each.loss, settings.divergence) for each in (*controls, other)
        },
        "changed_assignments": {each.arm.name: changed_assignments(base, each) for each in (*controls, other)},
    }
    return [*checks, *check_curves(comparisons, settings)], data


def record_controls(
    experiment: Experiment, op: str, segment: Segment, progress: Progress
) -> tuple[Recording, list[Recording]]:
    """Records A and its controls."""
    arms = control_arms(experiment, op, segment)
    base, *controls = (record(experiment, arm, segment.steps, progress) for arm in arms)
    return base, controls


def control_arms(experiment: Experiment, op: str, segment: Segment) -> list[Arm]:
    """Returns A, A' (A again), and A+1, A+2, ... (from weights one unit in the last place away)."""
    arm = Arm("A", op, experiment.seed, trained_steps=segment.trained_steps)
    nudges = range(1, experiment.settings.trajectory.controls + 1)
    return [
        arm,
        replace(arm, name="A'", repeat=1),
        *(replace(arm, name=f"A+{nudge}", nudge=nudge) for nudge in nudges),
    ]


def base_op_of(experiment: Experiment) -> str:
    """Returns the op of A: the one that is compared with, or, beside an imported curve, the op under test."""
    return experiment.against if experiment.configs[experiment.against]["import"] is None else experiment.op


def compare_curves(
    name: str, base: Recording, controls: Sequence[Recording], other: Recording, settings: DictConfig
) -> CurveComparison:
    """Compares one curve over the steps that all recordings have.

    envelope(t) = max(factor * max over controls C and steps t - w <= s <= t of |A(s) - C(s)|, floor_ulps * ulp(A(t)))

    Differences grow from step to step and cross zero now and then, hence the largest of the last w steps.
    """
    curves = [recording.curves[name] for recording in (base, other, *controls)]
    differences, envelope = [], []
    largest: deque[float] = deque(maxlen=settings.envelope_steps + 1)
    for reference, actual, *others in zip(*curves, strict=False):
        largest.append(max([0.0, *(abs(value - reference) for value in others if math.isfinite(value - reference))]))
        floor = settings.floor_ulps * 2 * FLOAT32_ROUNDOFF * abs(reference)
        envelope.append(max(settings.envelope_factor * max(largest), floor))
        both_overflow = not math.isfinite(reference) and not math.isfinite(actual)
        differences.append(0.0 if both_overflow else abs(actual - reference))
    # A difference that is no number lies outside.
    inside = [difference <= limit for difference, limit in zip(differences, envelope, strict=True)]
    first_outside = inside.index(False) if False in inside else None
    return CurveComparison(name, differences, envelope, sum(inside) / len(inside), first_outside)


def check_curves(comparisons: Sequence[CurveComparison], settings: DictConfig) -> list[Check]:
    """Judges curves by their steps inside the envelope: all of the first ones, and a share of all."""
    checks = []
    for comparison in comparisons:
        inside, first = comparison.share_inside, comparison.first_outside
        detail = f"{100 * inside:.0f} % of the steps inside the envelope"
        detail += "" if first is None else f", the first outside is step {first}"
        late = first is None or first >= settings.strict_steps
        checks.append(Check(f"curve: {comparison.name}", judge(late and inside >= settings.min_share_inside), detail))
    return checks


def divergence_step(base: Curve, other: Curve, threshold: float) -> int | None:
    """Returns the first step at which two curves differ by more than a share of the base; None if there is none."""
    for step, (reference, actual) in enumerate(zip(base, other, strict=False)):
        if not abs(actual - reference) <= threshold * abs(reference):
            return step
    return None


def changed_assignments(base: Recording, other: Recording) -> Curve:
    """Returns for each decoder layer the share of targets, over all steps, that another query got."""
    num_layers = len(base.assignments[0])
    changed, total = [0] * num_layers, [0] * num_layers
    for left, right in zip(base.assignments, other.assignments, strict=False):
        for layer in range(num_layers):
            pairs = list(zip(left[layer], right[layer], strict=False))
            changed[layer] += sum(query != match for query, match in pairs)
            total[layer] += len(pairs)
    return [changes / max(1, pairs) for changes, pairs in zip(changed, total, strict=True)]


def _curves_of(recording: Recording) -> dict[str, Any]:
    name = f"{recording.arm.name} ({recording.arm.op})"
    return {"name": name, "hash": recording.hash, "curves": recording.curves, "terms": recording.terms}


def _export_curve(path: Path, recording: Recording, identity: str) -> None:
    kept = replace(recording, arm=replace(recording.arm, name="golden"))
    document = {"schema_version": SCHEMA_VERSION, "config_hash": identity, "recording": asdict(kept)}
    write_json(path, document | {"environment": describe_environment()})


def _import_curve(path: Path) -> tuple[Recording, str]:
    if not path.is_file():
        raise ValueError(f"import must name a file written with export=..., got {path}; no such file exists")
    document = json.loads(path.read_text())
    if document.get("schema_version") != SCHEMA_VERSION or "recording" not in document:
        raise ValueError(
            f"import must name a curve of schema version {SCHEMA_VERSION}, got {path} of version "
            f"{document.get('schema_version')}; export it again"
        )
    return read_recording(document["recording"]), document["config_hash"]
