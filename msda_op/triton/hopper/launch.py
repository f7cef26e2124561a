"""Allocates, picks launch shapes and launches the kernels of the Hopper path.

Calls must be ones that `supports` takes; tensors may have any strides (copied where `call` does not take them as they
are). All that depends on the sizes of levels is computed on the device.
"""

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from msda_op.triton.hopper import buckets as plan
from msda_op.triton.hopper.backward import backward_kernel
from msda_op.triton.hopper.call import Call, align
from msda_op.triton.hopper.deterministic import NUM_COLOURS, PART_BYTES, sort_kernel
from msda_op.triton.hopper.forward import forward_kernel
from msda_op.triton.hopper.reduce import reduce_kernel
from msda_op.triton.hopper.tuning import (
    FLOAT32_REGISTERS,
    REDUCE_REGISTERS,
    THIN_BOX_REGISTERS,
    THIN_REGISTERS,
    Scatter,
)
from msda_op.triton.kernel_launch import Launch

_PLAN_BLOCK = 64
_SCAN_BLOCK = 1024
_SORT_BLOCK = 512


class Wanted(NamedTuple):
    """Buffers for the gradients that the main kernel writes; None for what is not asked for. Contiguous, but that the
    last two may be the parts of one `[B, Q, 3*M*L*K]`, see `call`."""

    locations: Tensor | None
    offsets: Tensor | None
    weights: Tensor | None


class Buckets(NamedTuple):
    """Tables of the buckets of one call; only what belongs to them is ever written or read.

    Args:
        bins: `[L + 1, 3]` int32, see `buckets.plan_kernel`.
        windows: `[bound, 6]` int32, see there.
        starts: `[B, M, bound + 1]` int32, first record of each bucket, and the end.
    """

    bins: Tensor
    windows: Tensor
    starts: Tensor


class Ordered(NamedTuple):
    """One step of a reduction in a fixed order, see `deterministic`.

    Args:
        stage: "parts", or the colour of tiles.
        planes: items and heads, as item * M + head.
        parts: `[len(planes) or more, num_parts * 32 * D]` float32.
        num_parts: of an item and head.
    """

    stage: Literal["parts"] | int
    planes: range
    parts: Tensor
    num_parts: int


def run_forward(call: Call) -> Tensor:
    """Returns `[B, Q, M*D]` in the dtype of value."""
    output = _empty_output(call)
    if output.numel() > 0:
        forward_launch(call, output).run(output)
    return output


def run_counting_forward(call: Call) -> tuple[Tensor, Buckets]:
    """Returns the same and the filled tables of the buckets, whose samples the kernel counts on its way.

    The call must have queries.
    """
    output, buckets, counters = _empty_output(call), allocate_buckets(call), allocate_counters(call)
    plan_launch(call, buckets, counters).run(output)
    forward_launch(call, output, buckets, counters).run(output)
    scan_launch(call, buckets, counters).run(output)
    return output, buckets


def _empty_output(call: Call) -> Tensor:
    sizes = call.sizes
    return call.value.new_empty(sizes.batch, sizes.num_queries, sizes.num_heads * sizes.head_dim)


