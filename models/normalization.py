"""From raw pixels to the network's input, on the device."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from models.structures import ImageBatch


class ImageNormalizer(nn.Module):
    """Scales uint8 images to 0..1, subtracts the mean, divides by the standard deviation and clears the padding."""

    mean: Tensor
    std: Tensor

    def __init__(self, *, mean: Sequence[float], std: Sequence[float]) -> None:
        """Creates the layer.

        Args:
            mean: mean of each RGB channel, for pixels in 0..1.
            std: standard deviation of each RGB channel, for pixels in 0..1.

        Raises:
            ValueError: if mean or std does not hold three numbers, or a deviation is not positive.
        """
        super().__init__()
        for name, values in (("mean", mean), ("std", std)):
            if len(values) != 3:
                raise ValueError(f"{name} must hold 3 numbers, got {list(values)}; give one per RGB channel")
        if min(std) <= 0:
            raise ValueError(f"std must be positive, got {list(std)}; give the deviation of pixels in 0..1")
        self.register_buffer("mean", torch.tensor(mean, dtype=torch.float32).view(3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std, dtype=torch.float32).view(3, 1, 1), persistent=False)

    def forward(self, images: Tensor, padding_mask: Tensor) -> ImageBatch:
        """Normalises a batch.

        Args:
            images: uint8 [B, 3, H, W], RGB.
            padding_mask: bool [B, H, W], True = padding.

        Returns:
            The batch, float32, zero in the padding.
        """
        normalised = (images.float() / 255 - self.mean) / self.std
        return ImageBatch(torch.where(padding_mask.unsqueeze(1), 0.0, normalised), padding_mask)
