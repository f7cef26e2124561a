"""Runs an arm and keeps what it did; a finished arm is read back where its hash matches."""

import json
import os
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from models.weight_hash import hash_weights
from parity.arms import Arm, Experiment, arm_hash
from parity.results import write_json
from parity.training import StepResult, TrainingLoop, hash_batch

Progress = Callable[[str], None]
Curve = list[float]


@dataclass(frozen=True)
class Recording:
    """What an arm did.

    Args:
        arm: its identity.
        hash: of configuration, op, steps, code, versions and device.
        initial_weights: hash of the weights before the first step.
        curves: a number of each step: "loss", and "gradient of <group>", the norm of gradients before clipping.
        terms: each loss term of each step, by name.
        data_hashes: hash of each step's batch.
        assignments: for each step and decoder layer the query that each target got, in order of the targets.
        attention_calls: calls of attention modules in each step.
        evidence: what the profiler saw of the op in the first step, see `find_op_evidence`.
        seconds: how long the arm took.
    """

    arm: Arm
    hash: str
    initial_weights: str
    curves: dict[str, Curve]
    terms: dict[str, Curve]
    data_hashes: list[str]
    assignments: list[list[list[int]]]
    attention_calls: list[int]
    evidence: dict[str, int]
    seconds: float

    @property
    def loss(self) -> Curve:
        """Total loss of each step."""
        return self.curves["loss"]

    @property
    def num_steps(self) -> int:
        """Number of recorded steps."""
        return len(self.loss)


def record(
    experiment: Experiment, arm: Arm, num_steps: int, progress: Progress, total_steps: int | None = None
) -> Recording:
    """Returns the recording of an arm: read back if it has been finished, else made and kept.

    Args:
        experiment: configurations, device and output folder.
        arm: what to run.
        num_steps: steps to run.
        progress: called with a line now and then.
        total_steps: length of the learning-rate schedule; `num_steps` where none is given.
    """
    total_steps = num_steps if total_steps is None else total_steps
    identity = arm_hash(experiment, arm, num_steps, total_steps)
    path = experiment.output / "arms" / f"{identity}.json"
    if path.is_file():
        kept = read_recording(json.loads(path.read_text()))
        if kept.hash != identity:
            raise ValueError(f"{path} must hold the arm with the hash of its name, got {kept.hash}; delete the file")
        progress(f"{describe(arm)}: {num_steps} steps, read back")
        return kept
    recording = _run(experiment, arm, num_steps, total_steps, identity, progress)
    write_json(path, asdict(recording))
    return recording


def train_weights(experiment: Experiment, progress: Progress) -> dict[str, Tensor]:
    """Returns the state of a detector that was trained for a while; kept in the output folder as finished arms are."""
    steps = steps_of_weights(experiment)
    arm = weights_arm(experiment)
    path = experiment.output / "arms" / f"{arm_hash(experiment, arm, steps, steps)}.pt"
    if path.is_file():
        return torch.load(path, weights_only=True, map_location="cpu")
    with closing(TrainingLoop(experiment, arm, max(1, steps))) as loop:
        for step in range(steps):
            loop.step(loop.next_batch())
            if (step + 1) % max(1, steps // 4) == 0:
                progress(f"trained weights: step {step + 1} of {steps}")
    state = {name: tensor.detach().cpu() for name, tensor in loop.detector.state_dict().items()}
    aside = path.with_suffix(".part")
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(state, aside)
    aside.replace(path)
    return state


def weights_arm(experiment: Experiment) -> Arm:
    """Returns the arm whose weights are evaluated, and trained on."""
    return Arm("weights", experiment.against, experiment.seed)


def steps_of_weights(experiment: Experiment) -> int:
    """Returns how long these weights are trained: not at all where `model.weights` brings trained ones."""
    trained = experiment.configs[experiment.against].model.weights is not None
    return 0 if trained else int(experiment.settings.evaluation.steps)


def describe(arm: Arm) -> str:
    """Names an arm for a line of progress."""
    fault = f", {arm.fault} x {arm.fault_size:g}" if arm.fault is not None else ""
    start = f", after {arm.trained_steps} steps" if arm.trained_steps else ""
    return f"arm {arm.name} ({arm.op}, seed {arm.seed}{start}{fault})"


def find_op_evidence(profiled: profile) -> dict[str, int]:
    """Counts what tells the ops apart: custom ops of `msda_op`, `grid_sample`, and kernels by name.

    Returns:
        Counts under "msda_op", "grid_sampler", and "kernel <name>" for each of ours, or of the original op, on a GPU.
    """
    counts: Counter[str] = Counter()
    on_device = [event.name for event in profiled.events() if event.device_type == DeviceType.CUDA]
    for event in profiled.events():
        counts["msda_op"] += event.name.startswith("msda_op::")
        counts["grid_sampler"] += event.name == "aten::grid_sampler_2d"
    if on_device:
        from parity.compilation import entry_kernels  # Triton is not installed everywhere, but where there is a GPU

        ours = entry_kernels()
        counts.update(f"kernel {name}" for name in on_device if name in ours or "deform" in name)
    return dict(counts)


def _run(
    experiment: Experiment, arm: Arm, num_steps: int, total_steps: int, identity: str, progress: Progress
) -> Recording:
    began = time.perf_counter()
    weights = train_weights(experiment, progress) if arm.trained_steps else None
    loop = TrainingLoop(experiment, arm, total_steps, weights)
    recording = Recording(arm, identity, hash_weights(loop.detector.state_dict()), {}, {}, [], [], [], {}, 0.0)
    os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # the profiler reports its own start and end to the terminal
    activities = [ProfilerActivity.CPU]
    if experiment.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    evidence: dict[str, int] = {}
    with closing(loop):
        for step in range(num_steps):
            batch = loop.next_batch()
            recording.data_hashes.append(hash_batch(batch))
            if step == 0:
                with profile(activities=activities, acc_events=True) as profiled:  # else it warns that it clears them
                    result = loop.step(batch)
                    if experiment.device.type == "cuda":
                        torch.cuda.synchronize()
                evidence = find_op_evidence(profiled)
            else:
                result = loop.step(batch)
            _keep_step(recording, result)
            if (step + 1) % max(1, num_steps // 4) == 0:
                progress(f"{describe(arm)}: step {step + 1} of {num_steps}, loss {recording.loss[-1]:.4f}")
    fields = {**vars(recording), "evidence": evidence, "seconds": round(time.perf_counter() - began, 1)}
    return Recording(**fields)


def _keep_step(recording: Recording, result: StepResult) -> None:
    """Adds what one step left to the curves and lists of a recording."""
    norms = {f"gradient of {group}": norm for group, norm in result.grad_norms.items()}
    for curves, values in (
        (recording.curves, {"loss": result.losses.total.detach(), **norms}),
        (recording.terms, result.losses.terms),
    ):
        for name, value in values.items():
            curves.setdefault(name, []).append(float(value))
    recording.assignments.append(result.queries.tolist())
    recording.attention_calls.append(result.attention_calls)


def read_recording(fields: dict[str, Any]) -> Recording:
    """Reads a recording back from the JSON values of its fields."""
    numbers = {
        kind: {name: [_number(value) for value in curve] for name, curve in fields[kind].items()}
        for kind in ("curves", "terms")
    }
    return Recording(**{**fields, **numbers, "arm": Arm(**fields["arm"])})


def _number(value: float | None) -> float:
    """Reads a number back; JSON has null where it was not finite."""
    return float("nan") if value is None else value