def forward_launch(
    call: Call, output: Tensor, buckets: Buckets | None = None, counters: Tensor | None = None
) -> Launch:
    """Returns the launch that fills `output` and, given them, counts the samples of buckets."""
    shape = call.launch_shape("forward")
    arguments = {
        "value": call.value,
        "bins": None if buckets is None else buckets.bins,
        "output": output,
        "counters": counters,
        "sector_bits": 0 if buckets is None else call.bucket_sizes.sector_bits,
        "D": call.sizes.head_dim,
        "COUNT": buckets is not None,
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
    counted: Buckets | None = None,
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
        counted: filled tables of the buckets, from `run_counting_forward` of the same call; None to count here.

    Raises:
        ValueError: if value is float32 and `deterministic`: its records of 16 bytes have no order.
    """
    if deterministic and call.value.dtype == torch.float32:
        raise ValueError(
            "deterministic must be False where value is float32, got True; take the plain kernels' sorted sums"
        )
    if grad_output.numel() == 0:
        return _zeros(call) if compute_grad_value and grad_value is None else grad_value
    grad_output = align(grad_output)
    if not compute_grad_value:
        main_launch(call, grad_output, wanted, None).run(call.value)
        return None
    if scatter == "atomics":
        assert not deterministic, "atomics add in any order"
        grad_value = _zeros(call) if grad_value is None else grad_value
        main_launch(call, grad_output, wanted, grad_value).run(call.value)
        return grad_value
    fresh = torch.empty_like(call.value, dtype=torch.float32) if grad_value is None else None
    buckets, counters = count_samples(call) if counted is None else (counted, take_seats(call, counted))
    records = allocate_records(call)
    main_launch(call, grad_output, wanted, fresh, buckets, counters, records).run(call.value)
    del counters  # nothing needs them once the records are written
    grad_value = fresh if grad_value is None else grad_value
    assert grad_value is not None
    if deterministic:
        sort_launch(call, buckets, records).run(call.value)
        _reduce_in_order(call, grad_output, buckets, records, grad_value)
    else:
        reduce_launch(call, grad_output, buckets, records, grad_value).run(call.value)
    return grad_value


def _reduce_in_order(call: Call, grad_output: Tensor, buckets: Buckets, records: Tensor, grad_value: Tensor) -> None:
    sizes = call.sizes
    num_parts = plan.bound_split_buckets(sizes.num_queries * sizes.num_levels * sizes.num_points)
    words = num_parts * plan.WINDOW_H.value * plan.WINDOW_W.value * sizes.head_dim
    num_planes = min(call.planes, max(1, PART_BYTES // (4 * max(words, 1))))
    parts = torch.empty(num_planes, words, dtype=torch.float32, device=call.value.device)
    for first in range(0, call.planes, num_planes):
        planes = range(first, min(first + num_planes, call.planes))
        for stage in ("parts", *range(NUM_COLOURS)):
            step = Ordered(stage, planes, parts, num_parts)
            reduce_launch(call, grad_output, buckets, records, grad_value, step).run(call.value)


def _zeros(call: Call) -> Tensor:
    return torch.zeros_like(call.value, dtype=torch.float32)


def count_samples(call: Call) -> tuple[Buckets, Tensor]:
    """Plans the buckets and counts their samples; returns the filled tables, and counters that stand at the starts."""
    buckets, counters = allocate_buckets(call), allocate_counters(call)
    for launch in (plan_launch, count_launch, scan_launch):
        launch(call, buckets, counters).run(call.value)
    return buckets, counters


def take_seats(call: Call, buckets: Buckets) -> Tensor:
    """Returns counters that stand at the starts of filled tables."""
    counters = allocate_counters(call)
    seat_launch(call, buckets, counters).run(call.value)
    return counters


def _empty_words(call: Call, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int32, device=call.value.device)


def allocate_buckets(call: Call) -> Buckets:
    """Returns tables of the buckets, not yet filled."""
    bound = call.bucket_sizes.bound
    return Buckets(
        bins=_empty_words(call, call.sizes.num_levels + 1, 3),
        windows=_empty_words(call, bound, plan.WINDOW_FIELDS.value),
        starts=_empty_words(call, call.planes, bound + 1),
    )


def allocate_counters(call: Call) -> Tensor:
    """Returns `[B, M, 2^sector_bits, SECTOR]` int32."""
    return _empty_words(call, call.planes, 1 << call.bucket_sizes.sector_bits, plan.SECTOR.value)


def allocate_records(call: Call) -> Tensor:
    """Returns `[B, M, Q * L * K, 2]` int32, of 4 words where value is float32."""
    sizes = call.sizes
    words = 4 if call.value.dtype == torch.float32 else 2
    return _empty_words(call, call.planes, sizes.num_queries * sizes.num_levels * sizes.num_points, words)


def plan_launch(call: Call, buckets: Buckets, counters: Tensor) -> Launch:
    """Returns the launch that plans the buckets and zeroes their counters."""
    sizes, bucket_sizes = call.sizes, call.bucket_sizes
    programs = -(-bucket_sizes.programs // _PLAN_BLOCK)
    arguments = {
        **call.tables,
        "bins": buckets.bins,
        "windows": buckets.windows,
        "counters": counters,
        "level_samples": sizes.num_queries * sizes.num_points,
        "bound": bucket_sizes.bound,
        "sector_bits": bucket_sizes.sector_bits,
        "programs": programs,
        "L": sizes.num_levels,
        "LIMIT": plan.BUCKET_LIMIT,
        "BLOCK": _PLAN_BLOCK,
    }
    return Launch(plan.plan_kernel, call.planes * programs, arguments, num_warps=2)


def count_launch(call: Call, buckets: Buckets, counters: Tensor) -> Launch:
    """Returns the launch that counts the samples of planned buckets."""
    shape = call.launch_shape("count")
    arguments = {
        **call.samples,
        "bins": buckets.bins,
        "counters": counters,
        "sector_bits": call.bucket_sizes.sector_bits,
        "WARPS": shape.warps,
        "ITERATIONS": shape.iterations,
    }
    return Launch(plan.count_kernel, call.count_programs(shape), arguments, shape.warps, shape.registers)


def _start_launch(kernel: Any, call: Call, buckets: Buckets, counters: Tensor) -> Launch:
    bucket_sizes = call.bucket_sizes
    arguments = {
        "bins": buckets.bins,
        "counters": counters,
        "starts": buckets.starts,
        "bound": bucket_sizes.bound,
        "sector_bits": bucket_sizes.sector_bits,
        "L": call.sizes.num_levels,
        "BLOCK": _SCAN_BLOCK,
    }
    return Launch(kernel, call.planes, arguments, num_warps=4)


def scan_launch(call: Call, buckets: Buckets, counters: Tensor) -> Launch:
    """Returns the launch that sums counters up to starts, in place and in the tables."""
    return _start_launch(plan.scan_kernel, call, buckets, counters)


def seat_launch(call: Call, buckets: Buckets, counters: Tensor) -> Launch:
    """Returns the launch that sets counters to the starts of filled tables."""
    return _start_launch(plan.seat_kernel, call, buckets, counters)


def main_launch(
    call: Call,
    grad_output: Tensor,
    wanted: Wanted,
    grad_value: Tensor | None,
    buckets: Buckets | None = None,
    counters: Tensor | None = None,
    records: Tensor | None = None,
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
        "records": records,
        "sector_bits": 0 if buckets is None else call.bucket_sizes.sector_bits,
        "D": call.sizes.head_dim,
        "JOINT": wanted.offsets is not None and not wanted.offsets.is_contiguous(),
        "SCATTER": "records" if buckets is not None else "none" if grad_value is None else "atomics",
        "WARPS": shape.warps,
        "ITERATIONS": shape.iterations,
        **call.samples,
        **call.strides,
    }
    # Registers are chosen for records of all gradients and 32 channels: other work spills under them.
    common = buckets is not None and wanted.weights is not None and call.sizes.head_dim == 32
    registers = shape.registers if common else None
    if registers is not None and call.value.dtype == torch.float32:
        registers = None if call.thin_levels else FLOAT32_REGISTERS
    elif registers is not None and call.thin_levels:
        registers = THIN_BOX_REGISTERS if call.places.shape[-1] == 4 else THIN_REGISTERS
    return Launch(backward_kernel, call.count_programs(shape), arguments, shape.warps, registers)


def reduce_launch(
    call: Call,
    grad_output: Tensor,
    buckets: Buckets,
    records: Tensor,
    grad_value: Tensor,
    step: Ordered | None = None,
) -> Launch:
    """Returns the launch that adds the records to `grad_value`, all in any order, or takes one step in order."""
    sizes, bucket_sizes = call.sizes, call.bucket_sizes
    arguments = {
        "bins": buckets.bins,
        "windows": buckets.windows,
        "starts": buckets.starts,
        "records": records,
        "grad_output": grad_output,
        "target": grad_value,
        "parts": None if step is None else step.parts,
        "num_queries": sizes.num_queries,
        "bound": bucket_sizes.bound,
        "capacity": records.shape[1],
        "programs": bucket_sizes.programs,
        "first_plane": 0 if step is None else step.planes.start,
        "num_parts": 0 if step is None else step.num_parts,
        "colour": 0 if step is None or step.stage == "parts" else step.stage,
        "M": sizes.num_heads,
        "D": sizes.head_dim,
        "L": sizes.num_levels,
        "STAGE": "buckets" if step is None else "parts" if step.stage == "parts" else "colour",
        **call.strides,
    }
    planes = call.planes if step is None else len(step.planes)
    programs = planes * bucket_sizes.programs * (sizes.head_dim // 32)
    return Launch(reduce_kernel, programs, arguments, 1, REDUCE_REGISTERS[call.value.dtype == torch.float32])


def sort_launch(call: Call, buckets: Buckets, records: Tensor) -> Launch:
    """Returns the launch that sorts the records of each bucket."""
    bucket_sizes = call.bucket_sizes
    arguments = {
        "bins": buckets.bins,
        "starts": buckets.starts,
        "records": records.view(torch.int64),
        "bound": bucket_sizes.bound,
        "capacity": records.shape[1],
        "programs": bucket_sizes.programs,
        "L": call.sizes.num_levels,
        "BLOCK": _SORT_BLOCK,
    }
    return Launch(sort_kernel, call.planes * bucket_sizes.programs, arguments, num_warps=1)
