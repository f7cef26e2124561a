"""The order of draws: each repeat of the images is complete, over all processes together."""

import pytest
from torch.utils.data import Dataset, DistributedSampler

from coco.sampling import Draws, DrawSampler


class Numbers(Dataset):
    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> int:
        return index


def order_of(num_images: int, repeats: int, rank: int, num_replicas: int, epoch: int = 0) -> list[int]:
    draws = Draws(Numbers(num_images), repeats=repeats, seed=1)
    sampler = DrawSampler(draws, num_replicas=num_replicas, rank=rank, seed=3)
    sampler.set_epoch(epoch)
    order = list(sampler)
    assert len(order) == len(sampler)
    return order


def test_each_repeat_shows_every_image_once():
    order = order_of(6, 4, rank=0, num_replicas=1, epoch=2)
    passes = [[draw % 6 for draw in order[start : start + 6]] for start in range(0, 24, 6)]
    assert [sorted(images) for images in passes] == [list(range(6))] * 4
    assert len({tuple(images) for images in passes}) == 4
    assert sorted(order) == list(range(48, 72))  # draws of this epoch, each with an augmentation of its own


@pytest.mark.parametrize("num_images", [1, 7, 8])
def test_processes_share_an_epoch_and_draw_equally_many(num_images):
    parts = [order_of(num_images, 2, rank, num_replicas=3) for rank in range(3)]
    assert len({len(part) for part in parts}) == 1
    together = [draw for step in zip(*parts, strict=True) for draw in step]
    assert set(together) == set(range(2 * num_images))
    assert len(together) - 2 * num_images < 3 or num_images == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_without_repeats_the_order_is_pytorchs(rank):
    base = DistributedSampler(Numbers(9), num_replicas=2, rank=rank, shuffle=True, seed=3)
    base.set_epoch(5)
    assert [draw - 45 for draw in order_of(9, 1, rank, num_replicas=2, epoch=5)] == list(base)
