"""The plan holds every arm of the levels once, the longest first, and counts their steps."""

from omegaconf import OmegaConf

from parity.arms import load_experiment
from parity.faults import FAULTS
from parity.plan import describe_plan, plan_trainings
from parity.suite import LEVELS


def test_all_levels_share_arms_and_the_longest_begins(overrides):
    experiment = load_experiment([*overrides, "parity.evaluation.steps=9", "parity.workers=2"])
    trainings = plan_trainings(experiment, list(LEVELS))
    # One set of weights; A, A', A+1, A+2 and B from initial weights and from those; 3 pairs.
    assert [training.level for training in trainings] == [*["trajectory"] * 11, *["ensemble"] * 6]
    assert [training.num_steps for training in trainings] == [9, *[4] * 5, *[3] * 11]
    assert [training.arm.trained_steps for training in trainings] == [*[0] * 6, *[9] * 5, *[0] * 6]
    lines = describe_plan(experiment, list(LEVELS), trainings)
    broken = len(FAULTS) * 2 * (3 + 3)  # two sizes, three steps from each start
    head = f"training: {9 + 5 * (4 + 3) + 6 * 3 + broken} steps, 2 at a time, about 0.1 minutes at 0.05 s a step"
    assert lines[0] == head
    assert "  trajectory: arms 11, steps 44" in lines
    assert f"  sensitivity: broken arms, at most {broken} steps" in lines


def test_sensitivity_by_itself_plans_what_it_compares_with(overrides):
    experiment = load_experiment(overrides)
    trainings = plan_trainings(experiment, ["sensitivity"])
    assert {training.arm.name for training in trainings} == {"A", "A'", "A+1", "A+2", "weights"}
    assert {training.level for training in trainings} == {"sensitivity"}
    sizes = experiment.settings.sensitivity.sizes
    OmegaConf.update(sizes, "ensemble", [1.0])
    assert len(plan_trainings(experiment, ["sensitivity"])) == len(trainings) + experiment.settings.ensemble.pairs


def test_levels_without_training_plan_nothing(experiment):
    assert plan_trainings(experiment, ["op", "model", "speed"]) == []
