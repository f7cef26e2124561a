"""What happens when a loss or a gradient is not finite: the step is withheld, and the evidence saved."""

import json
import logging
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim.optimizer import Optimizer

from models.optimization import measure_gradients
from models.reduction import sum_over_processes

POLICIES = ("stop", "skip")

logger = logging.getLogger(__name__)


class TrainingDiverged(RuntimeError):
    """The training has met losses or gradients that are not finite, and stops."""


@dataclass(frozen=True)
class StepRecord:
    """An optimiser step that is not judged yet.

    Attributes:
        step: Its number, counted from 0.
        image_ids: Images of this process, one tuple a batch of accumulated gradients.
        losses: The loss of each batch as it is differentiated, scaled and divided as the trainer does.
        terms: The unweighted loss terms of each batch.
        grad_norm: Norm of this process's gradients.
        withheld: float32 scalar on the host, above 0 if a process met values that are not finite.
        copied: When `withheld` has arrived from a GPU; None on a CPU.
    """

    step: int
    image_ids: list[tuple[int, ...]]
    losses: list[Tensor]
    terms: list[dict[str, Tensor]]
    grad_norm: Tensor
    withheld: Tensor
    copied: torch.cuda.Event | None

    def is_withheld(self) -> bool:
        """Whether the step was withheld; waits for its flag, which the step after finds there already."""
        if self.copied is not None:
            self.copied.synchronize()
        return bool(self.withheld > 0)


class DivergenceGuard(Callback):
    """Withholds optimiser steps whose loss or gradient is not finite on any process, and saves what led there.

    Withholding happens on the device: a fused optimiser leaves weights and moments alone where its `found_inf` is set.
    The host looks at a step's flag one step later and never waits for the GPU; it waits with an optimiser that is not
    fused. Under loss scaling (fp16) the scaler withholds steps whose gradients overflow, which is no divergence: the
    loss alone is judged.

    `divergence/step_<step>_rank<rank>.json` in the run folder holds image ids, loss terms, gradient norm and
    configuration of a withheld step; when the training stops, `divergence/step_<step>.ckpt` the last finite weights.

    Args:
        policy: "stop" ends the training at the first withheld step, "skip" goes on.
        limit: Steps of the whole run that "skip" may withhold.
        run_dir: The run's folder, with the `manifest.json` of `models.callbacks.RunManifest`.

    Raises:
        ValueError: For another policy or a negative limit.
    """

    def __init__(self, *, policy: str, limit: int, run_dir: str) -> None:
        if policy not in POLICIES:
            raise ValueError(f"policy must be one of {', '.join(POLICIES)}, got {policy}; set callbacks.divergence")
        if limit < 0:
            raise ValueError(f"limit must be at least 0, got {limit}; set callbacks.divergence.limit")
        self.policy = policy
        self.limit = limit
        self.run_dir = Path(run_dir)
        self.num_withheld = 0
        self._image_ids: list[tuple[int, ...]] = []
        self._losses: list[Tensor] = []
        self._terms: list[dict[str, Tensor]] = []
        self._record: StepRecord | None = None

    def state_dict(self) -> dict[str, int]:
        """Keeps the count, so that a resumed run has the same limit."""
        return {"num_withheld": self.num_withheld}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Restores the count."""
        self.num_withheld = state_dict["num_withheld"]

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: dict[str, Any], batch_idx: int
    ) -> None:
        """Notes the images."""
        self._image_ids.append(tuple(batch["image_ids"]))

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Notes the loss and its terms."""
        self._losses.append(loss.detach())
        self._terms.append(pl_module.loss_terms)  # type: ignore[arg-type]  # a Detector's

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Judges the step before, and withholds this one if it must not be taken."""
        self._judge(trainer)
        norm = measure_gradients(optimizer)
        pl_module.gradient_norm = norm  # type: ignore[assignment]  # a Detector's, which clips by it
        is_scaled = getattr(trainer.precision_plugin, "scaler", None) is not None
        judged = torch.stack(self._losses if is_scaled else [*self._losses, norm.to(self._losses[0].device)])
        withheld = sum_over_processes((~judged.isfinite().all()).float()).clamp(max=1)
        if not is_scaled:
            _withhold(optimizer, withheld)
        self._record = StepRecord(
            trainer.global_step,
            self._image_ids,
            self._losses,
            self._terms,
            norm,
            withheld.to("cpu", non_blocking=True),
            torch.cuda.current_stream(withheld.device).record_event() if withheld.is_cuda else None,
        )
        self._image_ids, self._losses, self._terms = [], [], []

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Judges the last step before an evaluation."""
        self._judge(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Judges the last step of all."""
        self._judge(trainer)

    def _judge(self, trainer: Trainer) -> None:
        """Reports the recorded step if it was withheld, and stops the training where the policy says so."""
        record, self._record = self._record, None
        if record is None or not record.is_withheld():
            return
        self.num_withheld += 1
        folder = self.run_dir / "divergence"
        report = folder / f"step_{record.step}_rank{trainer.global_rank}.json"
        folder.mkdir(parents=True, exist_ok=True)
        report.write_text(json.dumps(self._describe(record), indent=1) + "\n")
        if self.policy == "skip" and self.num_withheld <= self.limit:
            logger.warning(
                "step %d was skipped, its loss or gradient is not finite (%d of %d allowed): see %s",
                *(record.step, self.num_withheld, self.limit, report),
            )
            return
        trainer.save_checkpoint(folder / f"step_{record.step}.ckpt")
        raise TrainingDiverged(
            f"loss and gradients must be finite, got others in step {record.step} "
            f"({self.num_withheld} such steps); see {report} and lower the learning rate, or set "
            "callbacks.divergence.policy=skip"
        )

    def _describe(self, record: StepRecord) -> dict[str, Any]:
        """Returns the report; numbers that are not finite become strings, which every JSON reader takes."""
        manifest = json.loads((self.run_dir / "manifest.json").read_text())
        return {
            "step": record.step,
            "image_ids": record.image_ids,
            "loss": [_json_number(loss) for loss in record.losses],
            "loss_terms": [{name: _json_number(term) for name, term in terms.items()} for terms in record.terms],
            "grad_norm": _json_number(record.grad_norm),
            "config": manifest["config"],
        }


def _withhold(optimizer: Optimizer, withheld: Tensor) -> None:
    """Makes the optimiser's coming step do nothing if `withheld`, a float32 scalar on its device, is 1."""
    if optimizer.defaults.get("fused"):
        optimizer.found_inf = withheld  # type: ignore[attr-defined]  # read by PyTorch's fused optimisers
    elif withheld.item():
        optimizer.zero_grad(set_to_none=True)


def _json_number(value: Tensor) -> float | str:
    number = value.item()
    return number if math.isfinite(number) else str(number)
