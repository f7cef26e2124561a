"""The level table: sizes and first rows of the feature maps that `value` concatenates."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

HostShapes = tuple[tuple[int, int], ...]
SpatialShapes = Tensor | Sequence[Sequence[int]]
LevelStarts = Tensor | Sequence[int] | None


def level_starts(spatial_shapes: HostShapes) -> tuple[int, ...]:
    """Returns the first row of each level in `value`, for levels stored one after the other."""
    return tuple(accumulate((h * w for h, w in spatial_shapes[:-1]), initial=0))


def read_shapes(spatial_shapes: SpatialShapes) -> HostShapes:
    """Returns `spatial_shapes` as a tuple of (h, w) ints.

    Notes:
        Reading a tensor in device memory waits for the device.
    """
    rows = spatial_shapes.tolist() if isinstance(spatial_shapes, Tensor) else spatial_shapes
    return tuple((int(h), int(w)) for h, w in rows)


def read_starts(level_start_index: Tensor | Sequence[int]) -> tuple[int, ...]:
    """Returns `level_start_index` as a tuple of ints.

    Notes:
        Reading a tensor in device memory waits for the device.
    """
    rows = level_start_index.tolist() if isinstance(level_start_index, Tensor) else level_start_index
    return tuple(int(start) for start in rows)


def may_be_thin(spatial_shapes: SpatialShapes) -> bool:
    """Tells whether a level may have a single row or column: of tensors, which are not read, it may."""
    return isinstance(spatial_shapes, Tensor) or any(h == 1 or w == 1 for h, w in spatial_shapes)


def device_tables(
    spatial_shapes: SpatialShapes, level_start_index: LevelStarts, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Returns the validated level table as two integer tensors on `device`, `[L, 2]` (h, w) and `[L]`.

    Notes:
        Tensors on `device` are passed on unread; a table on the host is copied once per (table, device) and kept.
    """
    if isinstance(spatial_shapes, Tensor) and spatial_shapes.device == device:
        if not isinstance(level_start_index, Tensor) or level_start_index.device != device:
            level_start_index = torch.as_tensor(level_start_index, device=device)
        return spatial_shapes, level_start_index
    shapes = read_shapes(spatial_shapes)
    # A traced call must not put its symbolic tensors into the cache.
    build = _build_tables if torch.compiler.is_compiling() else _cached_tables
    return build(shapes, device)


def _build_tables(spatial_shapes: HostShapes, device: torch.device) -> tuple[Tensor, Tensor]:
    with torch.inference_mode(False):
        return (
            torch.tensor(spatial_shapes, dtype=torch.int64, device=device),
            torch.tensor(level_starts(spatial_shapes), dtype=torch.int64, device=device),
        )


_cached_tables = lru_cache(maxsize=1024)(_build_tables)
