import pytest
import torch
from torchvision import tv_tensors
from torchvision.transforms.v2 import functional

from coco import transforms
from coco.transforms import (
    LONGEST_BEFORE_CROP,
    RandomSizeCrop,
    evaluation_transform,
    light_augmentation,
    published_augmentation,
    scale_shorter_side,
)


def make_pair(height, width, boxes_xyxy):
    image = tv_tensors.Image(torch.zeros((3, height, width), dtype=torch.uint8))
    boxes = tv_tensors.BoundingBoxes(
        torch.tensor(boxes_xyxy, dtype=torch.float32).reshape(-1, 4), format="XYXY", canvas_size=(height, width)
    )
    return image, {"boxes": boxes, "labels": torch.arange(len(boxes))}


@pytest.mark.parametrize(
    ("height", "width", "size", "max_size", "expected"),
    [
        (480, 640, 800, 1333, (800, 1066)),  # 1066.67, the longer side is cut
        (640, 480, 800, 1333, (1066, 800)),
        (427, 640, 800, 1333, (800, 1199)),
        (213, 640, 800, 1333, (444, 1334)),  # 443.6 rounds up, and the longer side exceeds its limit by one
        (640, 213, 800, 1333, (1334, 444)),
        (500, 500, 600, 1333, (600, 600)),
        (800, 1066, 800, 1333, (800, 1066)),
        (335, 500, 400, None, (400, 597)),
        (10, 1000, 800, 1333, (13, 1300)),
        (128, 160, 160, 160, (128, 160)),
        (1, 5000, 800, 1333, (1, 1333)),  # thinner than a pixel
        (5000, 1, 800, 1333, (1333, 1)),
    ],
)
def test_sizes_follow_the_published_rule(height, width, size, max_size, expected):
    assert scale_shorter_side(height, width, size, max_size) == expected


def test_the_rule_differs_from_that_of_torchvision():
    image, _ = make_pair(213, 640, [])
    assert functional.resize(image, [800], max_size=1333).shape[-2:] != scale_shorter_side(213, 640, 800, 1333)


def test_evaluation_resizes_image_and_boxes_alike():
    image, target = evaluation_transform(size=80, max_size=1000)(*make_pair(40, 61, [[10, 5, 30, 15]]))
    assert image.shape == (3, 80, 122)
    assert image.dtype == torch.uint8
    torch.testing.assert_close(target["boxes"].as_subclass(torch.Tensor), torch.tensor([[20.0, 10, 60, 30]]))


def test_crop_clips_boxes_and_drops_those_outside():
    torch.manual_seed(0)
    crop = RandomSizeCrop(min_size=30, max_size=40)
    pixels = torch.arange(100 * 90, dtype=torch.int32).reshape(100, 90)
    num_dropped = 0
    for _ in range(30):
        _, target = make_pair(100, 90, [[0, 0, 90, 100], [2, 3, 9, 8], [80, 90, 88, 99]])
        marked = tv_tensors.Image(pixels[None].expand(3, -1, -1))
        cropped, kept = crop(marked, target)
        height, width = cropped.shape[-2:]
        assert 30 <= height <= 40
        assert 30 <= width <= 40
        top, left = divmod(int(cropped[0, 0, 0]), 90)
        for label, box in zip(kept["labels"].tolist(), kept["boxes"].tolist(), strict=True):
            source = target["boxes"][label].tolist()
            assert box == [
                min(max(source[0] - left, 0), width),
                min(max(source[1] - top, 0), height),
                min(max(source[2] - left, 0), width),
                min(max(source[3] - top, 0), height),
            ]
            assert box[2] > box[0]
            assert box[3] > box[1]
        assert 0 in kept["labels"]
        num_dropped += 3 - len(kept["labels"])
    assert num_dropped > 0


def test_crop_without_remaining_boxes_keeps_shapes():
    _, kept = RandomSizeCrop(min_size=5, max_size=5)(*make_pair(20, 20, []))
    assert kept["boxes"].shape == (0, 4)
    assert kept["labels"].shape == (0,)


def test_crop_is_no_larger_than_the_image():
    image, _ = RandomSizeCrop(min_size=384, max_size=600)(*make_pair(50, 700, []))
    assert image.shape[1] == 50
    assert 384 <= image.shape[2] <= 600


def test_published_augmentation_takes_both_ways_and_follows_the_seed():
    augment = published_augmentation(
        scales=(48, 64), max_size=130, crop_scales=(40, 60), crop_min_size=38, crop_max_size=60
    )
    results = []
    for _ in range(2):
        torch.manual_seed(3)
        results.append([augment(*make_pair(60, 90, [[30, 20, 60, 40]])) for _ in range(40)])
    shapes = [tuple(image.shape[-2:]) for image, _ in results[0]]
    assert shapes == [tuple(image.shape[-2:]) for image, _ in results[1]]
    assert min(min(shape) for shape in shapes) >= 48
    uncropped = {scale_shorter_side(60, 90, size, 130) for size in (48, 64)}
    assert 10 <= sum(shape in uncropped for shape in shapes) <= 30
    for (_, first), (_, second) in zip(*results, strict=True):
        assert torch.equal(first["boxes"], second["boxes"])


@pytest.mark.parametrize(("height", "width"), [(20, 5000), (1, 5000), (5000, 1), (1, 1)])
def test_images_of_any_shape_are_augmented_within_bounds(height, width):
    augment = published_augmentation(
        scales=(48, 64), max_size=130, crop_scales=(40, 60), crop_min_size=38, crop_max_size=60
    )
    torch.manual_seed(0)
    longest = 0
    for _ in range(6):
        image, target = augment(*make_pair(height, width, [[0, 0, width, height]]))
        longest = max(longest, *image.shape)
        assert min(image.shape[-2:]) > 0
        assert len(target["boxes"]) == 1
    assert longest <= 2 * 130  # the published rounding of a shorter side between half a pixel and one


def test_an_enlarged_image_has_a_longest_side(monkeypatch):
    sizes = []
    monkeypatch.setattr(
        transforms, "scale_shorter_side", lambda *size: sizes.append(scale_shorter_side(*size)) or sizes[-1]
    )
    augment = published_augmentation(scales=(48,), max_size=130, crop_scales=(600,), crop_min_size=4, crop_max_size=8)
    for seed in range(8):
        torch.manual_seed(seed)
        augment(*make_pair(1, 2000, []))
    assert (8, 16000) in sizes  # of 600 x 1,200,000 pixels
    assert max(map(max, sizes)) <= LONGEST_BEFORE_CROP


def test_light_augmentation_without_flip_is_resize():
    pair = make_pair(40, 60, [[10, 5, 30, 15]])
    light = light_augmentation(sizes=(20,), max_size=100, flip_probability=0.0)(*pair)
    resized = evaluation_transform(size=20, max_size=100)(*pair)
    assert torch.equal(light[1]["boxes"], resized[1]["boxes"])
    assert light[0].shape == resized[0].shape
