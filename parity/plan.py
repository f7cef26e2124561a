"""What the levels will train: known before the run, so that processes can share it and a reader can expect its end."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from parity.arms import Arm, Experiment
from parity.ensemble import paired_arms
from parity.faults import FAULTS
from parity.recording import Progress, record, steps_of_weights, train_weights, weights_arm
from parity.trajectory import base_op_of, control_arms, segments_of


@dataclass(frozen=True)
class Training:
    """One arm that a level trains and keeps in the output folder.

    Args:
        level: the first one that needs it.
        arm: what is trained.
        num_steps: how long.
    """

    level: str
    arm: Arm
    num_steps: int

    def __call__(self, experiment: Experiment, progress: Progress) -> None:
        """Trains the arm, or finds it in the output folder; the level reads it from there."""
        if self.arm == weights_arm(experiment):
            train_weights(experiment, progress)
        else:
            record(experiment, self.arm, self.num_steps, progress)


def plan_trainings(experiment: Experiment, levels: Sequence[str]) -> list[Training]:
    """Returns what the levels train, each arm once: the weights that others start from, then the longest.

    The broken arms of the level "sensitivity" are not among them: which sizes it tries depends on what it has seen.

    Args:
        experiment: settings of the levels.
        levels: those that will run, in their order.
    """
    trainings = [training for level in levels for training in _PLANS.get(level, _plan_nothing)(experiment, level)]
    unique: dict[tuple[Arm, int], Training] = {}
    for training in trainings:
        unique.setdefault((training.arm, training.num_steps), training)
    weights = weights_arm(experiment)
    return sorted(unique.values(), key=lambda training: (training.arm != weights, -training.num_steps))


def describe_plan(experiment: Experiment, levels: Sequence[str], trainings: Sequence[Training]) -> list[str]:
    """Returns lines about arms, steps and the time that their training will take at `parity.step_seconds` a step."""
    settings = experiment.settings
    lines = []
    for level in levels:
        steps = [training.num_steps for training in trainings if training.level == level]
        if steps:
            lines.append(f"  {level}: arms {len(steps)}, steps {sum(steps)}")
    loads = [0] * settings.workers
    for training in trainings:
        loads[loads.index(min(loads))] += training.num_steps
    slowest, broken = max(loads), 0
    if "sensitivity" in levels:
        broken = _count_broken_steps(experiment)
        slowest += -(-broken // settings.workers)
        lines.append(f"  sensitivity: broken arms, at most {broken} steps")
    total = sum(loads) + broken
    minutes = slowest * settings.step_seconds / 60
    head = f"training: {total} steps, {settings.workers} at a time, about {minutes:.1f} minutes"
    return [f"{head} at {settings.step_seconds:g} s a step", *lines]


def _count_broken_steps(experiment: Experiment) -> int:
    settings = experiment.settings
    sizes = settings.sensitivity.sizes
    steps = [min(settings.sensitivity.steps, segment.steps) for segment in segments_of(experiment)]
    of_trajectory = sum(steps) * len(sizes.trajectory)
    of_ensemble = settings.ensemble.steps * settings.ensemble.pairs * len(sizes.ensemble)
    return len(FAULTS) * (of_trajectory + of_ensemble)


def _plan_trajectory(experiment: Experiment, level: str) -> list[Training]:
    trainings = _plan_controls(experiment, level, base_op_of(experiment))
    if experiment.configs[experiment.against]["import"] is None:
        other = experiment.arm_under_test(experiment.seed)
        trainings += [
            Training(level, replace(other, trained_steps=segment.trained_steps), segment.steps)
            for segment in segments_of(experiment)
        ]
    return trainings


def _plan_controls(experiment: Experiment, level: str, op: str) -> list[Training]:
    segments = segments_of(experiment)
    trainings = [
        Training(level, arm, segment.steps) for segment in segments for arm in control_arms(experiment, op, segment)
    ]
    needed = _plan_evaluation(experiment, level) if any(segment.trained_steps for segment in segments) else []
    return [*needed, *trainings]


def _plan_ensemble(experiment: Experiment, level: str) -> list[Training]:
    return [
        Training(level, arm, experiment.settings.ensemble.steps) for pair in paired_arms(experiment) for arm in pair
    ]


def _plan_evaluation(experiment: Experiment, level: str) -> list[Training]:
    return [Training(level, weights_arm(experiment), steps_of_weights(experiment))]


def _plan_sensitivity(experiment: Experiment, level: str) -> list[Training]:
    sizes, trainings = experiment.settings.sensitivity.sizes, []
    if sizes.trajectory:
        trainings += _plan_controls(experiment, level, experiment.against)
    if sizes.ensemble:
        trainings += [Training(level, base, experiment.settings.ensemble.steps) for base, _ in paired_arms(experiment)]
    if sizes.evaluation:
        trainings += _plan_evaluation(experiment, level)
    return trainings


def _plan_nothing(experiment: Experiment, level: str) -> list[Training]:
    return []


_PLANS: dict[str, Callable[[Experiment, str], list[Training]]] = {
    "trajectory": _plan_trajectory,
    "ensemble": _plan_ensemble,
    "evaluation": _plan_evaluation,
    "sensitivity": _plan_sensitivity,
}
