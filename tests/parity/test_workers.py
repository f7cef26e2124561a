"""Processes train what the calling process would, report their lines, and hand on what goes wrong."""

import time
from collections.abc import Iterator
from functools import partial
from queue import SimpleQueue

import pytest

from parity.arms import Arm, Experiment, arm_hash, load_experiment
from parity.plan import Training
from parity.recording import Progress, record
from parity.sensitivity import begin_untrained, run_sensitivity
from parity.suite import run_suite
from parity.workers import Workers

STEPS = 2


def silent(line: str) -> None:
    pass


@pytest.fixture(scope="module")
def elsewhere(overrides, tmp_path_factory) -> Experiment:
    """An experiment whose arms nobody has trained yet, and whose faults are measured on the op alone."""
    sizes = "parity.sensitivity.sizes={op: [1.0, 0.001], model: [], trajectory: [], ensemble: [], evaluation: []}"
    return load_experiment([*overrides, sizes, f"output={tmp_path_factory.mktemp('elsewhere')}"])


@pytest.fixture(scope="module")
def lines() -> SimpleQueue[str]:
    """What processes report; a thread puts it in, soon after they have done so."""
    return SimpleQueue()


@pytest.fixture(scope="module")
def workers(elsewhere, lines) -> Iterator[Workers]:
    """Two processes, which take seconds to start."""
    with Workers(elsewhere, 2, lines.put) as processes:
        yield processes


def test_arms_of_other_processes_are_the_same_bit_for_bit(workers, lines, elsewhere, experiment):
    arms = [Arm("A", "reference", 42), Arm("B", "reference", 42)]
    for future in [workers.start(Training("trajectory", arm, STEPS)) for arm in arms]:
        future.result()
    broken = workers.start(Training("trajectory", Arm("A", "reference", 42, fault="typo"), STEPS))
    with pytest.raises(ValueError, match=r"fault must be one of .*, got 'typo'"):
        broken.result()
    expected = [f"arm {arm.name} (reference, seed 42): step {step} of {STEPS}" for arm in arms for step in (1, STEPS)]
    assert sorted(lines.get(timeout=10).split(", loss")[0] for _ in expected) == expected
    assert lines.empty()
    for arm in arms:
        assert arm_hash(elsewhere, arm, STEPS, STEPS) == arm_hash(experiment, arm, STEPS, STEPS)
        there, here = (record(each, arm, STEPS, silent) for each in (elsewhere, experiment))
        assert there.curves == here.curves
        assert there.assignments == here.assignments


def test_levels_read_back_what_processes_trained(overrides, tmp_path):
    lines: list[str] = []
    verdict = run_suite(
        "trajectory",
        [*overrides, f"output={tmp_path}", "parity.workers=2", "parity.trajectory.controls=1"],
        lines.append,
    )
    assert verdict.exit_code == 0
    for steps in (4, 3):  # from initial weights, and from trained ones
        assert sum(line.endswith(f"{steps} steps, read back") for line in lines) == 4
        assert sum(f"step {steps} of {steps}" in line for line in lines) == 4
    assert len(list((tmp_path / "arms").glob("*.json"))) == 8
    assert sum(line == "trained weights: step 2 of 2" for line in lines) == 1


def test_work_that_needs_other_work_begins_after_it(workers):
    first = workers.start(partial(_take, 0.5))
    second = workers.start(partial(_take, 0.0), after=first)
    assert second.result() > first.result()
    broken = workers.start(_break)
    with pytest.raises(ValueError, match="broken"):
        workers.start(partial(_take, 0.0), after=broken).result()


def test_work_that_needs_other_work_ends_with_it(experiment):
    with Workers(experiment, 1, silent) as processes:
        slow = processes.start(partial(_take, 0.5))
        late = processes.start(partial(_take, 0.0), after=slow)
    assert slow.done()
    assert late.cancelled()


def _take(seconds: float, experiment: Experiment, progress: Progress) -> float:
    time.sleep(seconds)
    return time.time()


def _break(experiment: Experiment, progress: Progress) -> None:
    raise ValueError("broken")


def test_faults_are_measured_while_a_level_before_waits(workers, lines, elsewhere):
    """Those that need no training, in processes, with the findings of this one."""
    begun = begin_untrained(elsewhere, workers)
    assert [len(pieces) for pieces in begun.values()] == [2]
    shared = run_sensitivity(elsewhere, silent, workers, begun)
    alone = run_sensitivity(elsewhere, silent)
    assert shared.data == alone.data
    assert shared.checks == alone.checks
    found = [row["smallest"] for row in alone.data["rows"] if row["smallest"]]
    assert any(smallest["op"] == 0.001 for smallest in found)
    assert all("sensitivity: op sees" in lines.get(timeout=10) for _ in found)
    assert lines.empty()
