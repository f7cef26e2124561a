"""A call of the Hopper path: its tensors as the kernels want them, and what follows from its sizes.

Offsets and logits are often two parts of one product, `[B, Q, 3*M*L*K]`, and are read where they stand:

    row of a query, 3*M*L*K elements:   | offsets: from 0, 2*M*L*K of them | logits: from 2*M*L*K, M*L*K of them |

Kernels are told how far apart rows are. The two numbers of an offset are loaded at once, as 4 bytes of halves or 8 of
float32, so their rows must be an even number of elements apart. Logits are loaded one by one; their rows must be a
multiple of the L*K of a head apart, in which kernels count, since it saves them a register. Both parts must start at a
multiple of 16 bytes, as all tensors do for which a kernel is compiled: logits do where 2*M*L*K elements are one.
"""

from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from msda_op.options import Sizes, read_sizes
from msda_op.triton.hopper.buckets import BucketSizes, size_buckets
from msda_op.triton.hopper.support import MAX_QUERIES
from msda_op.triton.hopper.tuning import LaunchShape, Pass, choose_launch_shape

# Kernels count twice the elements of a batch item in int32.
_MAX_ROW_STRIDE = 2**30 // MAX_QUERIES


class Call(NamedTuple):
    """Inputs of a call, contiguous but for rows of offsets and logits that lie apart, and its sizes.

    Args:
        value: `[B, S, M, D]`, or `[B, M, S, D]` for layout "BNLC".
        spatial_shapes: `[L, 2]` (h, w) int32 or int64, on the device.
        level_start_index: `[L]` first row of each level in value, likewise.
        places: sampling locations `[B, Q, M, L, K, 2]`, or reference points `[B, Q, L, 2 or 4]`; float32.
        offsets: `[B, Q, M, L, K, 2]`, only with reference points.
        weights: `[B, Q, M, L, K]`, attention weights, or logits with reference points.
        sizes: B, S, M, D, Q, L, K.
        value_layout: "BLNC" or "BNLC".
        thin_levels: whether levels may have a single row or column.
    """

    value: Tensor
    spatial_shapes: Tensor
    level_start_index: Tensor
    places: Tensor
    offsets: Tensor | None
    weights: Tensor
    sizes: Sizes
    value_layout: str
    thin_levels: bool

    @property
    def tables(self) -> dict[str, Tensor]:
        """Sizes and first rows of the levels."""
        return {"spatial_shapes": self.spatial_shapes, "level_start_index": self.level_start_index}

    @property
    def samples(self) -> dict[str, Any]:
        """What all kernels take that read samples."""
        sizes = self.sizes
        return {
            **self.tables,
            "places": self.places,
            "offsets": self.offsets,
            "weights": self.weights,
            "num_queries": sizes.num_queries,
            "M": sizes.num_heads,
            "L": sizes.num_levels,
            "K": sizes.num_points,
            "OFFSET_STRIDE": row_stride(self.places if self.offsets is None else self.offsets),
            "WEIGHT_HEADS": row_stride(self.weights) // (sizes.num_levels * sizes.num_points),
            "REFERENCE": 0 if self.offsets is None else self.places.shape[-1],
            "THIN": self.thin_levels,
        }

    @property
    def strides(self) -> dict[str, int]:
        """Elements from an item, a head and a pixel of value to the next."""
        _, value_length, num_heads, head_dim, *_ = self.sizes
        heads_first = self.value_layout == "BNLC"
        return {
            "batch_stride": value_length * num_heads * head_dim,
            "head_stride": value_length * head_dim if heads_first else head_dim,
            "PIXEL_STRIDE": head_dim if heads_first else num_heads * head_dim,
        }

    @property
    def planes(self) -> int:
        """Number of pairs of an item and a head."""
        return self.sizes.batch * self.sizes.num_heads

    @property
    def bucket_sizes(self) -> BucketSizes:
        """How many buckets an item and head has, as far as the host knows."""
        sizes = self.sizes
        num_samples = sizes.num_queries * sizes.num_levels * sizes.num_points
        return size_buckets(sizes.value_length, sizes.num_levels, num_samples)

    def launch_shape(self, stage: Pass) -> LaunchShape:
        """Returns the launch shape of a pass."""
        if stage == "backward" and self.offsets is not None:
            stage = "fused backward"
        return choose_launch_shape(stage, self.planes * ((self.sizes.num_queries + 1) // 2))

    def count_programs(self, shape: LaunchShape) -> int:
        """Returns the programs of a kernel that takes one head of some queries."""
        return self.planes * -(-self.sizes.num_queries // (2 * shape.warps * shape.iterations))


def prepare_call(
    value: Tensor,
    tables: tuple[Tensor, Tensor],
    places: Tensor,
    offsets: Tensor | None,
    weights: Tensor,
    value_layout: str,
    thin_levels: bool,
) -> Call:
    """Returns the call with tensors as the kernels take them, copied where they are not already.

    `tables` are spatial_shapes and level_start_index.
    """
    sizes = read_sizes(value, weights, value_layout)
    shapes, starts = (table.contiguous() for table in tables)
    head = sizes.num_levels * sizes.num_points
    samples = (align(places), None if offsets is None else align_rows(offsets, 2), align_rows(weights, head))
    return Call(align(value), shapes, starts, *samples, sizes, value_layout, thin_levels)


def align(tensor: Tensor) -> Tensor:
    """Returns a contiguous tensor that starts at a multiple of 16 bytes of its memory, as its memory does of all."""
    tensor = tensor.contiguous()
    return tensor if _starts_aligned(tensor) else tensor.clone()


def align_rows(tensor: Tensor, unit: int) -> Tensor:
    """Returns `[B, Q, ...]` that starts like that, with contiguous rows a multiple of `unit` elements apart.

    Copied where it does not.
    """
    stays = not tensor.is_contiguous() and _has_even_rows(tensor, unit) and _starts_aligned(tensor)
    return tensor if stays else align(tensor)


def row_stride(tensor: Tensor) -> int:
    """Returns the elements from a query to the next of `[B, Q, ...]` as `align_rows` returns it."""
    return prod(tensor.shape[2:]) if tensor.is_contiguous() else _row_distance(tensor)


def are_joint(offsets: Tensor, logits: Tensor) -> bool:
    """Tells whether offsets and logits lie as the two parts of one `[B, Q, 3*M*L*K]` do, which two such may be."""
    distances = {_row_distance(offsets), _row_distance(logits), 3 * prod(logits.shape[2:])}
    in_rows = _has_even_rows(offsets, 2) and _has_even_rows(logits, 1)
    return len(distances) == 1 and in_rows and offsets.dtype == logits.dtype


def empty_parts(offsets: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Returns tensors like offsets and logits that lie like parts, as the two parts of one new tensor."""
    batch, num_queries, *_ = offsets.shape
    width = _row_distance(offsets)
    rows = offsets.new_empty(batch, num_queries, width)
    grad_offsets = rows.as_strided(offsets.shape, offsets.stride())
    return grad_offsets, rows.as_strided(logits.shape, logits.stride(), width // 3 * 2)


def empty_like(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Returns a contiguous tensor of the shape of another."""
    return torch.empty_like(tensor, dtype=dtype, memory_format=torch.contiguous_format)


def _starts_aligned(tensor: Tensor) -> bool:
    return bool(tensor.storage_offset() * tensor.element_size() % 16 == 0)


def _has_even_rows(tensor: Tensor, unit: int) -> bool:
    """Tells whether rows are contiguous, a multiple of `unit` elements apart, and items follow one another."""
    batch, num_queries, *sizes = tensor.shape
    distance, width = _row_distance(tensor), prod(sizes)
    dense = tensor.stride()[2:] == tuple(prod(sizes[axis + 1 :]) for axis in range(len(sizes)))
    follow = batch == 1 or tensor.stride(0) == num_queries * distance
    return dense and follow and width <= distance <= _MAX_ROW_STRIDE and distance % unit == 0


def _row_distance(tensor: Tensor) -> int:
    # The stride of an axis of one element says nothing.
    return tensor.stride(1) if tensor.shape[1] > 1 else tensor.stride(0)
