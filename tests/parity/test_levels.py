"""Each level passes an op compared with itself, and fails every fault that it must see."""

import copy
import json
from dataclasses import replace

import pytest
import torch
from omegaconf import OmegaConf

from models.weight_hash import hash_weights
from parity.arms import ROOT, Arm, load_experiment
from parity.cases import DEFAULT_CASES
from parity.controls import relative_errors
from parity.ensemble import compare_outcomes, run_ensemble
from parity.evaluation import (
    Evaluated,
    agree,
    compare_evaluations,
    control_arms,
    evaluate_arm,
    run_evaluation,
    take_yardstick,
)
from parity.faults import FAULTS
from parity.model_level import in_strict_fp32, judge_model, run_model_level, take_baseline, take_snapshot
from parity.op_level import run_op_level
from parity.recording import record, train_weights
from parity.results import Verdict
from parity.sensitivity import check_faults, find_smallest, required_levels
from parity.step_time import judge_speed, run_speed
from parity.training import TrainingLoop
from parity.trajectory import (
    changed_assignments,
    check_curves,
    compare_curves,
    divergence_step,
    record_controls,
    run_trajectory,
    segments_of,
)

SEEN_BY_MODEL = [fault for fault in FAULTS if "model" in fault.seen_by]
SEEN_BY_TRAJECTORY = [fault for fault in FAULTS if "trajectory" in fault.seen_by]


def silent(line: str) -> None:
    pass


def verdicts(result):
    return {check.name: check.verdict for check in result.checks}


@pytest.fixture(scope="module")
def strict(experiment):
    return in_strict_fp32(experiment)


@pytest.fixture(scope="module")
def baseline(strict):
    return take_baseline(strict)


@pytest.fixture(scope="module")
def controls(experiment):
    return record_controls(experiment, "reference", segments_of(experiment)[0], silent)


def test_op_level(experiment):
    result = run_op_level(experiment, silent)
    assert result.verdict is Verdict.PASS
    assert {row["dtype"] for row in result.data["rows"]} == {"fp32", "bf16", "fp16"}
    assert {row["case"] for row in result.data["rows"]} == {case.name for case in DEFAULT_CASES}


def test_model_level(experiment):
    result = run_model_level(experiment, silent)
    assert result.verdict is Verdict.PASS
    assert set(verdicts(result)) == {"module", "assignment", "outputs", "losses", "gradients", "updated parameters"}
    assert len(result.data["worst_gradients"]) == 10


def test_the_batch_of_the_model_level_has_padding(baseline):
    assert baseline.batch["padding_mask"].any()


@pytest.mark.parametrize("fault", SEEN_BY_MODEL, ids=lambda fault: fault.name)
def test_model_level_fails_a_fault(fault, strict, baseline):
    arm = Arm("broken", "reference", strict.seed, fault=fault.name, fault_size=1.0)
    checks, _ = judge_model(baseline, take_snapshot(strict, arm, baseline.batch))
    assert Verdict.FAIL in {check.verdict for check in checks}


def test_the_model_level_sees_a_learning_rate_that_is_a_little_off(experiment, baseline):
    config = copy.deepcopy(experiment.configs)
    for each in config.values():
        each.optimizer.lr *= 1.05
    other = in_strict_fp32(replace(experiment, configs=config))
    checks, _ = judge_model(baseline, take_snapshot(other, Arm("B", "reference", other.seed), baseline.batch))
    assert {check.name for check in checks if check.verdict is Verdict.FAIL} == {"updated parameters"}


def test_a_sign_that_rounding_decides_does_not_fail_an_update(strict, baseline, monkeypatch):
    backward, name = TrainingLoop.backward, "transformer.encoder.layers.0.self_attn.value_proj.bias"

    def snapshot(sign):
        def rounded(loop, batch):
            losses = backward(loop, batch)
            gradient = loop.detector.model.get_parameter(name).grad
            gradient[0] = sign * 1e-3 * gradient.norm()
            return losses

        monkeypatch.setattr(TrainingLoop, "backward", rounded)
        return take_snapshot(strict, Arm("A", "reference", strict.seed), baseline.batch).tensors

    first, second = snapshot(1), snapshot(-1)
    errors = relative_errors(first, second)
    assert errors["gradient", name] == pytest.approx(2e-3, rel=0.1)
    assert errors["updated parameter", name] <= errors["gradient", name]
    change, other = (each["updated parameter", name] / each["gradient", name] for each in (first, second))
    assert (other - change).norm() > 0.1 * change.norm()  # of the parameter, which one of its few elements moves


def test_an_assignment_that_a_nudge_changes_is_too_close_to_call(baseline):
    checks, _ = judge_model(replace(baseline, controls_keep_assignment=False), baseline.snapshot)
    assert checks[0].verdict is Verdict.INCONCLUSIVE


