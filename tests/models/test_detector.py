import json
import math

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from models import optimization
from models.callbacks import ProgressBar, RunManifest, RunSummary, Throughput
from models.detector import Detector
from models.divergence import DivergenceGuard
from models.normalization import ImageNormalizer
from models.optimization import AdamWSettings, StepSchedule

CONFIG = {"seed": 0, "data": {"root": "/home/someone/coco", "train_images": "train"}}


def batch_of(counts, seed=0):
    generator = torch.Generator().manual_seed(seed)
    total = sum(counts)
    padding_mask = torch.zeros(len(counts), 64, 64, dtype=torch.bool)
    padding_mask[-1, :, 48:] = True
    return {
        "images": torch.randint(0, 256, (len(counts), 3, 64, 64), dtype=torch.uint8, generator=generator),
        "padding_mask": padding_mask,
        "labels": torch.randint(0, 3, (total,), generator=generator),
        "boxes_cxcywh": torch.rand(total, 4, generator=generator) * 0.4 + 0.3,
        "num_targets": counts,
        "sizes_hw": ((64, 64),) * len(counts),
        "original_sizes_hw": torch.tensor([[128, 256]] * len(counts)),
        "image_ids": tuple(range(len(counts))),
    }


@pytest.fixture
def detector(make_detector, criterion):
    """A tiny two-stage detector with its training settings."""
    return build(make_detector(box_refine=True, two_stage=True), criterion)


def build(model, criterion):
    return Detector(
        model=model,
        criterion=criterion,
        normalizer=ImageNormalizer(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225]),
        optimizer=AdamWSettings(
            lr=1e-3,
            backbone_lr=1e-3,
            slow_factor=0.1,
            slow_modules=("sampling_offsets",),
            backbone_prefix="backbone",
            weight_decay=1e-4,
            fused=True,
        ),
        schedule=StepSchedule(milestones=(1,), gamma=0.1, warmup_steps=0),
        top_k=10,
    )


def fit(detector, run_dir, batches, **settings):
    callbacks = [Throughput(), ProgressBar(refresh_rate=1), RunManifest(str(run_dir), CONFIG, [])]
    callbacks.append(RunSummary(str(run_dir), str(run_dir / "summary.json")))
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=2,
        gradient_clip_val=0.1,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        callbacks=callbacks,
        **settings,
    )
    trainer.fit(detector, DataLoader(batches, batch_size=None))
    return trainer


def test_training_moves_every_trainable_parameter_and_logs(detector, tmp_path):
    before = {name: parameter.detach().clone() for name, parameter in detector.model.named_parameters()}
    trainer = fit(detector, tmp_path, [batch_of((2, 0)), batch_of((1, 3), seed=1)], log_every_n_steps=2)
    still = [name for name, value in detector.model.named_parameters() if torch.equal(value, before[name])]
    assert still == []
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["manifest"]["config"] == {"seed": 0, "data": {"root": "coco", "train_images": "train"}}
    assert json.loads((tmp_path / "manifest.json").read_text())["config"] == CONFIG
    logged = trainer.callback_metrics
    assert {"train/loss", "train/loss_ce", "train/loss_giou_enc", "train/grad_norm", "train/img_per_s"} <= set(logged)
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(1e-4)


def test_dino_learns_from_noised_targets_and_is_evaluated_without(make_dino, criterion, tmp_path):
    model = make_dino()
    trainer = fit(build(model, criterion), tmp_path, [batch_of((0, 0)), batch_of((2, 0))], log_every_n_steps=2)
    logged = trainer.callback_metrics
    assert {"train/loss_ce_dn", "train/loss_giou_dn_1", "train/loss_bbox_enc"} <= set(logged)
    assert logged["train/loss_bbox_dn"] > 0
    detector = build(model.eval(), criterion)
    with torch.no_grad():
        result = detector.validation_step(batch_of((1, 2)), 0)
    assert result["detections"].boxes_xyxy.shape == (2, 10, 4)


@pytest.mark.parametrize(("guarded", "accumulated"), [(False, 1), (True, 1), (True, 2)])
def test_gradients_are_clipped_to_the_norm(detector, tmp_path, monkeypatch, guarded, accumulated):
    norms, measured = [], []
    measure = optimization.measure_gradients
    monkeypatch.setattr("models.detector.measure_gradients", lambda optimizer: measured.append(1) or measure(optimizer))

    class Recorder(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            grads = [parameter.grad for parameter in pl_module.parameters() if parameter.grad is not None]
            norms.append(torch.nn.utils.get_total_norm(grads).item())

    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=1,
        gradient_clip_val=0.1,
        logger=False,
        enable_checkpointing=False,
        accumulate_grad_batches=accumulated,
        callbacks=[Recorder(), *([DivergenceGuard(policy="stop", limit=0, run_dir=str(tmp_path))] if guarded else [])],
    )
    trainer.fit(detector, DataLoader([batch_of((2, 1)), batch_of((1, 1), seed=1)][:accumulated], batch_size=None))
    assert norms[-1] == pytest.approx(0.1, rel=1e-3)
    # The guard has measured them already, unless they are averaged after that.
    assert len(measured) == (0 if guarded and accumulated == 1 else 1)


def test_the_norm_is_logged_where_a_window_closes(detector, tmp_path):
    logged = []

    class Recorder(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            logged.append(float(trainer.callback_metrics.get("train/grad_norm", math.nan)))

    batches = [batch_of((2, 1), seed=seed) for seed in range(5)]
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=1,
        log_every_n_steps=2,
        gradient_clip_val=0.1,
        logger=False,
        enable_checkpointing=False,
        callbacks=[Recorder()],
    )
    trainer.fit(detector, DataLoader(batches, batch_size=None))
    assert math.isnan(logged[0])
    assert logged[1] == logged[2] != logged[3] != logged[4] > 0


def test_validation_returns_detections_in_pixels_of_the_original_image(detector):
    detector.eval()
    with torch.no_grad():
        result = detector.validation_step(batch_of((1, 2)), 0)
    boxes = result["detections"].boxes_xyxy
    assert result["image_ids"] == (0, 1)
    assert boxes.shape == (2, 10, 4)
    assert boxes[..., [0, 2]].max() > 128  # wider than high: x reaches beyond the height of 128 pixels


def test_a_run_without_a_closed_log_window_still_has_a_summary(detector, tmp_path):
    fit(detector, tmp_path, [batch_of((1, 1))] * 3, log_every_n_steps=10, max_steps=1)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["steps"] == 1
    assert math.isnan(summary["loss_last"])
    assert summary["manifest"]["config"]["seed"] == 0
