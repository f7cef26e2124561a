"""Tries launch shapes of the Hopper kernels on the card at hand; winners belong into `msda_op.triton.hopper.tuning`.

A full grid of warps, pairs of queries and registers would compile for a quarter of an hour. So registers are tried at
the shipped shape first, and then shapes with the fastest registers.
"""

from collections.abc import Callable
from dataclasses import asdict
from itertools import product
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from msda_op.levels import device_tables, may_be_thin
from msda_op.options import DEFAULT_OPTIONS, read_sizes
from msda_op.triton.hopper import launch
from msda_op.triton.hopper.call import Call, prepare_call
from msda_op.triton.hopper.support import supports
from msda_op.triton.hopper.tuning import LaunchShape, choose_scatter
from msda_op.triton.kernel_launch import Launch
from parity.cases import OpInputs
from parity.timing import Summary

_WARPS = (1, 2, 4, 8)
_ITERATIONS = (1, 2, 4, 8)
_REGISTERS = (None, 48, 56, 64, 72, 80, 88, 96, 104, 112, 120, 124, 128, 144, 168)

Row = dict[str, Any]


class Sweep(NamedTuple):
    """What to time.

    Args:
        launch: of the kernel; running it again must be harmless.
        prepare: launches that it needs before each run, timed with it; they take a few microseconds.
        has_shape: whether it takes pairs of queries, and not buckets.
    """

    launch: Launch
    prepare: tuple[Launch, ...] = ()
    has_shape: bool = True

    @property
    def shipped(self) -> LaunchShape:
        """The shape that the launch module has chosen."""
        arguments = self.launch.arguments
        return LaunchShape(self.launch.num_warps, arguments.get("ITERATIONS", 1), self.launch.registers)

    def reshaped(self, shape: LaunchShape) -> Launch:
        """Returns the launch with another shape."""
        if not self.has_shape:
            return self.launch._replace(registers=shape.registers)
        arguments = self.launch.arguments

        def count_tiles(warps: int, iterations: int) -> int:
            return triton.cdiv(arguments["num_queries"], 2 * warps * iterations)

        columns = self.launch.num_programs // count_tiles(arguments["WARPS"], arguments["ITERATIONS"])
        return self.launch._replace(
            arguments={**arguments, "WARPS": shape.warps, "ITERATIONS": shape.iterations},
            num_programs=columns * count_tiles(shape.warps, shape.iterations),
            num_warps=shape.warps,
            registers=shape.registers,
        )


def hopper_sweeps(inputs: OpInputs, capability: tuple[int, int]) -> dict[str, Sweep]:
    """Returns what there is to time on a workload, by pass, all gradients asked for; nothing of what is not supported.

    Args:
        inputs: of the op; offsets and points of the fused passes are made of the locations.
        capability: compute capability of the GPU.
    """
    value, locations, weights = inputs.value, inputs.sampling_locations, inputs.attention_weights
    tables = device_tables(inputs.spatial_shapes, None, value.device)
    points = locations[:, :, 0, :, 0].contiguous()
    samples = {"": (locations, None), "fused ": (points, (locations * 7).frac().to(value.dtype))}
    found: dict[str, Sweep] = {}
    for word, (places, offsets) in samples.items():
        sizes = read_sizes(value, weights, "BLNC")
        refusal = supports(sizes, value.dtype, DEFAULT_OPTIONS, fused=bool(word), capability=capability)
        if refusal is None:
            thin_levels = may_be_thin(inputs.spatial_shapes)
            call = prepare_call(value, tables, places, offsets, weights, "BLNC", thin_levels)
            found |= {f"{word}{name}": sweep for name, sweep in _sweeps_of_call(call, inputs.grad_output).items()}
    return found


def _sweeps_of_call(call: Call, grad_output: Tensor) -> dict[str, Sweep]:
    output = torch.empty_like(grad_output)
    grad_places = torch.empty_like(call.places) if call.offsets is None else None
    grad_offsets = None if call.offsets is None else torch.empty_like(call.offsets)
    wanted = launch.Wanted(grad_places, grad_offsets, torch.empty_like(call.weights))
    grad_value = torch.zeros_like(call.value, dtype=torch.float32)
    found = {"forward": Sweep(launch.forward_launch(call, output))}
    if choose_scatter(call.weights.numel()) == "atomics":
        return found | {"backward": Sweep(launch.main_launch(call, grad_output, wanted, grad_value))}
    buckets, counters = launch.count_samples(call)
    records, counted = launch.allocate_records(call), torch.zeros_like(counters)
    main = launch.main_launch(call, grad_output, wanted, grad_value, buckets, counters, records)
    # Each run of the main kernel raises the counters, which must start where the buckets do.
    seat = launch.seat_launch(call, buckets, counters)
    for each in (seat, main):  # the reduction needs records
        each.run(call.value)
    return found | {
        "counting forward": Sweep(launch.forward_launch(call, output, buckets, counted)),
        "count": Sweep(launch.count_launch(call, buckets, counted)),
        "backward": Sweep(main, (seat,)),
        "reduce": Sweep(launch.reduce_launch(call, grad_output, buckets, records, grad_value), has_shape=False),
    }


def sweep_shapes(sweep: Sweep, device_of: Tensor, measure: Callable[[Callable[[], Any]], Summary]) -> list[Row]:
    """Times registers at the shipped shape, then shapes with the fastest registers.

    Args:
        sweep: what to time.
        device_of: tensor on the device.
        measure: returns the device time of a call in ms.

    Returns:
        Rows with warps, iterations, registers, shipped and the times, fastest first.
    """
    timed: dict[LaunchShape, Row] = {}

    def time(shape: LaunchShape) -> None:
        launches = (*sweep.prepare, sweep.reshaped(shape))

        def run() -> None:
            for each in launches:
                each.run(device_of)

        if shape not in timed:
            timed[shape] = {**shape._asdict(), "shipped": shape == sweep.shipped, **asdict(measure(run))}

    def fastest() -> LaunchShape:
        return min(timed, key=lambda shape: timed[shape]["median"])

    for registers in dict.fromkeys((sweep.shipped.registers, *_REGISTERS)):
        time(sweep.shipped._replace(registers=registers))
    if sweep.has_shape:
        registers = fastest().registers
        for warps, iterations in product(_WARPS, _ITERATIONS):
            time(LaunchShape(warps, iterations, registers))
    return sorted(timed.values(), key=lambda row: row["median"])
