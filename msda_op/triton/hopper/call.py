"""A call of the Hopper path: its tensors as the kernels want them, and what follows from its sizes."""

from typing import Any, NamedTuple

from torch import Tensor

from msda_op.options import Sizes, read_sizes
from msda_op.triton.hopper.buckets import BucketSizes, size_buckets
from msda_op.triton.hopper.tuning import LaunchShape, Pass, choose_launch_shape


class Call(NamedTuple):
    """Contiguous inputs of a call, and its sizes.

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
    """Returns the call with contiguous, aligned tensors; `tables` are spatial_shapes and level_start_index."""
    sizes = read_sizes(value, weights, value_layout)
    shapes, starts = (table.contiguous() for table in tables)
    offsets = None if offsets is None else align(offsets)
    samples = (align(places), offsets, align(weights))
    return Call(align(value), shapes, starts, *samples, sizes, value_layout, thin_levels)


def align(tensor: Tensor) -> Tensor:
    """Returns a contiguous tensor that starts at a multiple of 16 bytes of its memory, as its memory does of all."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.storage_offset() * tensor.element_size() % 16 else tensor
