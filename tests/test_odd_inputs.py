"""Data as users have it trains and evaluates, or is refused in one line."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf
from PIL import Image

import train
from coco.errors import DataError

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
SETTINGS = [
    "data=coco",
    "data/augmentation@data.train_transform=light",
    "model=deformable_detr_tiny",
    "backbone=resnet18",
    "backbone.weights=none",
    "backbone.norm=group",
    "schedule=cosine",
    "trainer=cpu",
    "logger=csv",
    "callbacks.progress=null",
    "trainer.max_epochs=1",
    "trainer.limit_train_batches=3",
    "trainer.limit_val_batches=2",
    "trainer.num_sanity_val_steps=0",
    "data.batch_size=3",
    "data.num_workers=0",
    "data.eval_transform.size=64",
    "data.eval_transform.max_size=128",
]


def fit(run_dir, root, *overrides):
    """Trains a few steps, evaluates, and returns the trainer."""
    torch.set_num_threads(1)
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        cfg = compose("train", overrides=[*SETTINGS, f"data.root={root}", *overrides], return_hydra_config=True)
    HydraConfig.instance().set_config(cfg)
    OmegaConf.set_struct(cfg, False)
    cfg.pop("hydra")
    OmegaConf.set_struct(cfg, True)
    cfg.run_dir = str(run_dir)
    detector, datamodule, trainer = train.build(cfg)
    trainer.fit(detector, datamodule)
    return trainer


def folder_of(variable):
    if variable not in os.environ:
        pytest.skip(f"needs {variable}")
    return Path(os.environ[variable])


def write_dataset(folder, sources):
    """Copies images and annotates a box on each of them."""
    folder.mkdir()
    images, annotations = [], []
    for number, source in enumerate(sources, start=1):
        shutil.copy(source, folder)
        with Image.open(source) as image:
            size = {"height": image.height, "width": image.width}
        images.append({"id": number, "file_name": source.name, **size})
        box = [0, 0, max(1, image.width // 2), max(1, image.height // 2)]
        annotations.append({"id": number, "image_id": number, "category_id": 7, "bbox": box})
    content = {"categories": [{"id": 7, "name": "thing"}], "images": images, "annotations": annotations}
    (folder / "instances.json").write_text(json.dumps(content))
    return [
        "data.train_json=instances.json",
        "data.val_json=instances.json",
        "data.train_images=.",
        "data.val_images=.",
    ]


def test_odd_images_train_and_evaluate_and_a_truncated_one_is_named(tmp_path):
    folder = folder_of("ODD_INPUTS_DIR") / "images"
    readable = [path for path in sorted(folder.iterdir()) if path.name not in ("broken.png", "truncated_jpeg.jpg")]
    assert len(readable) == 9
    words = write_dataset(tmp_path / "data", readable)
    trainer = fit(tmp_path / "run", tmp_path / "data", *words)
    assert trainer.global_step == 3
    assert torch.isfinite(trainer.callback_metrics["train/loss"])

    words = write_dataset(tmp_path / "cut", [readable[0], readable[1], folder / "truncated_jpeg.jpg"])
    with pytest.raises(DataError, match=r"must be readable, got .*truncated_jpeg\.jpg") as caught:
        fit(tmp_path / "second", tmp_path / "cut", *words, "data.num_workers=1", "data.batch_size=1")
    assert "\n" not in str(caught.value)


def test_another_data_set_trains_and_evaluates(tmp_path):
    names = {"train": "instances_train.json", "val": "instances_val.json"}
    words = [f"data.{split}_json={name}" for split, name in names.items()]
    words += ["data.train_images=images", "data.val_images=images"]
    trainer = fit(tmp_path, folder_of("BCCD_DIR"), *words)
    assert trainer.global_step == 3
    assert "val/AP" in trainer.callback_metrics
