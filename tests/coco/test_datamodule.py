import json
import multiprocessing
import os
import signal

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer

from coco.datamodule import CocoDataModule, SyntheticDataModule
from coco.errors import DataError
from coco.transforms import evaluation_transform, light_augmentation

SETTINGS = {
    "batch_size": 5,
    "eval_batch_size": 4,
    "num_workers": 0,
    "size_divisor": 1,
    "limit_train": None,
    "fraction": 1.0,
    "repeat_train": 1,
    "limit_val": None,
    "seed": 0,
    "train_transform": light_augmentation(sizes=(64,), max_size=64, flip_probability=0.5),
    "eval_transform": evaluation_transform(size=64, max_size=64),
}


@pytest.fixture
def build(synthetic_folder):
    """Builds a data module over the synthetic set by its paths, with some settings changed."""

    def build_with(**changes):
        paths = {
            "root": str(synthetic_folder),
            "train_json": "annotations/instances_train.json",
            "train_images": "train",
            "val_json": "annotations/instances_val.json",
            "val_images": "val",
        }
        return CocoDataModule(**{**paths, **SETTINGS, **changes})

    return build_with


def ids_of(loader):
    return [image_id for batch in loader for image_id in batch["image_ids"]]


def test_training_batches_are_full_and_shuffled_by_seed_and_epoch(build):
    loader = build().train_dataloader()
    first = ids_of(loader)
    assert len(first) == 20
    assert len(set(first)) == 20
    assert first != sorted(first)
    assert first == ids_of(build().train_dataloader())
    assert first != ids_of(build(seed=1).train_dataloader())
    loader.sampler.set_epoch(1)
    assert first != ids_of(loader)


def test_workers_leave_ctrl_c_to_the_training(build):
    loader = build(num_workers=1, batch_size=1).train_dataloader()
    batches = iter(loader)
    next(batches)
    for worker in multiprocessing.active_children():
        os.kill(worker.pid, signal.SIGINT)
    assert len(list(batches)) == len(loader) - 1


def test_workers_leave_signals_to_a_group_to_the_training(build):
    batches = iter(build(num_workers=1, batch_size=1).train_dataloader())
    next(batches)
    (worker,) = multiprocessing.active_children()
    assert os.getpgid(worker.pid) == worker.pid != os.getpgrp()


def test_categories_take_the_order_of_a_detector(build):
    data = build()
    before = data.category_rows
    data.order_categories([5, 4, 3, 2, 1, 0])
    assert data.category_rows == before[::-1]
    assert [category.name for category in data.categories] == [row["name"] for row in before[::-1]]


def test_validation_takes_every_image_in_order(build):
    assert ids_of(build().val_dataloader()) == [1, 2, 3, 4, 5, 6, 7]
    assert ids_of(build(limit_val=3).val_dataloader()) == [1, 2, 3]


def test_a_fraction_is_taken_of_the_training_images_alone(build):
    part, tenth = build(fraction=0.5, batch_size=1), build(fraction=0.1, batch_size=1)
    chosen = set(part.train_dataset._image_ids.tolist())
    assert 0 < len(chosen) < 24
    assert set(tenth.train_dataset._image_ids.tolist()) <= chosen
    assert len(part.val_dataset) == 7
    with pytest.raises(DataError, match="batch_size must be at most the number of training images"):
        build(fraction=1e-9).train_dataloader()


def test_limit_train_takes_the_first_images(build):
    assert sorted(ids_of(build(limit_train=5).train_dataloader())) == [1, 2, 3, 4, 5]


def test_repeat_train_goes_over_the_images_again(build):
    assert sorted(ids_of(build(limit_train=2, repeat_train=5).train_dataloader())) == [1] * 5 + [2] * 5


def test_workers_give_the_same_images(build):
    torch.manual_seed(0)
    expected = ids_of(build().train_dataloader())
    assert ids_of(build(num_workers=1).train_dataloader()) == expected


