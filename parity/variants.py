"""Instructive variants: what each habit of the kernels, and of timing them, is worth on the card at hand."""

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor

from models.layers.fused_norm import backward_launch
from models.layers.row_sum import add_partial_sums
from msda_op.reference import ms_deform_attn_reference
from parity.cases import OpInputs
from parity.comparisons import evaluate
from parity.gather_kernel import gather_rows
from parity.sweep import plain_launches, start_launch, sweep_launch
from parity.timing import Stopwatch, measure_device_time, measure_wall_time

Row = dict[str, Any]
_EPS = 1e-5
"""Of a LayerNorm's variance, PyTorch's default."""


def coalescing_and_unrolling(device: torch.device, dtype: torch.dtype, stopwatch: Stopwatch, repeats: int) -> list[Row]:
    """Times the gather of 16 rows of 32 channels a query with coalescing and unrolling taken away one by one."""
    generator = torch.Generator(device).manual_seed(0)
    num_rows, num_queries, num_points, head_dim = 1 << 18, 1 << 18, 16, 32
    table = torch.randn(num_rows, head_dim, generator=generator, device=device).to(dtype)
    rows = torch.randint(num_rows, (num_queries, num_points), generator=generator, device=device, dtype=torch.int32)
    weights = torch.rand(num_queries, num_points, generator=generator, device=device)
    channels_apart = table.t().contiguous().t()
    variants: dict[str, Callable[[], Tensor]] = {
        "rows of contiguous channels, unrolled": lambda: gather_rows(
            table, rows, weights, contiguous=True, unrolled=True
        ),
        "unrolling off": lambda: gather_rows(table, rows, weights, contiguous=True, unrolled=False),
        "stride hidden from the compiler": lambda: gather_rows(table, rows, weights, contiguous=False, unrolled=True),
        "channels far apart": lambda: gather_rows(channels_apart, rows, weights, contiguous=False, unrolled=True),
    }
    first = next(iter(variants.values()))()
    result = []
    for name, call in variants.items():
        torch.testing.assert_close(call(), first)
        time = measure_device_time(call, stopwatch, repeats)
        result.append({"group": "gather", "variant": name, **asdict(time.ms)})
    return result


def half_atomics(inputs: OpInputs, stopwatch: Stopwatch, repeats: int) -> list[Row]:
    """Times the plain backward with sums of the value gradient in float32 and in the dtype of value; with its error.

    The error is relative, in the mean over the first batch item, against float64.
    """
    first = OpInputs(
        inputs.value[:1],
        inputs.spatial_shapes,
        inputs.sampling_locations[:1],
        inputs.attention_weights[:1],
        inputs.grad_output[:1],
    )
    expected = evaluate(ms_deform_attn_reference, first.double(), ("value",))["value"]
    result = []
    for accumulator in dict.fromkeys((torch.float32, inputs.value.dtype)):
        launch = plain_launches(inputs, accumulator)["backward"]
        start_launch(launch)
        grad_value = launch.arguments["grad_value"][0, :1].double()
        error = (grad_value - expected).abs().mean() / expected.abs().mean()
        time = measure_device_time(partial(start_launch, launch), stopwatch, repeats)
        name = f"value gradient added up in {str(accumulator).removeprefix('torch.')}"
        result.append({"group": "atomics", "variant": name, "relative_error": error.item(), **asdict(time.ms)})
    return result


def backward_shapes(inputs: OpInputs, stopwatch: Stopwatch, repeats: int) -> list[Row]:
    """Times the plain backward in every launch shape."""
    launch = plain_launches(inputs)["backward"]
    rows = sweep_launch(launch, lambda call: measure_device_time(call, stopwatch, repeats).ms)
    return [
        {"group": "backward shapes", "variant": f"{row.pop('block_q')} queries, {row.pop('num_warps')} warps", **row}
        for row in rows
    ]


def norm_gradients(grad_output: Tensor, stopwatch: Stopwatch, repeats: int) -> list[Row]:
    """Times the backward pass of residual and LayerNorm with both ways to add up the parameters' gradients.

    The error is relative, in the mean over weight and bias, against float64; `repeatable` says whether five runs gave
    the same bits.

    Args:
        grad_output: `[rows, C]`; the norm's inputs are drawn in its dtype.
        stopwatch: of its device.
        repeats: of each.
    """
    generator = torch.Generator(grad_output.device).manual_seed(0)
    drawn = [torch.randn(grad_output.shape, generator=generator, device=grad_output.device) for _ in range(2)]
    residual, branch = (tensor.to(grad_output.dtype) for tensor in drawn)
    weight = torch.ones(grad_output.shape[1], device=grad_output.device)
    summed = residual.double() + branch.double()
    mean, deviation = summed.mean(1), (summed.var(1, correction=0) + _EPS).sqrt()
    normalised = (summed - mean[:, None]) / deviation[:, None]
    expected = torch.stack(((grad_output.double() * normalised).sum(0), grad_output.double().sum(0)))
    statistics = (mean.float(), deviation.reciprocal().float())

    def add_up(atomic: bool) -> Tensor:
        launch = backward_launch(grad_output, residual, branch, weight, None, *statistics, 0.0, atomic)
        launch.run(residual)
        sums: Tensor = launch.arguments["sums"]
        return sums[0] if atomic else add_partial_sums(sums.flatten(1), sums).view_as(sums[0])

    result = []
    for name, atomic in (("a partial sum a program, added up by another kernel", False), ("atomics", True)):
        first = add_up(atomic)
        row: Row = {"group": "norm gradients", "variant": name, "shipped": not atomic}
        row["relative_error"] = ((first.double() - expected).abs().mean() / expected.abs().mean()).item()
        row["repeatable"] = all(torch.equal(first, add_up(atomic)) for _ in range(4))
        time = measure_device_time(partial(add_up, atomic), stopwatch, repeats)
        result.append(row | asdict(time.ms))
    return result


def timing_pitfalls(call: Callable[[], Any], stopwatch: Stopwatch, repeats: int) -> list[Row]:
    """Times one and the same call rightly and in the ways that mislead.

    Args:
        call: what to time; the shorter it is, the larger the mistakes.
        stopwatch: of the device.
        repeats: of each.
    """
    right = measure_device_time(call, stopwatch, repeats).ms
    drained = measure_device_time(call, stopwatch, repeats, keeps_host_ahead=False).ms
    warm = measure_device_time(call, stopwatch, repeats, flushes=False).ms
    wall = measure_wall_time(call, stopwatch.synchronize, repeats=repeats)
    named = {
        "events, host ahead, L2 flushed (device time)": right,
        "events on a drained queue: dispatch counts": drained,
        "L2 left warm by the call before": warm,
        "wall clock, synchronised in the loop: dispatch and wait count": wall,
    }
    return [{"group": "timing", "variant": name, **asdict(time)} for name, time in named.items()]
