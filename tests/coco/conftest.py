"""Data for the tests of `coco`: a small synthetic set, hand-written annotation files, and real data where present."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from coco.datamodule import CocoDataModule
from coco.synthetic import SyntheticSpec, write_synthetic_dataset
from coco.transforms import evaluation_transform

WriteJson = Callable[[dict[str, Any]], Path]


@pytest.fixture(scope="session", autouse=True)
def _single_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def synthetic_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache folder of the synthetic sets that these tests draw."""
    return tmp_path_factory.mktemp("synthetic")


@pytest.fixture(scope="session")
def synthetic_folder(synthetic_cache: Path) -> Path:
    """A synthetic set of 24 training and 7 validation images."""
    return write_synthetic_dataset(SyntheticSpec(num_train=24, num_val=7, image_size=64, seed=1), synthetic_cache)


@pytest.fixture
def data(synthetic_folder: Path) -> CocoDataModule:
    """Four of its training images and all for validation, resized to 96 pixels."""
    resize = evaluation_transform(size=96, max_size=96)
    return CocoDataModule(
        root=str(synthetic_folder),
        train_json="annotations/instances_train.json",
        train_images="train",
        val_json="annotations/instances_val.json",
        val_images="val",
        train_transform=resize,
        eval_transform=resize,
        batch_size=4,
        eval_batch_size=3,
        num_workers=0,
        size_divisor=1,
        limit_train=4,
        fraction=1.0,
        repeat_train=1,
        limit_val=None,
        seed=0,
    )


@pytest.fixture
def write_json(tmp_path: Path) -> WriteJson:
    """Writes an annotation file."""

    def write(content: dict[str, Any]) -> Path:
        path = tmp_path / "instances.json"
        path.write_text(json.dumps(content))
        return path

    return write


@pytest.fixture
def content() -> dict[str, Any]:
    """Annotations with ids that are unsorted, have gaps and start at 0, a crowd, and missing values."""
    return {
        "categories": [{"id": 9, "name": "cat"}, {"id": 0, "name": "ant"}, {"id": 4, "name": "bee"}],
        "images": [
            {"id": 30, "file_name": "c.png", "height": 40, "width": 60},
            {"id": 7, "file_name": "a.png", "height": 40, "width": 60},
            {"id": 12, "file_name": "b.png", "height": 40, "width": 60},
        ],
        "annotations": [
            {"id": 0, "image_id": 7, "category_id": 9, "bbox": [10, 5, 20, 10], "area": 150, "iscrowd": 0},
            {"id": 5, "image_id": 7, "category_id": 0, "bbox": [50, 30, 20, 20], "segmentation": None},
            {"id": 6, "image_id": 7, "category_id": 4, "bbox": [0, 0, 30, 30], "area": 500, "iscrowd": 1},
            {"id": 8, "image_id": 30, "category_id": 4, "bbox": [1, 2, 0, 5], "area": 0},
            {"id": 9, "image_id": 30, "category_id": 4, "bbox": [60, 2, 9, 5], "area": 45},
            {"id": 3, "image_id": 30, "category_id": 4, "bbox": [-6, 2, 26, 10], "area": 200},
        ],
    }


@pytest.fixture
def images_dir(tmp_path: Path) -> Path:
    """The three pictures of `content`, each of one colour."""
    for number, name in enumerate(("a.png", "b.png", "c.png")):
        Image.fromarray(np.full((40, 60, 3), 50 * (number + 1), np.uint8)).save(tmp_path / name)
    return tmp_path


def _folder_of(variable: str) -> Path:
    if variable not in os.environ:
        pytest.skip(f"needs {variable}")
    return Path(os.environ[variable])


@pytest.fixture
def coco_subset() -> Path:
    """A subset of COCO 2017 in COCO's layout."""
    return _folder_of("COCO_SUBSET_DIR")


@pytest.fixture
def bccd() -> Path:
    """The blood cell data set in COCO's format."""
    return _folder_of("BCCD_DIR")


@pytest.fixture
def odd_inputs() -> Path:
    """Images and annotation files that break loaders."""
    return _folder_of("ODD_INPUTS_DIR")
