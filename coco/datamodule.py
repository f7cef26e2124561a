"""Lightning data modules: any data set in COCO's format, and the synthetic one."""

import os
import signal
from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from pycocotools.coco import COCO
from torch.utils.data import DataLoader

from coco.annotations import AnnotationTable, Category, index_table, read_categories, read_table
from coco.collate import Batch, collate
from coco.dataset import CocoDataset, Sample, Transform
from coco.doctor import require_files
from coco.errors import DataError
from coco.fractions import take_fraction
from coco.sampling import Draws, DrawSampler, TrainingLoader
from coco.shapes import SHAPES
from coco.synthetic import CATEGORY_IDS, SyntheticSpec, write_synthetic_dataset


class CocoDataModule(LightningDataModule):
    """Training and validation data from two annotation files in COCO's format.

    Args:
        root: Folder from which relative paths start.
        train_json: Annotations to train on.
        train_images: Folder of the training images.
        val_json: Annotations to validate on; its categories must be those of `train_json`.
        val_images: Folder of the validation images.
        train_transform: Augmentation of training images.
        eval_transform: Preparation of validation images.
        batch_size: Training images in a batch of one process.
        eval_batch_size: Validation images in a batch of one process.
        num_workers: Loader processes of one training process; 0 loads in the training process itself.
        size_divisor: Batches are padded to multiples of it; 1 pads no more than needed.
        limit_train: Train on the first so many images in order of their ids; null for all.
        fraction: Train on this share of them, above 0 and at most 1, chosen by a hash of the image ids: the same on
            every machine, and 0.01 is part of 0.1.
        repeat_train: How often an epoch goes over the training images; above 1 it spares a tiny data set the cost of
            restarting the loader.
        limit_val: Validate on the first so many images in order of their ids; null for all.
        seed: Seed of the order and the augmentation of the training images.
    """

    def __init__(
        self,
        *,
        root: str,
        train_json: str,
        train_images: str,
        val_json: str,
        val_images: str,
        train_transform: Transform,
        eval_transform: Transform,
        batch_size: int,
        eval_batch_size: int,
        num_workers: int,
        size_divisor: int,
        limit_train: int | None,
        fraction: float,
        repeat_train: int,
        limit_val: int | None,
        seed: int,
    ) -> None:
        super().__init__()
        self.train_json, self.train_images = Path(root) / train_json, Path(root) / train_images
        self.val_json, self.val_images = Path(root) / val_json, Path(root) / val_images
        self.train_transform = train_transform
        self.eval_transform = eval_transform
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size
        self.num_workers = num_workers
        self.size_divisor = size_divisor
        self.limit_train = limit_train
        self.fraction = fraction
        self.repeat_train = repeat_train
        self.limit_val = limit_val
        self.seed = seed

    def check(self) -> None:
        """Checks that the data is where the settings say, before anything is built.

        Raises:
            DataError: An annotation file or an image folder is absent; the message names all that are.
        """
        absent = [str(path) for path in (self.train_json, self.val_json) if not path.is_file()]
        absent += [str(path) for path in (self.train_images, self.val_images) if not path.is_dir()]
        if absent:
            raise DataError(
                f"annotation files and image folders must exist, got no {', '.join(absent)}; set data.root to a folder "
                "with annotations/, train2017/ and val2017/, or data.train_json, data.train_images, data.val_json and "
                "data.val_images"
            )

    def setup(self, stage: str) -> None:
        """Reads the annotations, so that a fault of the validation data is told before the first epoch, not after it.

        Args:
            stage: "fit" for both splits, otherwise the validation split is read alone.

        Raises:
            DataError: Of either split.
        """
        if stage == "fit":
            _ = self.train_dataset
        _ = self.val_dataset

    @cached_property
    def categories(self) -> tuple[Category, ...]:
        """All categories, in the order of the contiguous labels."""
        return read_categories(self.val_json)

    @property
    def category_rows(self) -> list[dict[str, Any]]:
        """The categories as plain values: one `{"id": ..., "name": ...}` for each contiguous label."""
        return [{"id": category.id, "name": category.name} for category in self.categories]

    def order_categories(self, places: Sequence[int]) -> None:
        """Gives the contiguous labels to the categories anew, for the evaluation of a detector of another order.

        Args:
            places: For each label of the detector the place of its category in `categories`.

        Notes:
            For validation alone: targets of a training keep the order of the annotation files.
        """
        self.categories = tuple(self.categories[place] for place in places)

    @property
    def num_classes(self) -> int:
        """Number of contiguous labels; known before any image or box is read."""
        return len(self.categories)

    @cached_property
    def train_dataset(self) -> CocoDataset:
        """The training images."""
        annotations = take_fraction(read_table(self.train_json, self.limit_train), self.fraction)
        if annotations.categories != self.categories:
            raise DataError(
                f"categories must be the same in training and validation, got {len(annotations.categories)} in "
                f"{self.train_json} and {self.num_classes} in {self.val_json} with other ids or names; list all "
                "categories in both files"
            )
        require_files(annotations.file_names, self.train_images)
        return CocoDataset(annotations=annotations, images_dir=self.train_images, transform=self.train_transform)

    @cached_property
    def val_table(self) -> AnnotationTable:
        """The validation annotations in arrays."""
        return read_table(self.val_json, self.limit_val)

    @cached_property
    def val_annotations(self) -> COCO:
        """The validation annotations, crowds included, as the evaluation needs them."""
        return index_table(self.val_table)

    @cached_property
    def val_dataset(self) -> CocoDataset:
        """The validation images."""
        require_files(self.val_table.file_names, self.val_images)
        return CocoDataset(annotations=self.val_table, images_dir=self.val_images, transform=self.eval_transform)

    def train_dataloader(self) -> TrainingLoader:
        """Shuffled batches of equal size; order and augmentation are a function of seed, epoch and rank.

        Raises:
            DataError: A process has fewer images than one batch.
        """
        num_replicas, rank = (1, 0) if self.trainer is None else (self.trainer.world_size, self.trainer.global_rank)
        draws = Draws(self.train_dataset, repeats=self.repeat_train, seed=self.seed)
        sampler = DrawSampler(draws, num_replicas=num_replicas, rank=rank, seed=self.seed)
        if len(sampler) < self.batch_size:
            raise DataError(
                f"batch_size must be at most the number of training images of a process, got {self.batch_size} with "
                f"{len(sampler)} images; lower data.batch_size"
            )
        loader = TrainingLoader(
            draws, batch_size=self.batch_size, sampler=sampler, drop_last=True, **self._loader_settings()
        )
        loader.num_done = self._num_batches_done
        return loader

    def val_dataloader(self) -> DataLoader[Sample]:
        """Batches in order of the image ids."""
        return DataLoader(self.val_dataset, batch_size=self.eval_batch_size, **self._loader_settings())

    def _num_batches_done(self) -> int:
        """Batches of the current epoch that the trainer has behind it: above 0 where a run goes on within an epoch."""
        return 0 if self.trainer is None else self.trainer.fit_loop.epoch_loop.batch_progress.current.ready

    def _loader_settings(self) -> dict[str, Any]:
        """What all loaders have in common."""
        return {
            "num_workers": self.num_workers,
            "persistent_workers": self.num_workers > 0,
            "pin_memory": torch.cuda.is_available(),
            "collate_fn": partial[Batch](collate, size_divisor=self.size_divisor),
            "worker_init_fn": leave_signals,
        }


