"""Every fault is nothing at size 0, and is seen by the op level at size 1; none stays behind in a model."""

import pytest
import torch

import msda_op
from models.layers.ms_deform_attn import MSDeformAttn
from parity.arms import Arm
from parity.cases import DEFAULT_CASES, Case, make_inputs
from parity.comparisons import INPUT_NAMES, compare_op, evaluate
from parity.faults import FAULTS, find_fault
from parity.interception import op_of
from parity.training import TrainingLoop, faulty

CASE = Case("crowded levels", ((6, 9), (2, 2)), num_queries=150)
OF_THE_OP = [fault for fault in FAULTS if fault.damage is not None]
REFERENCE = op_of("reference")


@pytest.fixture(scope="module")
def inputs():
    return make_inputs(CASE, torch.float32, torch.device("cpu"), seed=0)


@pytest.mark.parametrize("fault", OF_THE_OP, ids=lambda fault: fault.name)
def test_no_size_is_no_fault(fault, inputs):
    broken, sound = (evaluate(op, inputs, INPUT_NAMES) for op in (fault.break_op(REFERENCE, 0.0), REFERENCE))
    for name, tensor in sound.items():
        torch.testing.assert_close(broken[name], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fault", OF_THE_OP, ids=lambda fault: fault.name)
def test_the_whole_fault_is_seen(fault, inputs):
    results = compare_op(fault.break_op(REFERENCE, 1.0), inputs, INPUT_NAMES)
    wrong = [result.name for result in results if not result.passed]
    assert wrong
    if "gradient" in fault.name:
        assert "output" not in wrong


@pytest.mark.parametrize("fault", OF_THE_OP, ids=lambda fault: fault.name)
def test_every_case_can_be_broken(fault):
    for case in DEFAULT_CASES:
        inputs = make_inputs(case, torch.float32, torch.device("cpu"), seed=0)
        found = evaluate(fault.break_op(REFERENCE, 1.0), inputs, INPUT_NAMES)
        assert found["output"].shape == (case.batch, case.num_queries, case.num_heads * case.head_dim), case.name


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_reaches_the_gradients_of_a_model_and_leaves_nothing_behind(fault, experiment):
    gradients = {}
    for name in ("sound", "broken", "after"):
        arm = Arm("A", "reference", 42, fault=fault.name if name == "broken" else None, fault_size=1.0)
        loop = TrainingLoop(experiment, arm, 1)
        loop.backward(loop.next_batch())
        parameters = loop.detector.named_parameters()
        gradients[name] = {key: value.grad for key, value in parameters if value.grad is not None}
    assert msda_op.ms_deform_attn.__module__ == "msda_op.api"
    changed = [
        key for key, gradient in gradients["sound"].items() if not torch.equal(gradient, gradients["broken"][key])
    ]
    assert changed
    assert all(torch.equal(gradient, gradients["after"][key]) for key, gradient in gradients["sound"].items())


def test_hooks_of_the_padding_fault_are_removed(experiment):
    loop = TrainingLoop(experiment, Arm("A", "reference", 42), 1)
    attention = next(module for module in loop.detector.modules() if isinstance(module, MSDeformAttn))
    hooks = len(attention._forward_pre_hooks), len(attention.value_proj._forward_hooks)
    with faulty(loop.detector, Arm("A", "reference", 42, fault="padded values not zeroed", fault_size=1.0)):
        assert len(attention.value_proj._forward_hooks) == hooks[1] + 1
    assert (len(attention._forward_pre_hooks), len(attention.value_proj._forward_hooks)) == hooks


def test_unknown_and_misplaced_faults_are_refused():
    with pytest.raises(ValueError, match="fault must be one of align_corners flipped"):
        find_fault("typo")
    with pytest.raises(ValueError, match="inject it into a model"):
        find_fault("padded values not zeroed").break_op(REFERENCE, 1.0)
