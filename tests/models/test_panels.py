"""The panels of a run say what runs, how long it takes and what came out, and only the first process speaks."""

import sys

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from models.panels import RunPanels, _counted, _duration


class Stepping(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = torch.nn.Linear(1, 1)
        self.model.bias.requires_grad_(False)

    def configure_optimizers(self):
        return torch.optim.SGD(self.model.parameters(), lr=0.1)

    def training_step(self, batch, batch_idx):
        return self.model(batch).sum()

    def validation_step(self, batch, batch_idx):
        self.log("val/AP", 0.1234)
        self.log("val/APl", float("nan"))


def run(tmp_path, monkeypatch, capsys, validate=False, ckpt_path=None, **settings):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        log_every_n_steps=3,
        callbacks=[RunPanels(str(tmp_path / "run"), backbone="resnet18", op="auto", precision="32-true")],
        **settings,
    )
    loader = DataLoader(torch.ones(12, 1), batch_size=2)
    if validate:
        trainer.validate(Stepping(), loader, verbose=False)
    else:
        trainer.fit(Stepping(), loader, DataLoader(torch.ones(4, 1)), ckpt_path=ckpt_path)
    return capsys.readouterr().out


def test_a_training_is_described_estimated_and_summed_up(tmp_path, monkeypatch, capsys):
    for name in ("best", "last"):
        path = tmp_path / "run" / "checkpoints" / f"{name}.ckpt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    monkeypatch.setattr(sys, "argv", ["train.py", "trainer.max_epochs=2", "model.weights=old.pth", "a=b"])
    words = " ".join(run(tmp_path, monkeypatch, capsys, accumulate_grad_batches=2).split())
    for expected in (
        "model Linear on resnet18",
        "parameters 0.0 M, 0.0 M of them train",
        "op auto: reference",
        "precision 32-true",
        "device 1 x cpu",
        "training 12 images an epoch, 2 epochs, 6 steps",
        "batch 2 images x 2 batches = 4 images a step",
        "validation 4 images",
        "run folder run",
        "of training to go",
        "steps 6 in",
        "AP AP 12.3",
        "checkpoints/best.ckpt weights of the best AP",
        "predict: python -m scripts.predict IMAGES --model run/checkpoints/best.ckpt",
        "export: python -m scripts.export ckpt=run/checkpoints/best.ckpt format=onnx out=detector",
        "train on: python train.py a=b ckpt_path=run/checkpoints/last.ckpt trainer.max_epochs=4",
    ):
        assert expected in words
    assert words.count("of training to go") == 1
    assert "APl" not in words
    assert "summary.json" not in words


def test_slow_steps_are_estimated_before_a_log_window_closes(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("models.panels.closes_log_window", lambda trainer, batch_idx: False)
    assert "of training to go" not in run(tmp_path, monkeypatch, capsys)
    monkeypatch.setattr("models.panels.ESTIMATE_AFTER_S", 0.0)
    assert run(tmp_path, monkeypatch, capsys).count("of training to go") == 1


def test_a_resumed_training_counts_its_own_steps(tmp_path, monkeypatch, capsys):
    path = tmp_path / "half.ckpt"
    settings = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(max_epochs=1, enable_checkpointing=False, **settings)
    trainer.fit(Stepping(), DataLoader(torch.ones(12, 1), batch_size=2))
    trainer.save_checkpoint(path)
    words = " ".join(run(tmp_path, monkeypatch, capsys, ckpt_path=path).split())
    assert "resumed after 6 steps" in words
    assert "steps 12, 6 of them in" in words


def test_a_validation_has_panels_of_its_own(tmp_path, monkeypatch, capsys):
    words = " ".join(run(tmp_path, monkeypatch, capsys, validate=True).split())
    assert "validation 12 images" in words
    assert "AP AP 12.3" in words
    assert "training" not in words


def test_other_processes_are_silent(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("lightning.pytorch.utilities.rank_zero_only.rank", 1)
    assert "Linear on resnet18" not in run(tmp_path, monkeypatch, capsys)


@pytest.mark.parametrize(
    ("seconds", "words"), [(3.4, "3 s"), (89, "89 s"), (600, "10 min"), (5400, "1 h 30 min"), (90000, "25 h 00 min")]
)
def test_times_in_words(seconds, words):
    assert _duration(seconds) == words


def test_one_thing_is_no_plural():
    assert (_counted(1, "epoch"), _counted(0, "step"), _counted(2, "thread")) == ("1 epoch", "0 steps", "2 threads")