def test_pixels_depend_on_neither_workers_nor_earlier_draws(build):
    torch.manual_seed(0)
    expected = list(build().train_dataloader())
    torch.manual_seed(1)
    for loader in (build().train_dataloader(), build(num_workers=2).train_dataloader()):
        for batch, other in zip(loader, expected, strict=True):
            assert torch.equal(batch["images"], other["images"])
            assert torch.equal(batch["boxes_cxcywh"], other["boxes_cxcywh"])
    others = build(seed=1).train_dataloader()
    assert not all(torch.equal(a["images"], b["images"]) for a, b in zip(others, expected, strict=True))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_loader_goes_on_within_an_epoch(build, num_workers):
    expected = list(build(batch_size=3).train_dataloader())
    resumed = build(batch_size=3, num_workers=num_workers).train_dataloader()
    done = [5, 0]
    resumed.num_done = lambda: done.pop(0)
    rest = list(resumed)
    assert len(resumed) == len(expected) == 8
    assert [batch["image_ids"] for batch in rest] == [batch["image_ids"] for batch in expected[5:]]
    assert all(torch.equal(a["images"], b["images"]) for a, b in zip(rest, expected[5:], strict=True))
    assert len(list(resumed)) == 8


def test_an_image_is_augmented_anew_in_each_epoch(build):
    loader = build(limit_train=1, batch_size=1, repeat_train=12).train_dataloader()
    views = {batch["images"].numpy().tobytes() for batch in loader}
    assert len(views) == 2  # flipped or not


def test_size_divisor_reaches_the_batches(build):
    batch = next(iter(build(size_divisor=48).val_dataloader()))
    assert batch["images"].shape[-2:] == (96, 96)


def test_absolute_paths_need_no_root(build, synthetic_folder):
    data = build(
        root=".",
        **{
            name: str(synthetic_folder / path)
            for name, path in (
                ("train_json", "annotations/instances_train.json"),
                ("train_images", "train"),
                ("val_json", "annotations/instances_val.json"),
                ("val_images", "val"),
            )
        },
    )
    data.check()
    assert data.num_classes == 6


def test_absent_paths_are_all_named(build):
    with pytest.raises(ValueError, match=r"got no .*nowhere\.json, .*nothing; set data\.root"):
        build(train_json="nowhere.json", val_images="nothing").check()
    build().check()


def test_a_batch_larger_than_the_data_is_refused(build):
    with pytest.raises(ValueError, match=r"batch_size must be at most .* got 25 with 24 images"):
        build(batch_size=25).train_dataloader()


def test_categories_must_agree(build, write_json, content):
    with pytest.raises(ValueError, match="categories must be the same"):
        build(train_json=str(write_json(content))).train_dataloader()


@pytest.mark.parametrize("split", ["train", "val"])
def test_faults_of_both_splits_are_told_before_the_first_step(build, synthetic_folder, write_json, split):
    content = json.loads((synthetic_folder / "annotations" / f"instances_{split}.json").read_text())
    content["annotations"][0]["bbox"] = None
    faulty = {f"{split}_json": str(write_json(content))}
    with pytest.raises(DataError, match="bbox must be four finite numbers"):
        build(**faulty).setup("fit")
    build().setup("fit")
    if split == "train":
        build(**faulty).setup("validate")


def test_synthetic_data_is_drawn_by_prepare_data_and_known_before(tmp_path):
    data = SyntheticDataModule(
        cache_dir=str(tmp_path), num_train=6, num_val=3, image_size=48, data_seed=0, **{**SETTINGS, "batch_size": 2}
    )
    data.check()
    assert data.num_classes == 6
    assert not any(tmp_path.iterdir())
    data.prepare_data()
    assert len(data.train_dataset) == 6
    assert [c.id for c in data.categories] == sorted(data.val_annotations.cats)
    assert ids_of(data.val_dataloader()) == [1, 2, 3]


class Recorder(LightningModule):
    """Records the image ids of each training epoch."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.epochs = []

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_train_epoch_start(self):
        self.epochs.append([])

    def training_step(self, batch, batch_idx):
        assert sum(batch["num_targets"]) == len(batch["labels"])
        self.epochs[-1].extend(batch["image_ids"])
        return self.weight * batch["images"].float().mean()


def test_lightning_shuffles_anew_in_each_epoch(build, tmp_path):
    module = Recorder()
    Trainer(
        accelerator="cpu",
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        default_root_dir=tmp_path,
    ).fit(module, build())
    first, second = module.epochs
    assert len(first) == 20
    assert first != second