def test_trajectory(experiment):
    result = run_trajectory(experiment, silent)
    assert result.verdict is Verdict.PASS
    assert result.data["divergence"]["B"] is None
    assert set(result.data["changed_assignments"]["B"]) == {0.0}
    assert result.data["comparisons"][0]["differences"] == [0.0] * 4
    assert result.data["trained"]["comparisons"][0]["differences"] == [0.0] * 3
    assert {name for name in verdicts(result) if "gradient of all" in name} == {
        "curve: gradient of all",
        "curve: gradient of all, trained weights",
    }


def test_the_second_part_of_a_trajectory_starts_from_trained_weights(experiment, controls):
    _, trained = segments_of(experiment)
    assert trained == (3, experiment.settings.evaluation.steps)
    base, others = record_controls(experiment, "reference", trained, silent)
    assert base.initial_weights == hash_weights(train_weights(experiment, silent))
    assert base.initial_weights != controls[0].initial_weights
    assert [other.initial_weights == base.initial_weights for other in others] == [True, False, False]
    assert base.hash != controls[0].hash


@pytest.mark.parametrize("given", ["model.weights={}", "import={}", "parity.trajectory.trained_steps=0"])
def test_weights_are_trained_where_none_are_given_and_some_are_wanted(overrides, given, tmp_path):
    path = tmp_path / "given"
    path.touch()
    experiment = load_experiment([*overrides, given.format(path)])
    assert [segment.trained_steps for segment in segments_of(experiment)] == [0]


@pytest.mark.parametrize("fault", SEEN_BY_TRAJECTORY, ids=lambda fault: fault.name)
def test_trajectory_fails_a_fault(fault, experiment, controls):
    base, others = controls
    settings = experiment.settings.trajectory
    arm = replace(base.arm, name="broken", fault=fault.name, fault_size=1.0)
    broken = record(experiment, arm, 2, silent, total_steps=settings.steps)
    comparisons = [compare_curves(name, base, others, broken, settings) for name in base.curves]
    assert Verdict.FAIL in {check.verdict for check in check_curves(comparisons, settings)}


def test_a_fault_without_size_goes_unseen(experiment, controls, strict, baseline):
    base, others = controls
    settings = experiment.settings.trajectory
    for fault in (FAULTS[0], *FAULTS[-2:]):
        arm = replace(base.arm, name="broken", fault=fault.name, fault_size=0.0)
        sound = record(experiment, arm, 2, silent, total_steps=settings.steps)
        comparisons = [compare_curves(name, base, others, sound, settings) for name in base.curves]
        checks, _ = judge_model(baseline, take_snapshot(strict, arm, baseline.batch))
        checks += check_curves(comparisons, settings)
        assert {check.verdict for check in checks} == {Verdict.PASS}, fault.name


def test_deterministic_mode_is_checked_bit_for_bit(overrides):
    fewer = ["parity.trajectory.steps=2", "parity.trajectory.trained_steps=0"]
    experiment = load_experiment([*overrides, *fewer, "trainer.deterministic=true"])
    try:
        result = run_trajectory(experiment, silent)
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    assert verdicts(result)["deterministic mode"] is Verdict.PASS


def test_a_nudged_arm_stays_inside_the_envelope_of_the_others(experiment, controls):
    base, others = controls
    settings = experiment.settings.trajectory
    nudged = record(experiment, replace(base.arm, name="A+9", nudge=9), settings.steps, silent)
    comparisons = [compare_curves(name, base, others, nudged, settings) for name in base.curves]
    assert {check.verdict for check in check_curves(comparisons, settings)} == {Verdict.PASS}


def test_a_curve_that_ends_in_nan_is_outside(experiment, controls):
    base, others = controls
    curves = base.curves | {"loss": [*base.loss[:2], float("nan"), float("nan")]}
    comparison = compare_curves("loss", base, others, replace(base, curves=curves), experiment.settings.trajectory)
    assert (comparison.share_inside, comparison.first_outside) == (0.5, 2)
    assert divergence_step(base.loss, curves["loss"], 1e-3) == 2


