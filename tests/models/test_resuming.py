"""Signals of a cluster; equality of stopped and whole runs is in tests/test_resuming.py."""

import os
import signal
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.utils.data import DataLoader

from models.resuming import PreemptionCheckpoint, StepSeeds


class Signalled(pl.LightningModule):
    """Sends a signal to its own process in one batch, and notes a random number in each."""

    def __init__(self, number, at_batch):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.number = number
        self.at_batch = at_batch
        self.drawn = []

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def training_step(self, batch, batch_idx):
        self.drawn.append(torch.rand(()).item())
        if batch_idx == self.at_batch:
            os.kill(os.getpid(), self.number)
        return self.layer(batch).sum()


def fit(module, folder, **settings):
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[PreemptionCheckpoint(str(folder / "last.ckpt")), StepSeeds(seed=1)],
        **settings,
    )
    trainer.fit(module, DataLoader(torch.ones(6, 1)))


@pytest.mark.parametrize(("at_batch", "is_saved"), [(3, True), (2, False)])
def test_sigterm_saves_where_no_gradient_is_lost(tmp_path, at_batch, is_saved):
    with pytest.raises(SIGTERMException):
        fit(Signalled(signal.SIGTERM, at_batch), tmp_path, accumulate_grad_batches=2)
    assert (tmp_path / "last.ckpt").is_file() == is_saved
    if is_saved:
        assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 2


def test_slurm_s_signal_saves_and_requeues(tmp_path, monkeypatch):
    for name, value in {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    command = tmp_path / "scontrol"
    command.write_text(f"#!/bin/sh\necho $@ > {tmp_path / 'asked'}\n")
    command.chmod(0o755)
    fit(Signalled(signal.SIGUSR1, 2), tmp_path, plugins=[SLURMEnvironment(auto_requeue=True)])
    assert (tmp_path / "asked").read_text() == "requeue 77\n"
    assert [path.name for path in Path(tmp_path).glob("hpc_ckpt_*.ckpt")] == ["hpc_ckpt_1.ckpt"]


def test_random_numbers_follow_from_the_place_alone(tmp_path):
    first, second = Signalled(0, 2), Signalled(0, 5)
    fit(first, tmp_path)
    torch.rand(7)
    fit(second, tmp_path)
    assert first.drawn == second.drawn
    assert len(set(first.drawn)) == 6
