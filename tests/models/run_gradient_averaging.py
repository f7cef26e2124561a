"""Trains a small network on two processes in several ways and saves what each process ends with.

Usage: python run_gradient_averaging.py <folder>, which gets `rank_0.pt` and `rank_1.pt`.
"""

import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from test_cuda_graphs import EagerPass  # beside this file, which is run as a script
from torch import Tensor, nn
from torch.utils.data import DataLoader

from models import gradient_averaging
from models.cuda_graphs import TrainingGraphs
from models.gradient_averaging import GradientAveragingStrategy

NUM_BATCHES = 6


class Network(pl.LightningModule):
    """A network whose weights and data differ between processes until they are exchanged.

    Args:
        rank: of the process.
        graphs: whether features come from captured passes, by the stand-in for CUDA.
        unused_at: batch of process 1 for which the loss does not depend on `head`, if any.
        huge_at: batch of process 1 whose gradients overflow, if any.
    """

    def __init__(
        self, rank: int, graphs: bool = False, unused_at: int | None = None, huge_at: int | None = None
    ) -> None:
        super().__init__()
        torch.manual_seed(rank)
        self.rank, self.unused_at, self.huge_at = rank, unused_at, huge_at
        self.convolution = nn.Conv2d(2, 3, 2, bias=False).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(3)
        self.frozen = nn.Parameter(torch.randn(2), requires_grad=False)
        self.head = nn.Linear(3, 2)
        self.graphs = TrainingGraphs(enabled=graphs, max_sizes=2, make_capture=lambda device: EagerPass)

    def compute_features(self, inputs: tuple[Tensor]) -> tuple[Tensor]:
        return (self.norm(self.convolution(inputs[0])).relu().mean((2, 3)),)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        (features,) = self.graphs.run(self, self.compute_features, (batch,))
        if self.rank == 1 and batch_idx == self.unused_at:
            return features.square().mean()
        loss = (self.head(features) * self.frozen).square().mean()
        return loss * 1e38 * 10 if self.rank == 1 and batch_idx == self.huge_at else loss

    def train_dataloader(self) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(100 + self.rank)
        batches = [
            torch.randn(2 + (self.rank + number) % 2, 2, 5, 4, generator=generator) for number in range(NUM_BATCHES)
        ]
        return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]  # a list is a data set

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.1)


class Norms(Callback):
    """Notes the norm of the gradients that a step is about to take."""

    def __init__(self) -> None:
        self.found: list[Tensor] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.found.append(nn.utils.get_total_norm([p.grad for p in pl_module.parameters() if p.grad is not None]))


def train(
    rank: int,
    strategy: DDPStrategy,
    *,
    leaves_out: bool = False,
    accumulate: int = 1,
    scaler: torch.amp.GradScaler | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Trains for an epoch.

    Args:
        rank: of the process.
        strategy: of the trainer.
        leaves_out: whether gradients are not averaged.
        accumulate: batches a step.
        scaler: of the loss, if any.
        **settings: of the network.

    Returns:
        Weights and statistics, what steps and exchanges there were, and the message of the error that ended it, if any.
    """
    network, norms = Network(rank, **settings), Norms()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=1,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=0.5,
        plugins=[] if scaler is None else [MixedPrecision("16-mixed", "cpu", scaler)],
        callbacks=[norms],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    message = None
    operation = (lambda tensor: None) if leaves_out else gradient_averaging._average
    with patch.object(gradient_averaging, "_average", side_effect=operation) as average:
        try:
            trainer.fit(network)
        except RuntimeError as error:
            message = str(error)
    return {
        "state": network.state_dict(),
        "norms": torch.stack(norms.found),
        "steps": trainer.global_step,
        "exchanged": [call.args[0].numel() for call in average.call_args_list],
        "scale": None if scaler is None else scaler.get_scale(),
        "captures": network.graphs.captures,
        "message": message,
    }


def scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=2.0**10)


def main(folder: Path) -> None:
    """Trains in every way; the first training starts the second process, which runs this file too."""
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    torch.set_num_threads(1)
    results = {
        "ddp": train(rank, DDPStrategy(gradient_as_bucket_view=True), accumulate=2),
        "averaged": train(rank, GradientAveragingStrategy(), accumulate=2),
        "graphs": train(rank, GradientAveragingStrategy(), accumulate=2, graphs=True),
        "left_out": train(rank, GradientAveragingStrategy(), accumulate=2, leaves_out=True),
        "scaled_ddp": train(rank, DDPStrategy(), scaler=scaler(), huge_at=2),
        "scaled": train(rank, GradientAveragingStrategy(), scaler=scaler(), huge_at=2),
        "absent": train(rank, GradientAveragingStrategy(), unused_at=2),
        "absent_at_last": train(rank, GradientAveragingStrategy(), unused_at=NUM_BATCHES - 1),
    }
    torch.save(results, folder / f"rank_{rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