def test_the_envelope_is_that_of_the_last_steps_and_the_first_steps_must_all_lie_inside(experiment, controls):
    settings = OmegaConf.merge(experiment.settings.trajectory, {"envelope_steps": 3, "strict_steps": 5})

    def verdict(differences: dict[int, float]) -> tuple[Verdict, list[float | None]]:
        base, control, other = (
            replace(controls[0], curves={"loss": [1.0 + moved.get(step, 0.0) for step in range(40)]})
            for moved in ({}, {0: 0.5, 1: 0.01, 10: -0.02}, differences)
        )
        comparison = compare_curves("loss", base, [control], other, settings)
        return check_curves([comparison], settings)[0].verdict, comparison.envelope

    sound, envelope = verdict({})
    assert sound is Verdict.PASS
    floor = settings.floor_ulps * 2**-23
    assert envelope[:6] == pytest.approx([5.0] * 4 + [0.1, floor])
    assert envelope[9:15] == pytest.approx([floor] + [0.2] * 4 + [floor])
    assert verdict({4: 0.09, 10: 0.19})[0] is Verdict.PASS
    assert verdict({4: 0.11})[0] is Verdict.FAIL
    assert verdict({20: 0.11})[0] is Verdict.PASS  # 39 of 40 steps
    assert verdict({20: 0.11, 21: 0.11, 22: 0.11})[0] is Verdict.FAIL


def test_changed_assignments_are_counted_layer_by_layer(controls):
    base, _ = controls
    assignments = [
        [layer[::-1] if index == 0 else layer for index, layer in enumerate(step)] for step in base.assignments
    ]
    shares = changed_assignments(base, replace(base, assignments=assignments))
    assert shares[0] > 0.3
    assert set(shares[1:]) == {0.0}


def test_golden_curves(overrides, tmp_path):
    path = tmp_path / "golden.json"
    assert run_trajectory(load_experiment([*overrides, f"export={path}"]), silent).verdict is Verdict.PASS
    again = load_experiment([*overrides, f"import={path}"])
    assert run_trajectory(again, silent).verdict is Verdict.PASS
    document = json.loads(path.read_text())
    recording = document["recording"]
    moved = recording["curves"] | {"loss": [1.01 * value for value in recording["curves"]["loss"]]}
    path.write_text(json.dumps(document | {"recording": recording | {"curves": moved}}))
    assert run_trajectory(again, silent).verdict is Verdict.FAIL
    path.write_text(json.dumps(document | {"config_hash": "other"}))
    assert run_trajectory(again, silent).verdict is Verdict.INCONCLUSIVE
    path.write_text(json.dumps({"schema_version": 0}))
    with pytest.raises(ValueError, match="a curve of schema version 1"):
        run_trajectory(again, silent)


def test_ensemble_with_too_few_pairs_never_passes(experiment):
    result = run_ensemble(experiment, silent)
    assert result.verdict is Verdict.INCONCLUSIVE
    assert verdicts(result)["conditions of 3 pairs"] is Verdict.PASS
    assert "fewer than 8 pairs never pass" in result.checks[-1].detail


def test_ensemble_passes_with_enough_pairs_and_fails_another_outcome():
    outcomes = [(10.0 + 0.1 * seed, 10.0 + 0.1 * seed + 0.01 * (-1) ** seed) for seed in range(8)]
    assert compare_outcomes(outcomes, 0.05, 0.9, 8).verdict is Verdict.PASS
    assert compare_outcomes([(base, other + 2) for base, other in outcomes], 0.05, 0.9, 8).verdict is Verdict.FAIL
    assert compare_outcomes([(base, float("nan")) for base, _ in outcomes], 0.05, 0.9, 8).verdict is Verdict.FAIL


def test_evaluation(experiment):
    result = run_evaluation(experiment, silent)
    assert result.verdict is Verdict.PASS
    assert result.data["agreement"] == pytest.approx(100.0)


def ap_verdict(experiment, base, control_gains, other_gains):
    """Verdict about AP where the APs of controls and others, in 0..1, lie so far above that of the base."""

    def gain(value):
        metrics = base.result.metrics | {"AP": base.result.metrics["AP"] + value}
        return replace(base, result=replace(base.result, metrics=metrics))

    controls, others = ([gain(value) for value in gains] for gains in (control_gains, other_gains))
    return compare_evaluations(take_yardstick(base, controls, experiment), others, experiment)[0][1].verdict


def test_evaluation_allows_a_jump_of_one_rounding_and_no_shift_of_all(experiment):
    base = evaluate_arm(experiment, control_arms(experiment)[0], train_weights(experiment, silent), silent)
    jumps = [0.0, 0.0006, -0.0004, 0.0005, -0.0005, 0.0003, -0.0002, 0.0001]  # A' equals A
    assert ap_verdict(experiment, base, jumps, [0.0012, 0.0, -0.0004, 0.0003]) is Verdict.PASS
    assert ap_verdict(experiment, base, jumps, [0.002, 0.002, 0.0016, 0.0017]) is Verdict.FAIL
    assert ap_verdict(experiment, base, [0.0, 0.0], [0.0004]) is Verdict.PASS
    assert ap_verdict(experiment, base, [0.0, 0.0], [0.0006]) is Verdict.FAIL


