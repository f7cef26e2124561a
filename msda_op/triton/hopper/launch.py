"""Allocates, picks launch shapes and launches the kernels of the Hopper path.

Calls must be ones that `supports` takes; tensors may have any strides (copied where they are not contiguous and
aligned).
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
from torch import Tensor

from msda_op.levels import HostShapes, level_starts
from msda_op.triton.hopper.backward import backward_kernel
from msda_op.triton.hopper.buckets import (
    COUNTER_STRIDE,
    WINDOW_H,
    WINDOW_W,
    BucketPlan,
    choose_splits,
    count_kernel,
    plan_buckets,
    scan_kernel,
)
from msda_op.triton.hopper.deterministic import combine_kernel, sort_kernel
from msda_op.triton.hopper.forward import forward_kernel
from msda_op.triton.hopper.reduce import reduce_kernel
from msda_op.triton.hopper.tuning import LaunchShape, Pass, Scatter, choose_launch_shape, choose_scatter

_SCAN_BLOCK = 1024
_SORT_BLOCK = 512
_COMBINE_BLOCK = 32


@dataclass(frozen=True)
class Samples:
    """Where to sample and how to weigh it.

    Args:
        places: sampling locations `[B, Q, M, L, K, 2]`, or reference points `[B, Q, L, 2 or 4]`; float32.
        offsets: `[B, Q, M, L, K, 2]`, only with reference points.
        weights: `[B, Q, M, L, K]`, attention weights, or logits with reference points.
    """

    places: Tensor
    offsets: Tensor | None
    weights: Tensor

    @property
    def reference(self) -> int:
        """Numbers of a reference point, 0 for locations."""
        return 0 if self.offsets is None else self.places.shape[-1]


@dataclass(frozen=True)
class Call:
    """Contiguous inputs of a call, and its sizes."""

    value: Tensor
    spatial_shapes: HostShapes
    samples: Samples
    value_layout: str

    @property
    def batch(self) -> int:
        return self.value.shape[0]

    @property
    def head_dim(self) -> int:
        return self.value.shape[3]

    @property
    def sizes(self) -> dict[str, int]:
        """The constants that all kernels take."""
        _, _, num_heads, num_levels, num_points = self.samples.weights.shape
        return {"M": num_heads, "L": num_levels, "K": num_points}

    @property
    def num_queries(self) -> int:
        return self.samples.weights.shape[1]

    @property
    def strides(self) -> tuple[int, int, int]:
        """Elements from an item, a head and a pixel of value to the next."""
        item, first, second, _ = self.value.stride()
        return (item, first, second) if self.value_layout == "BNLC" else (item, second, first)

    def launch_shape(self, stage: Pass) -> LaunchShape:
        """Returns the launch shape of a pass."""
        return choose_launch_shape(stage, self.batch * self.sizes["M"] * triton.cdiv(self.num_queries, 2))

    def count_programs(self, shape: LaunchShape) -> int:
        """Returns the programs of a kernel that takes one head of some queries."""
        return self.batch * self.sizes["M"] * triton.cdiv(self.num_queries, 2 * shape.warps * shape.iterations)

    def levels(self) -> Tensor:
        """Returns `[L, 3]` (h, w, first row) on the device of value."""
        return _level_table(self.spatial_shapes, self.value.device)


@lru_cache(maxsize=1024)
def _level_table(spatial_shapes: HostShapes, device: torch.device) -> Tensor:
    rows = [(h, w, start) for (h, w), start in zip(spatial_shapes, level_starts(spatial_shapes), strict=True)]
    with torch.inference_mode(False):
        return torch.tensor(rows, dtype=torch.int32, device=device)


def _align(tensor: Tensor) -> Tensor:
    """Returns a contiguous tensor whose first element stands at a multiple of 16 bytes."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def prepare_call(
    value: Tensor,
    spatial_shapes: HostShapes,
    places: Tensor,
    offsets: Tensor | None,
    weights: Tensor,
    value_layout: str,
) -> Call:
    """Returns the call with contiguous, aligned tensors and float32 places."""
    samples = Samples(_align(places.float()), None if offsets is None else _align(offsets), _align(weights))
    return Call(_align(value), tuple(spatial_shapes), samples, value_layout)


