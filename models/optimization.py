"""AdamW parameter groups and learning-rate schedules of the published recipes."""

import math
from dataclasses import dataclass

from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.optimizer import Optimizer


@dataclass(frozen=True, kw_only=True)
class AdamWSettings:
    """Optimiser of Deformable-DETR (arXiv 2010.04159, section 5) and its three parameter groups.

    Attributes:
        lr: Learning rate of everything outside the other two groups.
        backbone_lr: Learning rate of the parameters whose name starts with `backbone_prefix`.
        slow_factor: Factor on `lr` for the modules named in `slow_modules`.
        slow_modules: Attribute names of the slowed modules, compared with whole components of a parameter's name.
        backbone_prefix: Leading component of the names of backbone parameters.
        weight_decay: Decoupled weight decay, for every parameter as published.
        fused: Whether to use PyTorch's fused kernel; it cannot be combined with loss scaling and gradient clipping.
    """

    lr: float
    backbone_lr: float
    slow_factor: float
    slow_modules: tuple[str, ...]
    backbone_prefix: str
    weight_decay: float
    fused: bool

    def group_of(self, name: str) -> str:
        """Returns the group ("backbone", "slow" or "main") of the parameter called `name`."""
        components = name.split(".")
        if components[0] == self.backbone_prefix:
            return "backbone"
        return "slow" if any(component in self.slow_modules for component in components) else "main"

    def build(self, model: nn.Module) -> Optimizer:
        """Makes the optimiser; every trainable parameter of `model` is in exactly one group.

        Raises:
            ValueError: If a name in `slow_modules` matches no parameter, for then it is misspelt.
        """
        learning_rates = {"main": self.lr, "backbone": self.backbone_lr, "slow": self.lr * self.slow_factor}
        members: dict[str, list[nn.Parameter]] = {group: [] for group in learning_rates}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                members[self.group_of(name)].append(parameter)
        known = {component for name, _ in model.named_parameters() for component in name.split(".")}
        if self.slow_modules and not known.intersection(self.slow_modules):
            raise ValueError(
                f"optimizer.slow_modules must name modules of the model, got {list(self.slow_modules)}; "
                "see model.named_parameters() for the names"
            )
        groups = [
            {"params": parameters, "lr": learning_rates[group], "name": group}
            for group, parameters in members.items()
            if parameters
        ]
        return AdamW(groups, weight_decay=self.weight_decay, fused=self.fused)


@dataclass(frozen=True, kw_only=True)
class StepSchedule:
    """Multiplies the learning rates by `gamma` at each of `milestones`, after a linear warm-up.

    Attributes:
        milestones: Epochs at whose start the rates drop.
        gamma: Factor of each drop.
        warmup_steps: Optimiser steps of linear warm-up; 0 for none, as published.
    """

    milestones: tuple[int, ...]
    gamma: float
    warmup_steps: int

    def factor(self, step: int, total_steps: int, max_epochs: int) -> float:
        """Factor on every learning rate at optimiser step `step`, counted from 0."""
        drops = sum(step * max_epochs >= milestone * total_steps for milestone in self.milestones)
        return warmup_factor(step, self.warmup_steps) * self.gamma**drops


@dataclass(frozen=True, kw_only=True)
class CosineSchedule:
    """Cosine decay to zero over the whole run (arXiv 1608.03983, eq. 5), after a linear warm-up.

    Attributes:
        warmup_steps: Optimiser steps of linear warm-up; 0 for none.
    """

    warmup_steps: int

    def factor(self, step: int, total_steps: int, max_epochs: int) -> float:
        """Factor on every learning rate at optimiser step `step`, counted from 0."""
        progress = (step - self.warmup_steps) / max(1, total_steps - self.warmup_steps)
        decay = 0.5 * (1 + math.cos(math.pi * min(1.0, max(0.0, progress))))
        return warmup_factor(step, self.warmup_steps) * decay


Schedule = StepSchedule | CosineSchedule


def warmup_factor(step: int, warmup_steps: int) -> float:
    """Factor that rises linearly to 1 over `warmup_steps` optimiser steps."""
    return min(1.0, (step + 1) / (warmup_steps + 1))


def build_scheduler(schedule: Schedule, optimizer: Optimizer, total_steps: int, max_epochs: int) -> LambdaLR:
    """Makes the scheduler that is stepped once an optimiser step.

    Args:
        schedule: The shape of the curve.
        optimizer: Its groups keep their own base learning rates.
        total_steps: Optimiser steps of the run.
        max_epochs: Epochs of the run, for milestones given in epochs; 0 for a run of steps, where none is reached.
    """
    return LambdaLR(optimizer, lambda step: schedule.factor(step, total_steps, max_epochs))


def measure_gradients(optimizer: Optimizer) -> Tensor:
    """Returns the norm of all gradients of an optimiser's parameters together, a float32 scalar on the device."""
    return nn.utils.get_total_norm([p.grad for p in _parameters(optimizer) if p.grad is not None])


def clip_gradients(optimizer: Optimizer, limit: float, norm: Tensor) -> None:
    """Scales all gradients of an optimiser's parameters so that their norm together is at most `limit`.

    Args:
        optimizer: of the parameters.
        limit: above 0.
        norm: of the gradients, see `measure_gradients`; nothing waits for it.
    """
    nn.utils.clip_grads_with_norm_(_parameters(optimizer), limit, norm)


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
