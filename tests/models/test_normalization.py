import pytest
import torch

from models.normalization import ImageNormalizer


def test_scales_and_clears_the_padding() -> None:
    normalizer = ImageNormalizer(mean=[0.5, 0.25, 0.0], std=[0.5, 0.25, 0.1])
    images = torch.full((1, 3, 2, 2), 255, dtype=torch.uint8)
    padding_mask = torch.tensor([[[False, True], [True, True]]])
    batch = normalizer(images, padding_mask)
    assert batch.images.dtype == torch.float32
    assert batch.images[0, :, 0, 0].tolist() == pytest.approx([1.0, 3.0, 10.0])
    assert batch.images[0, :, padding_mask[0]].abs().max() == 0
    assert batch.padding_mask is padding_mask


def test_statistics_are_no_weights() -> None:
    assert not ImageNormalizer(mean=[0.0, 0.0, 0.0], std=[1.0, 1.0, 1.0]).state_dict()


@pytest.mark.parametrize(
    ("mean", "std", "message"),
    [([0.5], [1.0, 1.0, 1.0], "mean must hold 3 numbers"), ([0.0] * 3, [1.0, 0.0, 1.0], "std must be positive")],
)
def test_wrong_statistics_are_refused(mean: list[float], std: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ImageNormalizer(mean=mean, std=std)
