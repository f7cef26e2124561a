import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from pycocotools import mask as coco_mask

from coco import synthetic
from coco.synthetic import SyntheticSpec, write_synthetic_dataset

SPEC = SyntheticSpec(num_train=5, num_val=2, image_size=48, seed=3)


def digest(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_the_same_spec_gives_the_same_bytes_and_another_seed_others(tmp_path):
    first = digest(write_synthetic_dataset(SPEC, tmp_path / "a"))
    assert digest(write_synthetic_dataset(SPEC, tmp_path / "b")) == first
    other = digest(write_synthetic_dataset(replace(SPEC, seed=4), tmp_path / "a"))
    assert other.keys() == first.keys()
    assert all(other[name] != first[name] for name in first)


def test_more_images_leave_the_first_ones_alone(tmp_path):
    few = digest(write_synthetic_dataset(SPEC, tmp_path))
    many = digest(write_synthetic_dataset(replace(SPEC, num_train=7), tmp_path))
    assert all(many[name] == value for name, value in few.items() if name.startswith("train/"))
    assert few["train/000000000001.jpg"] != few["val/000000000001.jpg"]


def test_annotations_agree_with_the_files(synthetic_folder):
    content = json.loads((synthetic_folder / "annotations" / "instances_train.json").read_text())
    sizes = {}
    for info in content["images"]:
        with Image.open(synthetic_folder / "train" / info["file_name"]) as image:
            assert image.size == (info["width"], info["height"])
        sizes[info["id"]] = (info["height"], info["width"])
        assert max(sizes[info["id"]]) == 64
        assert min(sizes[info["id"]]) >= 48
    assert len(sizes) == 24
    for annotation in content["annotations"]:
        mask = coco_mask.decode(annotation["segmentation"])
        assert mask.shape == sizes[annotation["image_id"]]
        assert mask.sum() == annotation["area"]
        assert coco_mask.toBbox(annotation["segmentation"]).tolist() == annotation["bbox"]


def test_an_object_stands_out_from_its_surroundings(synthetic_folder):
    content = json.loads((synthetic_folder / "annotations" / "instances_train.json").read_text())
    contrasts = []
    for annotation in content["annotations"]:
        with Image.open(synthetic_folder / "train" / f"{annotation['image_id']:012d}.jpg") as image:
            pixels = np.asarray(image, dtype=float)
        inside = coco_mask.decode(annotation["segmentation"]).astype(bool)
        contrasts.append(np.abs(pixels[inside].mean(0) - np.median(pixels[~inside], axis=0)).max())
    assert np.median(contrasts) > 40


def test_a_complete_folder_is_not_drawn_again(tmp_path, monkeypatch):
    folder = write_synthetic_dataset(SPEC, tmp_path)
    monkeypatch.setattr(synthetic, "draw_scene", None)
    assert write_synthetic_dataset(SPEC, tmp_path) == folder


def test_an_interrupted_run_leaves_nothing(tmp_path, monkeypatch):
    def fail(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(synthetic, "draw_scene", fail)
    with pytest.raises(KeyboardInterrupt):
        write_synthetic_dataset(SPEC, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_several_writers_at_once_agree(tmp_path):
    with ThreadPoolExecutor(3) as pool:
        folders = set(pool.map(lambda _: write_synthetic_dataset(SPEC, tmp_path), range(3)))
    assert list(tmp_path.iterdir()) == [*folders]
    assert digest(folders.pop()) == digest(write_synthetic_dataset(SPEC, tmp_path / "alone"))


@pytest.mark.parametrize("change", [{"num_train": 0}, {"num_val": 0}, {"image_size": 31}])
def test_impossible_specs_are_refused(change):
    name = next(iter(change))
    with pytest.raises(ValueError, match=f"{name} must be at least"):
        replace(SPEC, **change)
