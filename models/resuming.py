"""Callbacks that make a resumed run equal to one that was never stopped, and save a run that is told to stop."""

import hashlib
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException

from models.csv_logger import AppendingCSVLogger


class StepSeeds(Callback):
    """Seeds PyTorch's generators before each training batch from the run's seed, the process and the batch.

    Dropout and the noise of denoising queries then follow from the place in the training alone: no generator has to be
    saved, whatever number of processes and whatever drew from them in between. A run that goes on leaves out rows of
    the CSV log that the stopped one wrote after its last checkpoint, for they come again.

    Args:
        seed: The run's seed.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Cuts the CSV log at the step that comes next."""
        for logger in trainer.loggers:
            if isinstance(logger, AppendingCSVLogger):
                logger.drop_from(trainer.global_step)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Seeds the generators of all devices."""
        place = f"{self.seed},{trainer.global_rank},{trainer.current_epoch},{batch_idx}"
        torch.manual_seed(int.from_bytes(hashlib.blake2b(place.encode(), digest_size=4).digest(), "little"))


class PreemptionCheckpoint(Callback):
    """Saves a checkpoint when the run is told to stop by SIGTERM, after the batch that it is at.

    Within a window of accumulated gradients, which no checkpoint holds, nothing is saved: the last checkpoint stands.

    Args:
        path: The file to save.
    """

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Saves; Lightning raises the exception in all processes at the same batch."""
        if isinstance(exception, SIGTERMException) and trainer.state.fn == "fit" and self._has_stepped(trainer):
            trainer.save_checkpoint(self.path)

    def _has_stepped(self, trainer: Trainer) -> bool:
        """Whether the last batch closed a window of accumulated gradients."""
        return (trainer.fit_loop.batch_idx + 1) % trainer.accumulate_grad_batches == 0 or trainer.is_last_batch