def leave_signals(worker_id: int) -> None:
    """Leaves Ctrl-C and SIGTERM, which terminals and schedulers send to whole groups, to the process they load for."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.setpgid(0, 0)


class SyntheticDataModule(CocoDataModule):
    """The synthetic data set, written into the cache on first use and read like any other.

    Args:
        cache_dir: Folder of all synthetic data sets.
        num_train: Number of training images.
        num_val: Number of validation images.
        image_size: Longer side of the images in pixels.
        data_seed: Seed of the drawing.
        settings: The arguments of `CocoDataModule` other than the paths.
    """

    def __init__(
        self, *, cache_dir: str, num_train: int, num_val: int, image_size: int, data_seed: int, **settings: Any
    ) -> None:
        self.spec = SyntheticSpec(num_train=num_train, num_val=num_val, image_size=image_size, seed=data_seed)
        self.cache_dir = Path(cache_dir)
        super().__init__(
            root=str(self.cache_dir / self.spec.folder_name),
            train_json="annotations/instances_train.json",
            train_images="train",
            val_json="annotations/instances_val.json",
            val_images="val",
            **settings,
        )

    def check(self) -> None:
        """Nothing to check: absent data is drawn."""

    def prepare_data(self) -> None:
        """Draws the data set unless the cache holds it."""
        write_synthetic_dataset(self.spec, self.cache_dir)

    @cached_property
    def categories(self) -> tuple[Category, ...]:
        """The categories that the generator draws."""
        return tuple(Category(number, shape.name) for number, shape in zip(CATEGORY_IDS, SHAPES, strict=True))
