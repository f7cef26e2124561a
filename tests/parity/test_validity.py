"""Comparisons that compare nothing are refused, each with its own message."""

from dataclasses import replace

import pytest

from parity.arms import Arm
from parity.recording import Recording
from parity.results import Verdict
from parity.validity import check_arms

BASE = Recording(
    arm=Arm("A", "reference", 1),
    hash="a",
    initial_weights="w",
    curves={"loss": [3.0, 2.0, 1.0]},
    terms={},
    data_hashes=["x", "y", "z"],
    assignments=[],
    attention_calls=[2, 2, 2],
    evidence={"grid_sampler": 2, "msda_op": 0},
    seconds=0.0,
)
TRITON = replace(BASE, arm=Arm("B", "triton", 1), evidence={"grid_sampler": 0, "msda_op": 4})
CUDA = replace(BASE, arm=Arm("B", "cuda", 1), evidence={"grid_sampler": 0, "msda_op": 0, "kernel ms_deformable": 2})


def refusals(first: Recording, second: Recording) -> list[str]:
    checks = check_arms(first, second, min_loss_change=0.02)
    assert all(check.guards for check in checks)
    return [check.detail for check in checks if check.verdict is not Verdict.PASS]


@pytest.mark.parametrize("other", [BASE, TRITON, CUDA])
def test_sound_arms_are_accepted(other):
    assert refusals(BASE, other) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"initial_weights": "v"}, "refused: the arms start from different weights"),
        ({"data_hashes": ["x", "other", "z"]}, "refused: the arms saw different data at step 1"),
        ({"data_hashes": ["x", "y"]}, "refused: the arms have different numbers of steps"),
        ({"evidence": {"grid_sampler": 2, "msda_op": 0}}, "refused: the op triton did not run"),
        ({"evidence": {"grid_sampler": 1, "msda_op": 4}}, "refused: the op triton did not run"),
        ({"attention_calls": [2, 0, 2]}, "refused: the op triton did not run"),
        ({"curves": {"loss": [2.0, 2.001, 2.0]}}, "refused: flat"),
        ({"curves": {"loss": [2.0, float("nan"), float("nan")]}}, "refused: 1 finite losses"),
    ],
)
def test_each_breach_is_refused_in_its_own_words(change, message):
    found = refusals(BASE, replace(TRITON, **change))
    assert len(found) == 1
    assert found[0].startswith(message)


def test_a_cuda_arm_without_its_kernel_is_refused():
    assert refusals(BASE, replace(CUDA, evidence={"grid_sampler": 0, "msda_op": 0}))[0].startswith("refused: the op")
