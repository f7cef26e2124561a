"""Which size an image is padded to."""

import pytest
import torch

from models.export.buckets import buckets_for, check_buckets, choose_bucket, pad_images


def test_buckets_hold_both_orientations():
    assert buckets_for(800, 1333, 64) == ((832, 1344), (1344, 832))
    assert buckets_for(800, 1333, 1) == ((800, 1333), (1333, 800))
    assert buckets_for(144, 144, 64) == ((192, 192),)


def test_the_smallest_bucket_that_fits_is_chosen():
    buckets = ((64, 128), (128, 64), (128, 128))
    assert choose_bucket((64, 100), buckets) == (64, 128)
    assert choose_bucket((65, 64), buckets) == (128, 64)
    assert choose_bucket((65, 65), buckets) == (128, 128)
    assert choose_bucket((129, 1), buckets) is None


def test_given_buckets_are_rounded_up_and_sorted():
    assert check_buckets([[800, 1333], [100, 64], [65, 64]], 64) == ((128, 64), (832, 1344))


@pytest.mark.parametrize(
    "buckets", [[], [[800]], [[800, 0]], [[1, 2, 3]], 800, [800, 1333], "800x1333", [["a", "b"]], ["ab"], [[8.5, 9]]]
)
def test_wrong_buckets_are_refused(buckets):
    with pytest.raises(ValueError, match="buckets must be pairs of height and width"):
        check_buckets(buckets, 64)


def test_images_stand_in_the_corner_and_the_first_fills_the_rest():
    first, second = torch.full((3, 2, 3), 7, dtype=torch.uint8), torch.full((3, 4, 1), 9, dtype=torch.uint8)
    batch, sizes_hw = pad_images([first, second], (4, 5), 3)
    assert batch.shape == (3, 3, 4, 5)
    assert sizes_hw.tolist() == [[2, 3], [4, 1], [2, 3]]
    assert torch.equal(batch[2], batch[0])
    assert batch[0, 0].tolist() == [[7, 7, 7, 0, 0]] * 2 + [[0] * 5] * 2
    assert batch[1, 0, :, :2].tolist() == [[9, 0]] * 4
