import gc
from types import FunctionType, ModuleType

import pytest
import torch

from coco.annotations import read_annotations, read_table
from coco.dataset import CocoDataset
from coco.transforms import evaluation_transform, light_augmentation


def build(json_path, images_dir, transform, limit=None):
    return CocoDataset(
        annotations=read_table(json_path, limit),
        images_dir=images_dir,
        transform=transform,
    )


def test_targets_are_contiguous_clipped_and_without_crowds(write_json, content, images_dir):
    dataset = build(write_json(content), images_dir, evaluation_transform(size=80, max_size=1000))
    assert len(dataset) == 3
    first = dataset[0]
    assert first.image_id == 7
    assert first.original_size_hw == (40, 60)
    assert first.image.shape == (3, 80, 120)
    assert first.image.dtype == torch.uint8
    assert first.image.unique().tolist() == [50]
    assert first.labels.tolist() == [2, 0]
    expected = torch.tensor([[20 / 60, 10 / 40, 20 / 60, 10 / 40], [55 / 60, 35 / 40, 10 / 60, 10 / 40]])
    torch.testing.assert_close(first.boxes_cxcywh, expected)
    torch.testing.assert_close(dataset[2].boxes_cxcywh, torch.tensor([[10 / 60, 7 / 40, 20 / 60, 10 / 40]]))


def test_an_image_without_boxes_has_empty_targets(write_json, content, images_dir):
    sample = build(write_json(content), images_dir, evaluation_transform(size=40, max_size=1000))[1]
    assert sample.boxes_cxcywh.shape == (0, 4)
    assert sample.labels.shape == (0,)
    assert sample.labels.dtype == torch.int64


def test_a_flip_mirrors_boxes(write_json, content, images_dir):
    flip = light_augmentation(sizes=(40,), max_size=1000, flip_probability=1.0)
    sample = build(write_json(content), images_dir, flip)[0]
    torch.testing.assert_close(sample.boxes_cxcywh[0], torch.tensor([40 / 60, 10 / 40, 20 / 60, 10 / 40]))


def test_index_of_finds_every_image(write_json, content, images_dir):
    dataset = build(write_json(content), images_dir, evaluation_transform(size=40, max_size=1000))
    assert [dataset[dataset.index_of(image_id)].image_id for image_id in (30, 7, 12)] == [30, 7, 12]


def test_a_missing_image_is_named(write_json, content, images_dir):
    (images_dir / "a.png").unlink()
    dataset = build(write_json(content), images_dir, evaluation_transform(size=40, max_size=1000))
    with pytest.raises(ValueError, match=r"a\.png"):
        dataset[0]


def count_objects(root):
    """Objects that are reachable from one, classes and modules aside: a worker that touches one copies its page."""
    seen, waiting = {}, [root]
    while waiting:
        thing = waiting.pop()
        if id(thing) not in seen and not isinstance(thing, type | ModuleType | FunctionType):
            seen[id(thing)] = thing
            waiting += gc.get_referents(thing)
    return len(seen)


def test_workers_share_what_grows_with_the_images(write_json, content, images_dir):
    """Measured on 118,000 images and 860,000 boxes: a worker's own memory grows by 2 MiB over an epoch."""
    few = build(write_json(content), images_dir, None)
    box = content["annotations"][0]
    for number in range(100, 1100):
        content["images"].append({**content["images"][0], "id": number, "file_name": f"{number}.png"})
        content["annotations"] += [{**box, "id": 2 * number, "image_id": number}] * 2
    many = build(write_json(content), images_dir, None)
    assert (len(few), len(many)) == (3, 1003)
    assert count_objects(many) == pytest.approx(count_objects(few), abs=20)
    assert count_objects(read_annotations(write_json(content), None)) > 5000  # as pycocotools holds them


def test_custom_data_reads(bccd):
    dataset = build(bccd / "instances_val.json", bccd / "images", evaluation_transform(size=240, max_size=400))
    sample = dataset[0]
    assert sample.image.shape == (3, 240, 320)
    assert set(sample.labels.tolist()) <= {0, 1, 2}
    assert ((sample.boxes_cxcywh > 0) & (sample.boxes_cxcywh <= 1)).all()
