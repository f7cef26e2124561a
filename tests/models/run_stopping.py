"""Trains on two processes of which one hears a signal, several times, and saves how each training ended in each.

Usage: python run_stopping.py <folder>, which gets `rank_0.json`, `rank_1.json` and what a stop saves.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor
from torch.utils.data import DataLoader

from models.processes import SharedFate
from models.resuming import StopCheckpoint, has_heard_sigterm, stopping_signal

NUM_BATCHES = 10  # of a process


class Signalled(pl.LightningModule):
    """Sends a signal to one of the processes, from itself, in one batch."""

    def __init__(self, number: signal.Signals, rank: int, at_batch: int) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.number, self.rank, self.at_batch = number, rank, at_batch

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if (self.global_rank, batch_idx) == (self.rank, self.at_batch):
            os.kill(os.getpid(), self.number)
        return self.layer(batch).sum()


def train(folder: Path, number: signal.Signals, *, rank: int, at_batch: int, accumulate: int = 1) -> dict[str, Any]:
    """Trains until the signal is obeyed, or to the end, and returns the state of this process."""
    path = folder / f"{number.name}_{rank}_{at_batch}.ckpt"
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(),
        max_epochs=1,
        accumulate_grad_batches=accumulate,
        callbacks=[StopCheckpoint(str(path))],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    stopped_by = 0
    with patch("torch.distributed.broadcast", wraps=torch.distributed.broadcast) as broadcast, SharedFate(trainer):
        try:
            trainer.fit(Signalled(number, rank, at_batch), DataLoader(torch.ones(2 * NUM_BATCHES, 1)))
        except SIGTERMException:
            stopped_by = stopping_signal(trainer)
    saved = torch.load(path, weights_only=True)["global_step"] if path.exists() else None
    return {
        "stopped_by": stopped_by,
        "step": trainer.global_step,
        "saved": saved,
        "heard_sigterm": has_heard_sigterm(trainer),
        "asked_gpu": broadcast.call_count,
        "watched": sum(len(launcher.procs) for launcher in SharedFate._launchers),  # processes, by Lightning
    }


def main(folder: Path) -> None:
    """Trains in every way; the first training starts the second process, which runs this file too."""
    torch.set_num_threads(1)
    results = {
        "last": train(folder, signal.SIGTERM, rank=1, at_batch=NUM_BATCHES - 1),
        "late": train(folder, signal.SIGINT, rank=1, at_batch=NUM_BATCHES - 2),
        "one": train(folder, signal.SIGTERM, rank=1, at_batch=3),
        "starter": train(folder, signal.SIGTERM, rank=0, at_batch=3),
        "window": train(folder, signal.SIGTERM, rank=1, at_batch=2, accumulate=2),
        "interrupt": train(folder, signal.SIGINT, rank=1, at_batch=3),
    }
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    (folder / f"rank_{rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
