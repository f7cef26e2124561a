import torch

from coco.collate import collate
from coco.dataset import Sample


def make_sample(image_id, height, width, num_targets):
    return Sample(
        image=torch.full((3, height, width), image_id, dtype=torch.uint8),
        labels=torch.arange(num_targets),
        boxes_cxcywh=torch.full((num_targets, 4), image_id / 100),
        image_id=image_id,
        original_size_hw=(2 * height, 2 * width),
    )


def test_images_are_padded_at_the_bottom_and_the_right():
    batch = collate([make_sample(7, 4, 6, 2), make_sample(9, 5, 3, 0), make_sample(3, 2, 2, 1)], size_divisor=1)
    assert batch["images"].shape == (3, 3, 5, 6)
    assert batch["images"].dtype == torch.uint8
    assert batch["images"].sum() == 3 * (7 * 24 + 9 * 15 + 3 * 4)
    for row, (height, width) in enumerate(batch["sizes_hw"]):
        assert not batch["padding_mask"][row, :height, :width].any()
        assert (batch["images"][row][:, ~batch["padding_mask"][row]] == (7, 9, 3)[row]).all()
    assert (~batch["padding_mask"]).sum() == 24 + 15 + 4
    assert batch["sizes_hw"] == ((4, 6), (5, 3), (2, 2))
    assert batch["num_targets"] == (2, 0, 1)
    assert batch["image_ids"] == (7, 9, 3)
    assert batch["labels"].tolist() == [0, 1, 0]
    torch.testing.assert_close(batch["boxes_cxcywh"][:, 0], torch.tensor([0.07, 0.07, 0.03]))
    assert batch["original_sizes_hw"].tolist() == [[8, 12], [10, 6], [4, 4]]


def test_a_batch_without_any_target_keeps_its_shapes():
    batch = collate([make_sample(1, 4, 4, 0)], size_divisor=1)
    assert batch["boxes_cxcywh"].shape == (0, 4)
    assert batch["labels"].dtype == torch.int64


def test_size_divisor_rounds_up():
    assert collate([make_sample(1, 33, 64, 0)], size_divisor=32)["images"].shape == (1, 3, 64, 64)
