import math

import pytest
import torch
from torch import nn

from models.optimization import (
    AdamWSettings,
    CosineSchedule,
    StepSchedule,
    build_scheduler,
    clip_gradients,
    measure_gradients,
)

SETTINGS = AdamWSettings(
    lr=2e-4,
    backbone_lr=2e-5,
    slow_factor=0.1,
    slow_modules=("reference_points", "sampling_offsets"),
    backbone_prefix="backbone",
    weight_decay=1e-4,
    fused=False,
)


class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Linear(2, 2)
        self.transformer = nn.ModuleDict({"sampling_offsets": nn.Linear(2, 2), "linear1": nn.Linear(2, 2)})
        self.reference_points_head = nn.Linear(2, 2)
        self.frozen = nn.Parameter(torch.zeros(1), requires_grad=False)


def test_every_trainable_parameter_is_in_exactly_one_group():
    model = Toy()
    groups = SETTINGS.build(model).param_groups
    members = [id(parameter) for group in groups for parameter in group["params"]]
    assert len(members) == len(set(members))
    assert set(members) == {id(parameter) for parameter in model.parameters() if parameter.requires_grad}


def test_groups_have_the_published_rates():
    rates = {group["name"]: group["lr"] for group in SETTINGS.build(Toy()).param_groups}
    assert rates == {"main": 2e-4, "backbone": 2e-5, "slow": pytest.approx(2e-5)}


def test_a_name_is_compared_by_whole_components():
    assert SETTINGS.group_of("transformer.sampling_offsets.weight") == "slow"
    assert SETTINGS.group_of("reference_points_head.weight") == "main"
    assert SETTINGS.group_of("transformer.backbone.weight") == "main"


def test_a_slow_module_that_does_not_exist_is_refused():
    settings = AdamWSettings(**{**SETTINGS.__dict__, "slow_modules": ("sampling_ofsets",)})
    with pytest.raises(ValueError, match="sampling_ofsets"):
        settings.build(Toy())


def rates_of(schedule, total_steps, max_epochs):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = build_scheduler(schedule, optimizer, total_steps, max_epochs)
    rates = []
    for _ in range(total_steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def test_step_schedule_drops_at_the_first_step_of_the_milestone_epoch():
    rates = rates_of(StepSchedule(milestones=(3,), gamma=0.1, warmup_steps=0), total_steps=20, max_epochs=4)
    assert rates == [1.0] * 15 + [0.1] * 5


def test_step_schedule_of_a_run_without_epochs_never_drops():
    assert set(rates_of(StepSchedule(milestones=(3,), gamma=0.1, warmup_steps=0), 20, 0)) == {1.0}


def test_cosine_schedule_warms_up_and_ends_near_zero():
    rates = rates_of(CosineSchedule(warmup_steps=4), total_steps=104, max_epochs=0)
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates[54] == pytest.approx(0.5)
    assert rates[-1] == pytest.approx(0.5 * (1 + math.cos(math.pi * 0.99)))


def test_gradients_of_all_groups_are_clipped_together():
    model = Toy()
    optimizer = SETTINGS.build(model)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 3.0)
    count = sum(parameter.numel() for group in optimizer.param_groups for parameter in group["params"])
    norm = measure_gradients(optimizer)
    assert norm.item() == pytest.approx(3 * math.sqrt(count))
    clip_gradients(optimizer, 0.5, norm)
    assert model.backbone.weight.grad.flatten().tolist() == pytest.approx([0.5 / math.sqrt(count)] * 4)
    assert model.frozen.grad.item() == 3.0
