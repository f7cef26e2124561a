"""A detector as one function from raw images to boxes, which every export format starts from."""

from collections import defaultdict

import torch
from torch import Tensor, nn

from models.export.padding import PaddingGuard
from models.layers.self_attention import SelfAttention
from models.normalization import ImageNormalizer
from models.postprocess import postprocess

Inputs = tuple[Tensor, Tensor, Tensor]
"""Images uint8 [B, 3, H, W], sizes_hw and original_sizes_hw int64 [B, 2], see `InferenceModule.forward`."""

Outputs = tuple[Tensor, Tensor, Tensor]
"""Scores float32 [B, k], labels int64 [B, k], boxes_xyxy float32 [B, k, 4] in pixels of the original images."""

INPUT_NAMES = ("images", "sizes_hw", "original_sizes_hw")
OUTPUT_NAMES = ("scores", "labels", "boxes_xyxy")


class InferenceModule(nn.Module):
    """Normalisation, detector, top-k and scaling to pixels in one module, in evaluation mode and without gradients.

    What lies in the padding does not reach the detections: an image padded to any size that is a multiple of the
    coarsest level's stride is answered as it would be alone (ResNet backbones; up to rounding).
    """

    def __init__(self, *, model: nn.Module, normalizer: ImageNormalizer, top_k: int, dtype: torch.dtype) -> None:
        """Takes over a detector, in place.

        Args:
            model: maps an ImageBatch to a DetectorOutput.
            normalizer: maps raw images to an ImageBatch.
            top_k: detections of an image.
            dtype: torch.float32, or the half precision that autocast uses for products and convolutions.
        """
        super().__init__()
        self.model = model
        self.normalizer = normalizer
        self.top_k = top_k
        self.dtype = dtype
        self._guard = PaddingGuard(model)
        self.eval().requires_grad_(False)

    @property
    def device(self) -> torch.device:
        """Where the detector lies."""
        return self.normalizer.mean.device

    def forward(self, images: Tensor, sizes_hw: Tensor, original_sizes_hw: Tensor) -> Outputs:
        """Detects objects.

        Args:
            images: uint8 [B, 3, H, W], RGB, each in the upper left corner; what the rest holds does not matter.
            sizes_hw: int64 [B, 2], (height, width) of each image inside the batch, at most (H, W).
            original_sizes_hw: int64 [B, 2], (height, width) in pixels to which the boxes are scaled.

        Returns:
            Scores, labels and boxes, best first; see `Outputs`.

        Notes:
            Never waits for the device, and has no shape that depends on the numbers.
        """
        padding_mask = padding_of(sizes_hw, images.shape[2], images.shape[3])
        batch = self.normalizer(images, padding_mask)
        with (
            self._guard.on(padding_mask),
            torch.autocast(images.device.type, self.dtype, enabled=self.dtype != torch.float32),
        ):
            output = self.model(batch)
        detections = postprocess(output, original_sizes_hw, self.top_k)
        return detections.scores, detections.labels, detections.boxes_xyxy


def padding_of(sizes_hw: Tensor, height: int, width: int) -> Tensor:
    """Returns the padding mask bool [B, height, width], True = padding, of images of the sizes int64 [B, 2]."""
    rows = torch.arange(height, device=sizes_hw.device) >= sizes_hw[:, :1]
    columns = torch.arange(width, device=sizes_hw.device) >= sizes_hw[:, 1:]
    return rows.unsqueeze(2) | columns.unsqueeze(1)


@torch.no_grad()
def keep_half_weights(module: InferenceModule, *inputs: Tensor) -> int:
    """Converts, in place, the weights that autocast would convert at every call; the detections keep their bits.

    A layer is converted if one run on the inputs calls it under autocast and never without.

    Args:
        module: the detector; a float32 one is left as it is.
        inputs: of `InferenceModule.forward`, of any size.

    Returns:
        The number of tensors converted.
    """
    if module.dtype == torch.float32:
        return 0
    under_autocast: dict[nn.Module, set[bool]] = defaultdict(set)

    def record(layer: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        under_autocast[layer].add(torch.is_autocast_enabled(inputs[0].device.type))

    layers = [layer for layer in module.modules() if isinstance(layer, nn.Linear | nn.Conv2d | SelfAttention)]
    handles = [layer.register_forward_pre_hook(record) for layer in layers]
    module(*inputs)
    for handle in handles:
        handle.remove()
    exact = {id(each) for layer, states in under_autocast.items() if False in states for each in layer.parameters()}
    chosen = {
        id(each): each
        for layer, states in under_autocast.items()
        if states == {True}
        for each in layer.parameters()
        if id(each) not in exact and each.dtype == torch.float32
    }
    for parameter in chosen.values():
        parameter.data = parameter.data.to(module.dtype)
    return len(chosen)
