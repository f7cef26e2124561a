"""L1 and L2: does one step of the attention module, and of the whole model, do the same? In strict float32."""

import copy
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor

from coco.collate import Batch
from models.detector import Detector
from models.layers.ms_deform_attn import MSDeformAttn
from models.structures import DetectorOutput
from parity.arms import ROOT, Arm, Experiment
from parity.controls import GROUPS, Judged, judge, relative_errors
from parity.recording import Progress
from parity.results import Check, LevelResult, Verdict
from parity.results import judge as verdict_of
from parity.tolerances import GRADIENT, OUTPUT
from parity.training import TrainingLoop, faulty

QUESTION = "With the same weights and one batch, is one step the same?"
NUM_WORST = 10
_BATCHES = 4


@dataclass(frozen=True)
class Snapshot:
    """What one step of a model left.

    Args:
        tensors: outputs, losses, gradients and updated parameters, by (group, name). An updated parameter is given as
            its change times its gradient, by elements: what the step is worth. The change alone is, in the first step
            of AdamW, hardly more than the sign of the gradient, which rounding decides where that is near zero.
        queries: query that each target got, int64 [n, R], in order of the targets.
        module: outputs and gradients of the first attention module by itself, before the step.
    """

    tensors: dict[tuple[str, str], Tensor]
    queries: Tensor
    module: dict[tuple[str, str], Tensor]


@dataclass(frozen=True)
class Baseline:
    """The step that others are compared with.

    Args:
        snapshot: of the op that is compared with.
        control_errors: relative errors of the controls.
        module_errors: those of their attention module by itself.
        controls_keep_assignment: whether no control changed the assignment.
        batch: what was trained on.
    """

    snapshot: Snapshot
    control_errors: Sequence[Mapping[tuple[str, str], float]]
    module_errors: Sequence[Mapping[tuple[str, str], float]]
    controls_keep_assignment: bool
    batch: Batch


def run_model_level(experiment: Experiment, progress: Progress) -> LevelResult:
    """Compares one step of a module and of the model under both ops."""
    strict = in_strict_fp32(experiment)
    progress("model: one step of the base, its controls and the op under test")
    baseline = take_baseline(strict)
    other = take_snapshot(strict, strict.arm_under_test(strict.seed), baseline.batch)
    checks, rows = judge_model(baseline, other)
    module_rows = judge(baseline.snapshot.module, baseline.module_errors, other.module)
    wrong = [row.name for row in module_rows if not row.passed]
    detail = f"{len(module_rows)} tensors of both kinds of reference points"
    checks.insert(0, Check("module", verdict_of(not wrong), f"{detail}; out of bounds: {', '.join(wrong) or 'none'}"))
    gradients = [row for row in rows if row.group == "gradient"]
    # A bias in front of a normalisation has no gradient but rounding: a nudge changes it by more than its own size.
    meant = sorted((row for row in gradients if row.limit < 1), key=lambda row: row.ratio, reverse=True)
    data = {
        "module": [_to_json(row) for row in module_rows],
        "tensors": [_to_json(row) for row in rows if row.group in ("output", "loss")],
        "worst_gradients": [_to_json(row) for row in meant[:NUM_WORST]],
        "num_gradients": len(gradients),
        "num_rounding_gradients": len(gradients) - len(meant),
    }
    margins = {
        "outputs and losses": f"{OUTPUT.factor:g} x the controls' difference",
        "gradients and updated parameters": f"{GRADIENT.factor:g} x",
        "controls": strict.settings.model.controls,
    }
    return LevelResult("model", QUESTION, tuple(checks), margins, data)


def in_strict_fp32(experiment: Experiment) -> Experiment:
    """Returns the experiment with `precision=fp32`, TF32 off."""
    configs = {}
    for op, config in experiment.configs.items():
        configs[op] = copy.deepcopy(config)
        configs[op].precision = OmegaConf.load(ROOT / "configs" / "precision" / "fp32.yaml")
    return replace(experiment, configs=configs)


def take_baseline(experiment: Experiment) -> Baseline:
    """Runs the step of the op that is compared with, and of its controls."""
    arm = Arm("A", experiment.against, experiment.seed)
    with closing(TrainingLoop(experiment, arm, total_steps=1)) as loop:
        # Faults in padding need a batch that has some.
        batch = max((loop.next_batch() for _ in range(_BATCHES)), key=lambda batch: batch["padding_mask"].sum().item())
        base = _run_step(loop, experiment, arm, batch)
    errors, module_errors, keep = [], [], True
    for nudge in range(1, experiment.settings.model.controls + 1):
        control = take_snapshot(experiment, replace(arm, name=f"A+{nudge}", nudge=nudge), batch)
        errors.append(relative_errors(base.tensors, control.tensors))
        module_errors.append(relative_errors(base.module, control.module))
        keep = keep and torch.equal(control.queries, base.queries)
    return Baseline(base, errors, module_errors, keep, batch)


