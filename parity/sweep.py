"""Tries launch shapes of the plain tile kernels on the card at hand."""

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from itertools import product
from typing import Any, Literal

import torch
import triton

from msda_op.levels import device_tables
from msda_op.options import DEFAULT_OPTIONS
from msda_op.triton.launch import Inputs, Launch, Targets, backward_launch, forward_launch
from msda_op.triton.launch_table import Entry, LaunchKey, LaunchShape, choose_regime
from parity.cases import OpInputs
from parity.timing import Summary

_BLOCKS_Q = (1, 2, 4, 8, 16, 32)
_WARPS = (1, 2, 4, 8)
# Below, lanes idle; above, the accumulators alone fill a thread's registers.
_ELEMENTS_OF_A_LANE = range(4, 65)

Row = dict[str, Any]


def candidate_shapes(block_k: int, block_d: int) -> list[LaunchShape]:
    """Returns the shapes that give each lane 4 to 64 elements of a [BLOCK_Q, BLOCK_K, BLOCK_D] tile."""
    return [
        LaunchShape(block_q, num_warps)
        for block_q, num_warps in product(_BLOCKS_Q, _WARPS)
        if block_q * block_k * block_d // (32 * num_warps) in _ELEMENTS_OF_A_LANE
    ]


def plain_launches(inputs: OpInputs, accumulator: torch.dtype = torch.float32) -> dict[str, Launch]:
    """Returns the launches of the plain kernels on a workload, "forward" and "backward" with all gradients.

    Args:
        inputs: of the op.
        accumulator: dtype in which the gradient of value is added up.

    Notes:
        The buffers belong to the launches. Running the backward launch again adds to the gradient of value again.
    """
    value, locations, weights = inputs.value, inputs.sampling_locations, inputs.attention_weights
    tensors = Inputs(value, *device_tables(inputs.spatial_shapes, None, value.device), locations, weights, None)
    targets = Targets(
        grad_value=value.new_zeros((1, *value.shape), dtype=accumulator),
        grad_points=torch.empty_like(locations),
        grad_scores=torch.empty_like(weights),
        grad_reference=None,
    )
    return {
        "forward": forward_launch(tensors, torch.empty_like(inputs.grad_output), DEFAULT_OPTIONS),
        "backward": backward_launch(inputs.grad_output, tensors, targets, DEFAULT_OPTIONS),
    }


def reshape_launch(launch: Launch, shape: LaunchShape) -> Launch:
    """Returns the same launch with another number of queries in a tile and of warps."""
    queries = launch.arguments["num_queries"]
    columns = launch.num_programs // triton.cdiv(queries, launch.arguments["BLOCK_Q"])
    return launch._replace(
        arguments={**launch.arguments, "BLOCK_Q": shape.block_q},
        num_programs=columns * triton.cdiv(queries, shape.block_q),
        num_warps=shape.num_warps,
    )


def start_launch(launch: Launch) -> None:
    """Launches on the current device, past PyTorch's tracing, whose dispatch would count as the host's time."""
    launch.kernel[(launch.num_programs,)](**launch.arguments, num_warps=launch.num_warps)


def sweep_launch(launch: Launch, measure: Callable[[Callable[[], Any]], Summary]) -> list[Row]:
    """Times a launch in every candidate shape.

    Args:
        launch: what to time.
        measure: returns the device time of a call in ms.

    Returns:
        Rows with block_q, num_warps, shipped (whether the launch module takes this shape today) and the times, fastest
        first.
    """
    shipped = LaunchShape(launch.arguments["BLOCK_Q"], launch.num_warps)
    rows = []
    for shape in candidate_shapes(launch.arguments["BLOCK_K"], launch.arguments["BLOCK_D"]):
        reshaped = reshape_launch(launch, shape)
        summary = measure(partial(start_launch, reshaped))
        rows.append({**shape._asdict(), "shipped": shape == shipped, **asdict(summary)})
    return sorted(rows, key=lambda row: row["median"])


def table_entry(
    kernel: Literal["forward", "backward"],
    launch: Launch,
    inputs: OpInputs,
    row: Row,
    architecture: int,
    measured_on: str,
) -> Entry:
    """Returns the table's entry for the fastest row of a sweep.

    Args:
        kernel: "forward" or "backward".
        launch: what was swept.
        inputs: what it ran on.
        row: of `sweep_launch`.
        architecture: compute capability of the card, e.g. 90.
        measured_on: card and commit, in words.
    """
    batch, num_queries = inputs.sampling_locations.shape[:2]
    key = LaunchKey(
        architecture,
        kernel,
        inputs.value.element_size(),
        launch.arguments["BLOCK_K"],
        launch.arguments["BLOCK_D"],
        choose_regime(batch, num_queries),
    )
    return Entry(key, LaunchShape(row["block_q"], row["num_warps"]), row["median"], measured_on)
