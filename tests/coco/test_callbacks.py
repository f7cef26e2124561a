import csv
import json
from dataclasses import dataclass

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from PIL import Image

from coco.callbacks import CocoEvaluation


@dataclass(frozen=True)
class FakeDetections:
    scores: torch.Tensor
    labels: torch.Tensor
    boxes_xyxy: torch.Tensor


class Oracle(LightningModule):
    """Returns the ground truth, from the given epoch on; before, boxes of no size."""

    def __init__(self, good_from_epoch):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.good_from_epoch = good_from_epoch

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def training_step(self, batch, batch_idx):
        return self.weight * batch["images"].float().mean()

    def validation_step(self, batch, batch_idx):
        num_images, slots = len(batch["image_ids"]), 12
        scores, labels = torch.zeros(num_images, slots), torch.zeros(num_images, slots, dtype=torch.int64)
        boxes_xyxy = torch.zeros(num_images, slots, 4)
        first = 0
        for row, count in enumerate(batch["num_targets"]):
            centre, extent = batch["boxes_cxcywh"][first : first + count].chunk(2, dim=1)
            height, width = batch["original_sizes_hw"][row].tolist()
            scores[row, :count], labels[row, :count] = 0.9, batch["labels"][first : first + count]
            corners = torch.cat([centre - extent / 2, centre + extent / 2], dim=1)
            if self.trainer.current_epoch >= self.good_from_epoch:
                boxes_xyxy[row, :count] = corners * torch.tensor([width, height, width, height])
            first += count
        return {"image_ids": batch["image_ids"], "detections": FakeDetections(scores, labels, boxes_xyxy)}


def make_trainer(folder, callbacks, **settings):
    return Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=callbacks,
        **settings,
    )


def test_training_logs_prints_and_writes(data, tmp_path, capsys):
    run_dir = tmp_path / "run"
    best = ModelCheckpoint(dirpath=tmp_path / "checkpoints", monitor="val/AP", mode="max", filename="{epoch}")
    trainer = make_trainer(tmp_path, [CocoEvaluation(run_dir=str(run_dir)), best], max_epochs=2)
    trainer.fit(Oracle(good_from_epoch=1), data)

    assert trainer.callback_metrics["val/AP"] == pytest.approx(1)
    assert {f"val/{name}" for name in ("AP", "AP50", "AP75", "APs", "APm", "APl")} <= trainer.callback_metrics.keys()
    assert best.best_model_path.endswith("epoch=1.ckpt")
    printed = capsys.readouterr().out
    assert "Validation, epoch 0, 7 images" in printed
    assert "100.0" in printed

    with (run_dir / "per_class_ap.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["epoch"], row["step"]) for row in rows] == [("0", "1")] * 6 + [("1", "2")] * 6
    assert {row["name"] for row in rows} == {"disc", "square", "triangle", "star", "cross", "ring"}
    assert {row["AP"] for row in rows[:6] if row["num_boxes"] != "0"} == {"0.0000"}
    assert {row["AP"] for row in rows[6:] if row["num_boxes"] != "0"} == {"1.0000"}

    for epoch in (0, 1):
        with Image.open(run_dir / "predictions" / f"epoch_00{epoch}.jpg") as grid:
            assert grid.width > 1000
    results = json.loads((run_dir / "detections_val.json").read_text())
    assert {entry["image_id"] for entry in results} == set(range(1, 8))
    assert {entry["category_id"] for entry in results} <= {1, 2, 5, 7, 10, 20}


def test_the_sanity_check_does_not_count(data, tmp_path):
    run_dir = tmp_path / "run"
    trainer = make_trainer(
        tmp_path,
        [CocoEvaluation(run_dir=str(run_dir))],
        max_epochs=1,
        num_sanity_val_steps=2,
        check_val_every_n_epoch=5,
        enable_checkpointing=False,
    )
    trainer.fit(Oracle(good_from_epoch=0), data)
    assert "val/AP" not in trainer.callback_metrics
    assert not run_dir.exists()


def test_part_of_the_images_can_be_evaluated(data, tmp_path, capsys):
    trainer = make_trainer(tmp_path, [CocoEvaluation(run_dir=str(tmp_path))], limit_val_batches=1)
    trainer.validate(Oracle(good_from_epoch=0), data, verbose=False)
    assert "3 images" in capsys.readouterr().out
    assert trainer.callback_metrics["val/AP"] == pytest.approx(1)


def test_another_data_module_is_refused(data, tmp_path):
    trainer = make_trainer(tmp_path, [CocoEvaluation(run_dir=str(tmp_path))])
    with pytest.raises(ValueError, match="datamodule must be a CocoDataModule, got NoneType"):
        trainer.validate(Oracle(good_from_epoch=0), data.val_dataloader(), verbose=False)