def take_snapshot(experiment: Experiment, arm: Arm, batch: Batch) -> Snapshot:
    """Runs an attention module of an arm, and one step on a batch."""
    return _run_step(TrainingLoop(experiment, arm, total_steps=1), experiment, arm, batch)


def _run_step(loop: TrainingLoop, experiment: Experiment, arm: Arm, batch: Batch) -> Snapshot:
    module = _run_modules(loop.detector, experiment, arm)
    model = loop.detector.model
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    before = {name: parameter.detach().clone() for name, parameter in trained.items()}
    outputs: list[DetectorOutput] = []
    hook = model.register_forward_hook(lambda module, args, output: outputs.append(output))
    torch.manual_seed(arm.seed)
    losses = loop.backward(batch)
    gradients = {name: parameter.grad.clone() for name, parameter in trained.items() if parameter.grad is not None}
    loop.update()
    hook.remove()
    tensors = {("output", name): tensor for name, tensor in _output_tensors(outputs[0]).items()}
    tensors |= {("loss", name): value for name, value in losses.terms.items()}
    tensors |= {("gradient", name): gradient for name, gradient in gradients.items()}
    for name, parameter in trained.items():
        tensors["updated parameter", name] = (parameter.detach() - before[name]) * gradients.get(name, 1.0)
    return Snapshot(tensors, loop.assigned_queries(), module)


def judge_model(baseline: Baseline, other: Snapshot) -> tuple[list[Check], list[Judged]]:
    """Returns a check for the assignment and one for each group of tensors, and the judgement of each tensor."""
    same = torch.equal(other.queries, baseline.snapshot.queries)
    if baseline.controls_keep_assignment:
        share = (other.queries != baseline.snapshot.queries).double().mean().item()
        assignment = Check("assignment", verdict_of(same), f"{100 * share:.3g} % of the pairs changed")
    else:
        detail = "a nudge of one unit in the last place changes it: too close to call on this batch"
        assignment = Check("assignment", Verdict.INCONCLUSIVE, detail)
    rows = judge(baseline.snapshot.tensors, baseline.control_errors, other.tensors)
    checks = [assignment]
    for group, plural in GROUPS.items():
        members = [row for row in rows if row.group == group]
        worst = max(members, key=lambda row: row.ratio)
        failed = sum(not row.passed for row in members)
        detail = f"{failed} of {len(members)} out of bounds; worst {worst.name}: {worst.error:.2e} of {worst.limit:.2e}"
        checks.append(Check(plural, verdict_of(failed == 0), detail))
    return checks, rows


def _output_tensors(output: DetectorOutput) -> dict[str, Tensor]:
    tensors = {"logits": output.logits, "boxes": output.boxes_cxcywh}
    if output.proposals is not None:
        tensors |= {"proposal logits": output.proposals.logits, "proposal boxes": output.proposals.boxes_cxcywh}
    return {name: tensor.detach() for name, tensor in tensors.items()}


def _run_modules(detector: Detector, experiment: Experiment, arm: Arm) -> dict[tuple[str, str], Tensor]:
    """Runs the first attention module by itself, with points and with boxes as reference."""
    module = next(module for module in detector.modules() if isinstance(module, MSDeformAttn))
    with faulty(detector, arm):
        return {
            (group, f"{name} ({kind})"): tensor
            for coordinates, kind in ((2, "points"), (4, "boxes"))
            for (group, name), tensor in _run_module(module, coordinates, experiment.seed).items()
        }


def _run_module(module: MSDeformAttn, coordinates: int, seed: int) -> dict[tuple[str, str], Tensor]:
    """Runs forward and backward; returns the output and the gradients of inputs and parameters."""
    generator = torch.Generator().manual_seed(seed)
    shapes = tuple((max(1, 9 >> level), max(1, 12 >> level)) for level in range(module.num_levels))
    width, device = module.value_proj.in_features, module.value_proj.weight.device
    num_queries, value_length = 7, sum(h * w for h, w in shapes)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    inputs = {
        "query": draw(2, num_queries, width),
        "reference points": draw(2, num_queries, module.num_levels, coordinates).sigmoid(),
        "features": draw(2, value_length, width),
    }
    for tensor in inputs.values():
        tensor.requires_grad_()
    padding_mask = draw(2, value_length) > 1
    output = module(*inputs.values(), shapes, padding_mask)
    leaves: dict[str, Tensor] = {**inputs, **dict(module.named_parameters())}
    gradients = torch.autograd.grad(output, list(leaves.values()), draw(*output.shape))
    named = {("gradient", name): gradient for name, gradient in zip(leaves, gradients, strict=True)}
    return {("output", "output"): output.detach(), **named}


def _to_json(row: Judged) -> dict[str, Any]:
    return {**asdict(row), "passed": row.passed}
