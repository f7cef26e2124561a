"""Regions of a detector that `compile=true` hands to `torch.compile`: chains of small operations without parameters.

What the host launches one by one there becomes a kernel or two. Everything between has kernels of its own already
(products, attention, norms) or is replayed as a whole by `cuda_graphs=true`, which takes compiled regions in.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class Region(nn.Module):
    """A function of tensors, eager until `compile_regions` has been told otherwise.

    A subclass defines `compute`, which neither waits for the device nor draws random numbers, and keeps its settings
    as attributes, which a compiled function takes for constants. There are no parameters, so that a state dict has no
    keys of a region. A copy, by `copy` or by `pickle`, is eager.
    """

    def __init__(self) -> None:
        super().__init__()
        self._compiled: Callable[..., Tensor] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_compiled": None}

    def compute(self, *tensors: Tensor) -> Tensor:
        """Computes the region's result."""
        raise NotImplementedError

    def forward(self, *tensors: Tensor) -> Tensor:
        """Computes what `compute` does, compiled or not."""
        return (self._compiled or self.compute)(*tensors)

    def compile_sizes(self, backend: str) -> None:
        """Has the function compiled when it is called next, for tensors of any sizes at once."""
        self._compiled = torch.compile(self.compute, backend=backend, dynamic=True, fullgraph=True)


def compile_regions(module: nn.Module, backend: str = "inductor") -> None:
    """Compiles every `Region` of a module; results are equal up to rounding.

    Args:
        module: a detector, its criterion, or both in one.
        backend: of `torch.compile`.

    Notes:
        Sizes are symbols. PyTorch compiles anew where a size is 0 or 1, or where two that were equal differ: a few
        times a region, however many sizes of images there are.
    """
    for region in module.modules():
        if isinstance(region, Region):
            region.compile_sizes(backend)