def run_forward(call: Call) -> Tensor:
    """Returns `[B, Q, M*D]` in the dtype of value."""
    num_channels = call.sizes["M"] * call.head_dim
    output = call.value.new_empty(call.batch, call.num_queries, num_channels)
    if output.numel() == 0:
        return output
    shape = call.launch_shape("forward")
    batch_stride, head_stride, pixel_stride = call.strides
    with torch.cuda.device_of(call.value):
        forward_kernel[(call.count_programs(shape) * (call.head_dim // 32),)](
            call.value,
            call.levels(),
            call.samples.places,
            call.samples.offsets,
            call.samples.weights,
            output,
            call.num_queries,
            batch_stride,
            head_stride,
            PIXEL_STRIDE=pixel_stride,
            D=call.head_dim,
            REFERENCE=call.samples.reference,
            WARPS=shape.warps,
            ITERATIONS=shape.iterations,
            num_warps=shape.warps,
            maxnreg=shape.registers,
            **call.sizes,
        )
    return output


@dataclass(frozen=True)
class Wanted:
    """Gradients that the main kernel writes; None where not asked for, and the value gradient it adds to."""

    locations: Tensor | None
    offsets: Tensor | None
    weights: Tensor | None


@dataclass(frozen=True)
class Buckets:
    """Plan and buffers of the records of one call."""

    plan: BucketPlan
    counters: Tensor
    starts: Tensor
    records: Tensor


def run_backward(
    call: Call,
    grad_output: Tensor,
    wanted: Wanted,
    compute_grad_value: bool,
    deterministic: bool,
    scatter: Scatter | None,
) -> Tensor | None:
    """Writes the gradients of `wanted` and returns that of value, in its dtype, where it is asked for.

    Args:
        call: inputs of the forward.
        grad_output: `[B, Q, M*D]`, dtype of value.
        wanted: buffers to fill.
        compute_grad_value: whether to return the gradient of value.
        deterministic: whether it must be the same in every run.
        scatter: "atomics" or "records"; None for the faster. Deterministic gradients always take records.
    """
    if grad_output.numel() == 0:
        return torch.zeros_like(call.value) if compute_grad_value else None
    grad_output = _align(grad_output)
    with torch.cuda.device_of(call.value):
        if not compute_grad_value:
            _run_main(call, grad_output, wanted, None, None)
            return None
        if not deterministic and (scatter or choose_scatter(call.samples.weights.numel())) == "atomics":
            grad_value = torch.zeros_like(call.value, dtype=torch.float32)
            _run_main(call, grad_output, wanted, grad_value, None)
            return grad_value.to(call.value.dtype)
        buckets = _fill_starts(call)
        _run_main(call, grad_output, wanted, None, buckets)
        if deterministic:
            return _combine_windows(call, grad_output, buckets)
        grad_value = torch.zeros_like(call.value, dtype=torch.float32)
        _reduce(call, grad_output, buckets, grad_value, atomic=True)
        del buckets  # its memory is free for the rounded gradient
        return grad_value.to(call.value.dtype)


def _fill_starts(call: Call) -> Buckets:
    """Counts the samples of each bucket and gives each bucket its place."""
    splits = choose_splits(call.spatial_shapes, call.num_queries, call.sizes["K"])
    plan = plan_buckets(call.spatial_shapes, splits, call.value.device)
    planes = call.batch * call.sizes["M"]
    capacity = call.num_queries * call.sizes["L"] * call.sizes["K"]
    device = call.value.device
    counters = torch.zeros(planes, plan.num_buckets, COUNTER_STRIDE.value, dtype=torch.int32, device=device)
    starts = torch.empty(planes, plan.num_buckets, dtype=torch.int32, device=device)
    records = torch.empty(planes, capacity, 2, dtype=torch.int32, device=device)
    shape = call.launch_shape("fused backward" if call.samples.reference else "backward")
    count_kernel[(call.count_programs(shape),)](
        call.levels(),
        plan.bins,
        call.samples.places,
        call.samples.offsets,
        call.samples.weights,
        counters,
        call.num_queries,
        plan.num_buckets,
        REFERENCE=call.samples.reference,
        WARPS=shape.warps,
        ITERATIONS=shape.iterations,
        num_warps=shape.warps,
        **call.sizes,
    )
    scan_kernel[(planes,)](counters, starts, plan.num_buckets, BLOCK=_SCAN_BLOCK, num_warps=4)
    return Buckets(plan, counters, starts, records)


def _run_main(
    call: Call, grad_output: Tensor, wanted: Wanted, grad_value: Tensor | None, buckets: Buckets | None
) -> None:
    shape = call.launch_shape("fused backward" if call.samples.reference else "backward")
    batch_stride, head_stride, pixel_stride = call.strides
    backward_kernel[(call.count_programs(shape),)](
        call.value,
        call.levels(),
        None if buckets is None else buckets.plan.bins,
        call.samples.places,
        call.samples.offsets,
        call.samples.weights,
        grad_output,
        grad_value,
        wanted.locations,
        wanted.offsets,
        wanted.weights,
        None if buckets is None else buckets.counters,
        None if buckets is None else buckets.records,
        call.num_queries,
        batch_stride,
        head_stride,
        0 if buckets is None else buckets.plan.num_buckets,
        PIXEL_STRIDE=pixel_stride,
        D=call.head_dim,
        REFERENCE=call.samples.reference,
        SCATTER="records" if buckets is not None else "none" if grad_value is None else "atomics",
        WARPS=shape.warps,
        ITERATIONS=shape.iterations,
        num_warps=shape.warps,
        # Chosen for 32 channels and records: more channels spill under it, and less work needs less.
        maxnreg=shape.registers if buckets is not None and call.head_dim == 32 else None,
        **call.sizes,
    )


def _reduce(call: Call, grad_output: Tensor, buckets: Buckets, target: Tensor, atomic: bool) -> None:
    batch_stride, head_stride, pixel_stride = call.strides
    reduce_kernel[(buckets.starts.numel(), call.head_dim // 32)](
        buckets.plan.windows,
        buckets.counters,
        buckets.starts,
        buckets.records,
        grad_output,
        target,
        call.num_queries,
        batch_stride,
        head_stride,
        buckets.plan.num_buckets,
        buckets.records.shape[1],
        PIXEL_STRIDE=pixel_stride,
        M=call.sizes["M"],
        D=call.head_dim,
        ATOMIC=atomic,
        num_warps=1,
    )


def _combine_windows(call: Call, grad_output: Tensor, buckets: Buckets) -> Tensor:
    """Returns the gradient of value by sorted records and windows added up in order."""
    num_buckets = buckets.starts.numel()
    sort_kernel[(num_buckets,)](
        buckets.counters,
        buckets.starts,
        buckets.records.view(torch.int64),
        buckets.plan.num_buckets,
        buckets.records.shape[1],
        BLOCK=min(_SORT_BLOCK, max(32, triton.next_power_of_2(buckets.records.shape[1]))),
        num_warps=1,
    )
    windows = torch.empty(
        num_buckets, WINDOW_H.value, WINDOW_W.value, call.head_dim, dtype=torch.float32, device=call.value.device
    )
    _reduce(call, grad_output, buckets, windows, atomic=False)
    grad_value = torch.empty_like(call.value)
    batch_stride, head_stride, pixel_stride = call.strides
    blocks = sum(triton.cdiv(h * w, _COMBINE_BLOCK) for h, w in call.spatial_shapes)
    combine_kernel[(blocks, call.batch * call.sizes["M"])](
        call.levels(),
        buckets.plan.bins,
        windows,
        grad_value,
        buckets.plan.num_buckets,
        batch_stride,
        head_stride,
        PIXEL_STRIDE=pixel_stride,
        M=call.sizes["M"],
        D=call.head_dim,
        L=call.sizes["L"],
        BLOCK=_COMBINE_BLOCK,
        num_warps=4,
    )
    return grad_value
