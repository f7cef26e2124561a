"""Allocates, picks launch shapes and launches the kernels of the Hopper path.

Calls must be ones that `supports` takes; tensors may have any strides (copied where they are not contiguous and
aligned). All that depends on the sizes of levels is computed on the device.
"""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from msda_op.options import Sizes, read_sizes
from msda_op.triton.hopper import buckets as plan
from msda_op.triton.hopper.backward import backward_kernel
from msda_op.triton.hopper.deterministic import NUM_COLOURS, sort_kernel
from msda_op.triton.hopper.forward import forward_kernel
from msda_op.triton.hopper.reduce import reduce_kernel
from msda_op.triton.hopper.tuning import (
    REDUCE_REGISTERS,
    THIN_REGISTERS,
    LaunchShape,
    Pass,
    Scatter,
    choose_launch_shape,
)
from msda_op.triton.kernel_launch import Launch

_PLAN_BLOCK = 64
_SCAN_BLOCK = 1024
_SORT_BLOCK = 512


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

    def launch_shape(self, stage: Pass) -> LaunchShape:
        """Returns the launch shape of a pass."""
        if stage == "backward" and self.offsets is not None:
            stage = "fused backward"
        return choose_launch_shape(stage, self.planes * triton.cdiv(self.sizes.num_queries, 2))

    def count_programs(self, shape: LaunchShape) -> int:
        """Returns the programs of a kernel that takes one head of some queries."""
        return self.planes * triton.cdiv(self.sizes.num_queries, 2 * shape.warps * shape.iterations)


class Wanted(NamedTuple):
    """Buffers for the gradients that the main kernel writes; None for what is not asked for."""

    locations: Tensor | None
    offsets: Tensor | None
    weights: Tensor | None


class Buckets(NamedTuple):
    """Plan and buffers of the records of one call, for at most `bound` buckets of an item and head.

    Args:
        bound: rows of the tables.
        programs: of an item and head, in the kernels that take buckets.
        sector_bits: of the number of sectors for the counters of an item and head.
        bins: `[L + 1, 3]` int32, see `buckets.plan_kernel`.
        windows: `[bound, 6]` int32, see there.
        starts: `[B, M, bound + 1]` int32, first record of each bucket.
        records: `[B, M, Q * L * K, 2]` int32, of 4 words where value is float32.
    """

    bound: int
    programs: int
    sector_bits: int
    bins: Tensor
    windows: Tensor
    starts: Tensor
    records: Tensor

    @property
    def capacity(self) -> int:
        """Records of an item and head."""
        return self.records.shape[1]


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
    offsets = None if offsets is None else _align(offsets)
    samples = (_align(places), offsets, _align(weights))
    return Call(_align(value), shapes, starts, *samples, sizes, value_layout, thin_levels)


