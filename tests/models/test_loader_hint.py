import logging
import time

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from models.callbacks import LoaderHint


class Waiting:
    """Eight items, each after a while."""

    def __init__(self, seconds):
        self.seconds = seconds

    def __len__(self):
        return 8

    def __getitem__(self, index):
        time.sleep(self.seconds)
        return torch.ones(1)


class Stepping(pl.LightningModule):
    """Takes 40 ms a step."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def training_step(self, batch, batch_idx):
        time.sleep(0.04)
        return self.layer(batch).sum()


@pytest.mark.parametrize(("seconds", "num_warnings"), [(0.08, 1), (0.0, 0)])
def test_a_slow_loader_is_told_of_once(seconds, num_warnings, caplog, tmp_path):
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=1,
        log_every_n_steps=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        callbacks=[LoaderHint(num_workers=0, largest_share=0.3)],
    )
    with caplog.at_level(logging.WARNING, logger="models.callbacks"):
        trainer.fit(Stepping(), DataLoader(Waiting(seconds)))
    found = [record for record in caplog.records if "data.num_workers=0" in record.getMessage()]
    assert len(found) == num_warnings
