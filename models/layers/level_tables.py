"""Keeps the level tables of attention calls alive for CUDA graphs, which know their addresses only."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from models.layers.ms_deform_attn import MSDeformAttn
from msda_op.levels import device_tables


@contextmanager
def keeping_level_tables(module: nn.Module) -> Iterator[list[Tensor]]:
    """Collects the level tables of the attention calls inside.

    The op keeps them in a bounded cache; a graph knows their addresses only, and has to keep them alive itself.
    """
    tables: list[Tensor] = []

    def keep(layer: nn.Module, arguments: tuple[Any, ...]) -> None:
        _, _, features, spatial_shapes, _ = arguments
        tables.extend(device_tables(spatial_shapes, None, features.device))

    handles = [layer.register_forward_pre_hook(keep) for layer in module.modules() if isinstance(layer, MSDeformAttn)]
    try:
        yield tables
    finally:
        for handle in handles:
            handle.remove()
