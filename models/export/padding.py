"""Keeps the padding of a batch out of a network's convolutions and group norms.

A network that is trained on padded batches reads its padding: a convolution at the edge of an image sees what the layer
before made of the zeros beyond, a group norm counts them, and DINO describes the place of its queries within the padded
image. The answer then depends on how far the image was padded.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from models.decoder import DeformableDecoder, DeformableDecoderLayer, embed_references


class PaddingGuard:
    """Clears the padding before every convolution and pooling that mixes pixels, leaves it out of group norms, and
    describes queries by their place in the image.

    Max pooling is right behind a cleared input because the networks pool what a ReLU made, which is never negative.
    """

    def __init__(self, model: nn.Module) -> None:
        """Puts the guard on a network, in place; names and values of its parameters stay.

        Args:
            model: any network; layers inside `torchvision`'s Swin transformers mix pixels in ways that are not seen.
        """
        self._masks: dict[tuple[int, int], Tensor] = {}  # by height and width, of the call that is guarded
        self._finest: tuple[int, int] | None = None
        for layer in list(model.modules()):
            if isinstance(layer, nn.Conv2d | nn.MaxPool2d) and _mixes_pixels(layer):
                layer.register_forward_pre_hook(self._clear)
            if isinstance(layer, DeformableDecoder) and layer.ref_point_head is not None:
                for decoder_layer in layer.layers:
                    decoder_layer.register_forward_pre_hook(partial(_embed_unpadded_boxes, layer.ref_point_head))
            for name, child in layer.named_children():
                if type(child) is nn.GroupNorm:
                    setattr(layer, name, UnpaddedGroupNorm(child, self))

    @contextmanager
    def on(self, padding_mask: Tensor) -> Iterator[None]:
        """Guards the calls inside.

        Args:
            padding_mask: bool [B, H, W], True = padding of the images.
        """
        self._finest = (padding_mask.shape[1], padding_mask.shape[2])
        self._masks = {self._finest: padding_mask.unsqueeze(1)}
        try:
            yield
        finally:
            self._finest, self._masks = None, {}

    def padding_at(self, features: Tensor) -> Tensor | None:
        """Returns the mask at the resolution of features [B, C, h, w], bool [B, 1, h, w], or None outside `on`.

        Nearest neighbour, as the detectors sample it for their attention.
        """
        if self._finest is None:
            return None
        size = (features.shape[2], features.shape[3])
        if size not in self._masks:
            self._masks[size] = nn.functional.interpolate(self._masks[self._finest].float(), size=size).bool()
        return self._masks[size]

    def _clear(self, layer: nn.Module, arguments: tuple[Any, ...]) -> None:
        """In place: nobody reads the padding, and a copy would lose the features' layout in memory."""
        padding = self.padding_at(arguments[0])
        if padding is not None:
            arguments[0].masked_fill_(padding, 0.0)


def _embed_unpadded_boxes(
    ref_point_head: nn.Module, layer: DeformableDecoderLayer, arguments: tuple[Any, ...]
) -> tuple[Any, ...]:
    """Makes the positions of a layer's queries from their boxes relative to the image, which it gets for the levels."""
    query, _, level_points, memory, levels, attention_mask = arguments
    boxes_cxcywh = level_points[:, :, 0] / levels.valid_ratios[:, :1].repeat(1, 1, 2)
    query_pos = ref_point_head(embed_references(boxes_cxcywh, query.shape[-1] // 2))
    return query, query_pos, level_points, memory, levels, attention_mask


class UnpaddedGroupNorm(nn.GroupNorm):
    """A group norm whose mean and variance are those of the image, without its padding; float32 inside."""

    def __init__(self, source: nn.GroupNorm, guard: PaddingGuard) -> None:
        """Takes over the parameters of a group norm."""
        super().__init__(source.num_groups, source.num_channels, source.eps, affine=False)
        self.affine = source.affine
        self.weight, self.bias = source.weight, source.bias
        self._guard = guard

    def forward(self, input: Tensor) -> Tensor:
        """Normalises [B, C, h, w]; returns float32."""
        padding = self._guard.padding_at(input)
        with torch.autocast(input.device.type, enabled=False):
            if padding is None:
                return super().forward(input.float())
            valid = (~padding).float()
            grouped = input.float().unflatten(1, (self.num_groups, -1))
            count = valid.sum((2, 3)).view(-1, 1, 1, 1, 1) * grouped.shape[2]
            weights = valid.unsqueeze(2)
            mean = (grouped * weights).sum((2, 3, 4), keepdim=True) / count
            centred = grouped - mean
            variance = (centred.square() * weights).sum((2, 3, 4), keepdim=True) / count
            normalised = (centred * (variance + self.eps).rsqrt()).flatten(1, 2)
            if not self.affine:
                return normalised
            return normalised * self.weight.view(1, -1, 1, 1) + self.bias.view(1, -1, 1, 1)


def _mixes_pixels(layer: nn.Conv2d | nn.MaxPool2d) -> bool:
    sizes = layer.kernel_size if isinstance(layer.kernel_size, tuple) else (layer.kernel_size,)
    return max(sizes) > 1