def test_evaluation_fails_moved_boxes_and_refuses_an_ap_that_is_too_low(experiment):
    weights = train_weights(experiment, silent)
    base = evaluate_arm(experiment, control_arms(experiment)[0], weights, silent)
    moved = Evaluated(
        {key: replace(found, boxes_xyxy=found.boxes_xyxy + 20) for key, found in base.detections.items()},
        base.annotations,
        base.result,
    )
    assert agree(base, base, 10) == pytest.approx(100.0)
    assert agree(base, moved, 10) < 90
    yardstick = take_yardstick(base, [base, base], experiment)
    checks, _ = compare_evaluations(yardstick, [moved], experiment)
    assert [check.verdict for check in checks] == [Verdict.PASS, Verdict.PASS, Verdict.FAIL]
    assert ap_verdict(experiment, base, [0.0, 0.0], [0.01]) is Verdict.FAIL
    experiment.settings.evaluation.min_ap = 101.0
    try:
        refused = compare_evaluations(yardstick, [base], experiment)[0][0]
    finally:
        experiment.settings.evaluation.min_ap = 0.0
    assert refused.guards
    assert refused.detail.startswith("refused: too low")


def test_speed(experiment):
    result = run_speed(experiment, silent)
    assert {len(samples) for samples in result.data["samples_ms"].values()} == {3}
    for phases in result.data["phases"].values():
        assert min(value for name, value in phases.items() if name != "backward") > 0


def test_speed_is_void_where_an_op_is_faster_than_itself(experiment):
    steady = {"A": [10.0, 10.1, 9.9] * 5, "A'": [10.0, 9.9, 10.1] * 5, "B": [5.0, 5.1, 4.9] * 5}
    result = judge_speed(steady, experiment, {})
    assert result.verdict is Verdict.PASS
    assert result.data["ratios"]["A / B"]["ratio"] == pytest.approx(2.0)
    disturbed = judge_speed({**steady, "A'": [15.0, 15.1, 14.9] * 5}, experiment, {})
    assert disturbed.verdict is Verdict.INCONCLUSIVE
    assert disturbed.checks[0].detail.startswith("refused: does not cover 1")


def test_the_smallest_size_is_the_last_one_seen_before_one_goes_unseen():
    tried: list[float] = []

    def detect(fault, size):
        tried.append(size)
        return size >= 0.01

    assert find_smallest(detect, FAULTS[0], [0.001, 1.0, 0.0001, 0.01, 0.1]) == 0.01
    assert tried == [1.0, 0.1, 0.01, 0.001]
    assert find_smallest(lambda fault, size: False, FAULTS[0], [1.0, 0.1]) is None


def test_a_fault_that_a_level_misses_fails_the_suite():
    seen = {fault.name: dict.fromkeys(fault.seen_by, 1.0) for fault in FAULTS}
    levels = ["op", "model", "trajectory", "evaluation"]
    assert {check.verdict for check in check_faults(seen, levels, in_half=False)} == {Verdict.PASS}
    seen["one level dropped"]["model"] = None
    missed = [check for check in check_faults(seen, levels, in_half=False) if check.verdict is Verdict.FAIL]
    assert [check.name for check in missed] == ["one level dropped"]
    assert "must be seen by model too" in missed[0].detail


def test_in_half_precision_a_trajectory_may_miss_faint_faults_alone():
    seen = {fault.name: dict.fromkeys(fault.seen_by, 1.0) | {"trajectory": None} for fault in FAULTS}
    failed = {
        check.name for check in check_faults(seen, ["model", "trajectory"], True) if check.verdict is Verdict.FAIL
    }
    assert failed == {fault.name for fault in FAULTS if not fault.faint}
    assert len(failed) == len(FAULTS) - 3


@pytest.mark.parametrize("preset", ["quick", "full"])
@pytest.mark.parametrize("in_half", [False, True])
def test_every_fault_must_be_seen_by_some_level_in_every_precision(preset, in_half):
    sizes = OmegaConf.load(ROOT / f"configs/parity/{preset}.yaml").parity.sensitivity.sizes
    levels = [level for level, ladder in sizes.items() if 1.0 in ladder]
    required = {fault.name: required_levels(fault, levels, in_half) for fault in FAULTS}
    assert all("model" in names for names in required.values())
    of_the_op = [fault.name for fault in FAULTS if fault.damage is not None]
    assert all("op" in required[name] for name in of_the_op)


@pytest.mark.gpu
def test_all_levels_on_a_gpu(overrides, tmp_path):
    experiment = load_experiment([*overrides, "trainer=gpu", "op=triton", f"output={tmp_path}"])
    for run in (run_op_level, run_model_level, run_trajectory, run_evaluation):
        assert run(experiment, silent).verdict is Verdict.PASS, run.__name__
    speed = run_speed(experiment, silent)
    assert min(value for phases in speed.data["phases"].values() for value in phases.values()) > 0
