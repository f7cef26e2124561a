"""Arms differ in the op alone, and their hashes change with everything that training depends on."""

from dataclasses import replace

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

import parity.arms
from parity.arms import Arm, arm_hash, check_same_but_op, config_hash, load_experiment, nudge_weights

ARM = Arm("A", "reference", 42)


def test_both_ops_get_the_same_configuration(monkeypatch, overrides):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    experiment = load_experiment([*overrides, "op=triton", "optimizer.lr=0.001"])
    assert (experiment.op, experiment.against) == ("triton", "reference")
    assert {name: config.op.backend for name, config in experiment.configs.items()} == {
        "triton": "triton",
        "reference": "reference",
    }
    assert {config.optimizer.lr for config in experiment.configs.values()} == {0.001}
    assert experiment.configs["triton"].model.transformer.backend == "triton"


def test_auto_is_resolved_openly(overrides):
    experiment = load_experiment([*overrides, "op=auto", "trainer=cpu"])
    assert experiment.op == "reference"


def test_a_difference_beside_the_op_is_refused_by_name(experiment):
    config = experiment.configs["reference"]
    other = OmegaConf.create(OmegaConf.to_container(config, resolve=False))
    check_same_but_op(config, other)
    other.op.backend = "triton"
    check_same_but_op(config, other)
    other.optimizer.lr = 1.0
    with pytest.raises(ValueError, match=r"differ in op alone, got other optimizer\.lr"):
        check_same_but_op(config, other)


def test_unknown_ops_are_refused(overrides):
    with pytest.raises(ValueError, match="must be one of triton, reference, cuda, got fast"):
        load_experiment([*overrides, "against=fast"])


@pytest.mark.parametrize(("key", "least"), [("ensemble.pairs", 2), ("evaluation.controls", 1)])
def test_samples_without_a_deviation_are_refused(overrides, key, least):
    with pytest.raises(ValueError, match=rf"parity\.{key} must be >= {least}, got {least - 1}; raise it"):
        load_experiment([*overrides, f"parity.{key}={least - 1}"])


def test_hash_of_a_configuration_ignores_the_op_and_folders_alone(experiment):
    config = experiment.configs["reference"]
    other = OmegaConf.create(OmegaConf.to_container(config, resolve=False))
    other.op.backend, other.output, other.parity.trajectory.steps = "triton", "elsewhere", 9
    assert config_hash(other) == config_hash(config)
    other.data.batch_size = 7
    assert config_hash(other) != config_hash(config)


def test_hash_of_an_arm_changes_with_what_it_trains(experiment, monkeypatch):
    base = arm_hash(experiment, ARM, 4, 4)
    assert arm_hash(experiment, ARM, 4, 4) == base
    changed = [
        arm_hash(experiment, ARM, 3, 4),
        arm_hash(experiment, ARM, 4, 5),
        *(
            arm_hash(experiment, replace(ARM, **change), 4, 4)
            for change in ({"seed": 43}, {"repeat": 1}, {"nudge": 1}, {"fault": "one level dropped"})
        ),
    ]
    monkeypatch.setattr(parity.arms, "source_hash", lambda: "other code")
    changed.append(arm_hash(experiment, ARM, 4, 4))
    assert len({base, *changed}) == len(changed) + 1


def test_a_nudge_moves_every_weight_by_one_unit_in_the_last_place():
    model = nn.Linear(30, 20)
    before = model.weight.detach().clone()
    nudge_weights(model, seed=1)
    up, down = (torch.nextafter(before, torch.tensor(end)) for end in (torch.inf, -torch.inf))
    assert ((model.weight == up) | (model.weight == down)).all()
    assert (model.weight == up).any()
    assert (model.weight == down).any()
