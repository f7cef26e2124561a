"""A short hash that tells whether two detectors have the same weights."""

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

_DIGITS = 32


def hash_weights(weights: Mapping[str, Tensor]) -> str:
    """Returns 32 hexadecimal digits of names, shapes, dtypes and bits, in order of the names."""
    digest = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:_DIGITS]