def _align(tensor: Tensor) -> Tensor:
    """Returns a contiguous tensor that starts at a multiple of 16 bytes of its memory, as its memory does of all."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.storage_offset() * tensor.element_size() % 16 else tensor


def run_forward(call: Call) -> Tensor:
    """Returns `[B, Q, M*D]` in the dtype of value."""
    sizes = call.sizes
    output = call.value.new_empty(sizes.batch, sizes.num_queries, sizes.num_heads * sizes.head_dim)
    if output.numel() > 0:
        forward_launch(call, output).run(output)
    return output


def forward_launch(call: Call, output: Tensor) -> Launch:
    """Returns the launch that fills `output`."""
    shape = call.launch_shape("forward")
    arguments = {
        "value": call.value,
        "output": output,
        "D": call.sizes.head_dim,
        "WARPS": shape.warps,
        "ITERATIONS": shape.iterations,
        **call.samples,
        **call.strides,
    }
    programs = call.count_programs(shape) * (call.sizes.head_dim // 32)
    return Launch(forward_kernel, programs, arguments, shape.warps, shape.registers)


def run_backward(
    call: Call,
    grad_output: Tensor,
    wanted: Wanted,
    compute_grad_value: bool,
    grad_value: Tensor | None,
    scatter: Scatter,
    deterministic: bool,
) -> Tensor | None:
    """Writes the gradients of `wanted` and returns that of value in float32, where it is asked for.

    Args:
        call: inputs of the forward.
        grad_output: `[B, Q, M*D]`, dtype of value.
        wanted: buffers to fill.
        compute_grad_value: whether to compute the gradient of value.
        grad_value: like value, contiguous, float32: what to add it to and to return; None for zeros.
        scatter: the way to it.
        deterministic: whether it must be the same in every run, which takes records, and value in half precision.

    Raises:
        ValueError: if value is float32 and `deterministic`: its records of 16 bytes have no order.
    """
    if deterministic and call.value.dtype == torch.float32:
        raise ValueError(
            "deterministic must be False where value is float32, got True; take the plain kernels' sorted sums"
        )
    if grad_output.numel() == 0:
        return _zeros(call) if compute_grad_value and grad_value is None else grad_value
    grad_output = _align(grad_output)
    if not compute_grad_value:
        main_launch(call, grad_output, wanted, None, None, None).run(call.value)
        return None
    if scatter == "atomics":
        assert not deterministic, "atomics add in any order"
        grad_value = _zeros(call) if grad_value is None else grad_value
        main_launch(call, grad_output, wanted, grad_value, None, None).run(call.value)
        return grad_value
    fresh = torch.empty_like(call.value, dtype=torch.float32) if grad_value is None else None
    buckets = _write_records(call, grad_output, wanted, fresh)
    grad_value = fresh if grad_value is None else grad_value
    assert grad_value is not None
    if deterministic:
        sort_launch(call, buckets).run(call.value)
    for colour in range(NUM_COLOURS) if deterministic else (None,):
        reduce_launch(call, grad_output, buckets, grad_value, colour).run(call.value)
    return grad_value


def _zeros(call: Call) -> Tensor:
    return torch.zeros_like(call.value, dtype=torch.float32)


def _write_records(call: Call, grad_output: Tensor, wanted: Wanted, zeroed: Tensor | None) -> Buckets:
    """Plans the buckets, counts their samples, and fills them, the gradients of `wanted`, and `zeroed` with zeros."""
    buckets, counters = allocate_buckets(call)
    for launch in plan_launches(call, buckets, counters):
        launch.run(call.value)
    main_launch(call, grad_output, wanted, zeroed, buckets, counters).run(call.value)
    return buckets


def allocate_buckets(call: Call) -> tuple[Buckets, Tensor]:
    """Returns the tables and buffers of the records of a call, not yet filled, and its counters.

    Counters are `[B, M, 2^sector_bits, SECTOR]` int32; nothing needs them once the records are written.
    """
    sizes = call.sizes
    num_samples = sizes.num_queries * sizes.num_levels * sizes.num_points
    extent = (sizes.value_length, sizes.num_levels, num_samples)
    bound = plan.bound_buckets(*extent)

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=call.value.device)

    buckets = Buckets(
        bound,
        plan.expect_buckets(*extent),
        plan.choose_sector_bits(*extent),
        bins=empty(sizes.num_levels + 1, 3),
        windows=empty(bound, plan.WINDOW_FIELDS.value),
        starts=empty(call.planes, bound + 1),
        records=empty(call.planes, num_samples, 4 if call.value.dtype == torch.float32 else 2),
    )
    return buckets, empty(call.planes, 1 << buckets.sector_bits, plan.SECTOR.value)


def plan_launches(call: Call, buckets: Buckets, counters: Tensor) -> tuple[Launch, ...]:
    """Returns the launches that fill the tables, count the samples of each bucket, and sum the counts up."""
    sizes = call.sizes
    tables = {"bins": buckets.bins, "counters": counters, "sector_bits": buckets.sector_bits}
    programs = triton.cdiv(buckets.programs, _PLAN_BLOCK)
    plan_arguments = {
        **tables,
        **call.tables,
        "windows": buckets.windows,
        "bound": buckets.bound,
        "level_samples": sizes.num_queries * sizes.num_points,
        "programs": programs,
        "L": sizes.num_levels,
        "LIMIT": plan.BUCKET_LIMIT,
        "BLOCK": _PLAN_BLOCK,
    }
    shape = call.launch_shape("backward")
    count_arguments = {**tables, **call.samples, "WARPS": shape.warps, "ITERATIONS": shape.iterations}
    scan_arguments = {
        **tables,
        "starts": buckets.starts,
        "bound": buckets.bound,
        "L": sizes.num_levels,
        "BLOCK": _SCAN_BLOCK,
    }
    return (
        Launch(plan.plan_kernel, call.planes * programs, plan_arguments, num_warps=2),
        Launch(plan.count_kernel, call.count_programs(shape), count_arguments, shape.warps),
        Launch(plan.scan_kernel, call.planes, scan_arguments, num_warps=4),
    )


def main_launch(
    call: Call,
    grad_output: Tensor,
    wanted: Wanted,
    grad_value: Tensor | None,
    buckets: Buckets | None,
    counters: Tensor | None,
) -> Launch:
    """Returns the launch that fills `wanted`, and adds to `grad_value` or, given buckets, writes records.

    Given buckets, `grad_value` is filled with zeros.
    """
    shape = call.launch_shape("backward")
    arguments = {
        "value": call.value,
        "bins": None if buckets is None else buckets.bins,
        "grad_output": grad_output,
        "grad_value": grad_value,
        "grad_locations": wanted.locations,
        "grad_offsets": wanted.offsets,
        "grad_weights": wanted.weights,
        "counters": counters,
        "records": None if buckets is None else buckets.records,
        "sector_bits": 0 if buckets is None else buckets.sector_bits,
        "D": call.sizes.head_dim,
        "SCATTER": "records" if buckets is not None else "none" if grad_value is None else "atomics",
        "WARPS": shape.warps,
        "ITERATIONS": shape.iterations,
        **call.samples,
        **call.strides,
    }
    # Registers are chosen for records of all gradients and 32 channels of halves: other work spills under them.
    common = buckets is not None and wanted.weights is not None and call.sizes.head_dim == 32
    registers = shape.registers if common and call.value.dtype != torch.float32 else None
    if registers is not None and call.thin_levels:
        registers = THIN_REGISTERS
    return Launch(backward_kernel, call.count_programs(shape), arguments, shape.warps, registers)


def reduce_launch(call: Call, grad_output: Tensor, buckets: Buckets, grad_value: Tensor, colour: int | None) -> Launch:
    """Returns the launch that adds the records to `grad_value`, those of all tiles or of the tiles of one colour."""
    sizes = call.sizes
    arguments = {
        "bins": buckets.bins,
        "windows": buckets.windows,
        "starts": buckets.starts,
        "records": buckets.records,
        "grad_output": grad_output,
        "target": grad_value,
        "num_queries": sizes.num_queries,
        "bound": buckets.bound,
        "capacity": buckets.capacity,
        "programs": buckets.programs,
        "colour": 0 if colour is None else colour,
        "M": sizes.num_heads,
        "D": sizes.head_dim,
        "L": sizes.num_levels,
        "COLOURED": colour is not None,
        **call.strides,
    }
    programs = call.planes * buckets.programs * (sizes.head_dim // 32)
    return Launch(reduce_kernel, programs, arguments, 1, REDUCE_REGISTERS[call.value.dtype == torch.float32])


def sort_launch(call: Call, buckets: Buckets) -> Launch:
    """Returns the launch that sorts the records of each bucket."""
    arguments = {
        "bins": buckets.bins,
        "starts": buckets.starts,
        "records": buckets.records.view(torch.int64),
        "bound": buckets.bound,
        "capacity": buckets.capacity,
        "programs": buckets.programs,
        "L": call.sizes.num_levels,
        "BLOCK": _SORT_BLOCK,
    }
    return Launch(sort_kernel, call.planes * buckets.programs, arguments, num_warps=1)
