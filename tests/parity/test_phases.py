"""Phases are disjoint, add up to the step, and put the op's own time where it belongs."""

import pytest
import torch

import msda_op
from parity.arms import Arm
from parity.phases import PHASES, PhaseClock, split_phases, timing_parts
from parity.training import TrainingLoop

SPANS = {
    "data": 1.0,
    "model": 20.0,
    "backbone": 5.0,
    "encoder": 8.0,
    "op forward in encoder": 3.0,
    "op forward in decoder": 1.0,
    "criterion": 2.0,
    "op backward": 6.0,
    "forward and backward": 50.0,
    "optimiser": 4.0,
}


class CountingClock(PhaseClock):
    """A clock on which every stamp is one millisecond after the one before."""

    def __init__(self) -> None:
        self.now = 0
        super().__init__(self.tick, lambda begin, end: end - begin)

    def tick(self) -> int:
        self.now += 1
        return self.now


def test_nested_spans_become_disjoint_phases():
    phases = split_phases(SPANS)
    assert tuple(phases) == PHASES
    assert sum(phases.values()) == 1 + 50 + 4
    assert phases["encoder"] == 5
    assert phases["decoder and heads"] == 20 - 5 - 8 - 1
    assert phases["op forward"] == 4
    assert phases["backward"] == 50 - 20 - 2 - 6


def test_a_clock_adds_up_equal_names_and_forgets():
    clock = CountingClock()
    for _ in range(3):
        with clock.span("a"):
            clock.tick()
    assert clock.totals_ms() == {"a": 6}
    assert clock.totals_ms() == {}


def test_every_call_of_the_op_is_stamped_both_ways_and_gradients_stay(experiment):
    gradients = []
    for stamped in (False, True):
        loop = TrainingLoop(experiment, Arm("A", "reference", 42), 1)
        batch = loop.next_batch()
        torch.manual_seed(0)
        if stamped:
            clock = CountingClock()
            with timing_parts(loop.detector, clock):
                loop.backward(batch)
            names = [name for name, _, _ in clock._spans]
            assert names.count("op backward") == 3
            assert names.count("op forward in encoder") == 1
            assert names.count("op forward in decoder") == 2
            assert {"model", "backbone", "encoder", "criterion"} <= set(names)
        else:
            loop.backward(batch)
        parameters = loop.detector.named_parameters()
        gradients.append({name: value.grad for name, value in parameters if value.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    assert all(torch.equal(gradient, gradients[1][name]) for name, gradient in gradients[0].items())
    assert msda_op.ms_deform_attn.__module__ == "msda_op.api"


def test_stamps_are_removed_after_an_error(experiment):
    loop = TrainingLoop(experiment, Arm("A", "reference", 42), 1)
    with pytest.raises(RuntimeError, match="inside"), timing_parts(loop.detector, CountingClock()):
        raise RuntimeError("inside")
    assert not loop.detector.model._forward_hooks
    assert msda_op.fused_ms_deform_attn.__module__ == "msda_op.api"
