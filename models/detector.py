"""The LightningModule: a step, its logs and its optimiser."""

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.optim.optimizer import Optimizer

from models.accumulation import TargetWeighting
from models.callbacks import closes_log_window
from models.criterion import Criterion
from models.normalization import ImageNormalizer
from models.optimization import AdamWSettings, Schedule, build_scheduler, clip_gradients, measure_gradients
from models.postprocess import postprocess
from models.reduction import sum_over_processes
from models.structures import DetectorOutput, Targets


class Detector(pl.LightningModule):
    """Trains and evaluates a DETR-family model.

    A batch is the dict that `coco.collate` makes: `images` uint8 [B, 3, H, W], `padding_mask` bool [B, H, W],
    `labels` int64 [sum of T], `boxes_cxcywh` float32 [sum of T, 4], `num_targets`, `original_sizes_hw` int64 [B, 2]
    and `image_ids`.

    Args:
        model: Maps an ImageBatch, and in training the Targets that it may learn to denoise, to a DetectorOutput.
        criterion: Maps output and targets to the weighted loss and its terms.
        normalizer: Maps raw images to an ImageBatch on the device.
        optimizer: Settings of the optimiser and its parameter groups.
        schedule: Shape of the learning-rate curve.
        top_k: Detections kept for each image.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        criterion: Criterion,
        normalizer: ImageNormalizer,
        optimizer: AdamWSettings,
        schedule: Schedule,
        top_k: int,
    ) -> None:
        super().__init__()
        self.model = model
        self.criterion = criterion
        self.normalizer = normalizer
        self.optimizer_settings = optimizer
        self.schedule = schedule
        self.top_k = top_k
        self.loss_terms: dict[str, Tensor] = {}
        """Unweighted terms of the last training batch, for reports."""
        self.gradient_norm: Tensor | None = None
        """Norm of the gradients of the coming optimiser step where a callback has measured it, else None."""
        self._weighting = TargetWeighting()

    def forward(self, batch: dict[str, Any]) -> DetectorOutput:
        """Runs the model on a batch, without its targets."""
        return self.model(self.normalizer(batch["images"], batch["padding_mask"]))

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        """Returns the weighted loss; logs it and its terms where a log window closes."""
        targets = Targets(batch["labels"], batch["boxes_cxcywh"], batch["num_targets"])
        output = self.model(self.normalizer(batch["images"], batch["padding_mask"]), targets)
        losses = self.criterion(output, targets, self._mean_over_processes)
        self.loss_terms = losses.terms
        if closes_log_window(self.trainer, batch_idx):
            batch_size = len(batch["image_ids"])
            self.log("train/loss", losses.total, prog_bar=True, batch_size=batch_size)
            self.log_dict({f"train/{name}": value for name, value in losses.terms.items()}, batch_size=batch_size)
            for name in ("loss_ce", "loss_bbox", "loss_giou"):
                self.log(name, losses.terms[name], prog_bar=True, logger=False, batch_size=batch_size)
        if self.trainer.accumulate_grad_batches == 1:
            return losses.total
        count = torch.full((), float(sum(targets.counts)), device=losses.total.device)
        return self._weighting.weigh(losses.total, self._mean_over_processes(count))

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Any]:
        """Returns the images' ids and their detections in pixels of the original images."""
        detections = postprocess(self(batch), batch["original_sizes_hw"], self.top_k)
        return {"image_ids": batch["image_ids"], "detections": detections}

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """Builds the optimiser and a schedule that moves once an optimiser step."""
        optimizer = self.optimizer_settings.build(self.model)
        total_steps = int(self.trainer.estimated_stepping_batches)
        scheduler = build_scheduler(self.schedule, optimizer, total_steps, max(0, self.trainer.max_epochs or 0))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Averages accumulated gradients over the targets of all their batches."""
        if self.trainer.accumulate_grad_batches > 1:
            gradients = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
            self._weighting.average(gradients, self.trainer.accumulate_grad_batches)
            self.gradient_norm = None

    def configure_gradient_clipping(
        self, optimizer: Optimizer, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Clips the norm of all gradients together; Lightning's own clipping refuses fused optimisers.

        The norm is logged where a log window closes, or, of accumulated gradients, at each step.
        """
        measured, self.gradient_norm = self.gradient_norm, None
        if not gradient_clip_val:
            return
        model = self.trainer.strategy.model
        if isinstance(model, FullyShardedDataParallel):
            norm = model.clip_grad_norm_(gradient_clip_val)
        else:
            norm = measure_gradients(optimizer) if measured is None else measured
            clip_gradients(optimizer, gradient_clip_val, norm)
        if self.trainer.accumulate_grad_batches > 1 or closes_log_window(self.trainer, self.trainer.fit_loop.batch_idx):
            self.log("train/grad_norm", norm)

    def _mean_over_processes(self, value: Tensor) -> Tensor:
        if self.trainer.world_size == 1:
            return value
        return sum_over_processes(value) / self.trainer.world_size
