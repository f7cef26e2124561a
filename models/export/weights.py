"""Weights as a safetensors file."""

from collections.abc import Mapping
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor


def save_weights(weights: Mapping[str, Tensor], path: Path) -> None:
    """Writes tensors into a file; one that exists is replaced.

    Each becomes one of its own, row-major, as the format wants them: checkpoints hold the kernels of convolutions with
    the channels of a pixel side by side where the training had them so. A network keeps its memory format when it takes
    the numbers over.
    """
    rows = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in weights.items()}
    safetensors.torch.save_file(rows, path)
