"""Sampling locations from reference points and predicted offsets."""

import torch
from torch import Tensor

from msda_op.levels import SpatialShapes, device_tables


def sampling_locations_from_offsets(
    reference_points: Tensor, sampling_offsets: Tensor, spatial_shapes: SpatialShapes
) -> Tensor:
    """Places the sampling points of multi-scale deformable attention (arXiv 2010.04159, section 4.1 and appendix A.4).

    A point (x, y) takes offsets in pixels of the level: location = reference + offset / (w, h).
    A box (cx, cy, w, h) takes offsets relative to half its size: location = (cx, cy) + offset / K * (w, h) * 0.5.

    Args:
        reference_points: `[B, Q, L, 2]` (x, y) or `[B, Q, L, 4]` (cx, cy, w, h), normalised to the padded level.
        sampling_offsets: `[B, Q, M, L, K, 2]` (x, y), any float dtype.
        spatial_shapes: `[L, 2]` integer tensor, or L pairs; rows are (h, w).

    Returns:
        Locations `[B, Q, M, L, K, 2]` (x, y), float32 (float64 when either input is); 0..1 spans the padded level.

    Raises:
        ValueError: if `reference_points` ends in neither 2 nor 4 numbers.

    Notes:
        Differentiable in both tensor arguments. Never waits for the device.
    """
    num_coordinates = reference_points.shape[-1]
    if num_coordinates not in (2, 4):
        raise ValueError(
            f"reference_points must end in 2 (x, y) or 4 (cx, cy, w, h) numbers, got shape "
            f"{tuple(reference_points.shape)}; pass points or boxes"
        )
    dtype = torch.promote_types(torch.promote_types(reference_points.dtype, sampling_offsets.dtype), torch.float32)
    points = reference_points.to(dtype)[:, :, None, :, None, :]
    offsets = sampling_offsets.to(dtype)
    if num_coordinates == 2:
        return points + offsets / _sizes_wh(spatial_shapes, offsets)[:, None, :]
    num_points = sampling_offsets.shape[4]
    return points[..., :2] + offsets / num_points * points[..., 2:] * 0.5


def _sizes_wh(spatial_shapes: SpatialShapes, like: Tensor) -> Tensor:
    """Returns `[L, 2]` level sizes (w, h) in the dtype and on the device of `like`."""
    if not isinstance(spatial_shapes, Tensor) or spatial_shapes.device != like.device:
        spatial_shapes, _ = device_tables(spatial_shapes, None, like.device)
    return spatial_shapes.flip(-1).to(like.dtype)
