"""Launches the kernels of `sorted_gradient`: the gradient of value in a fixed order, for every shape and dtype."""

from typing import Any

import torch
import triton
from torch import Tensor

from msda_op.locations import sampling_locations_from_offsets
from msda_op.options import Options, Sizes, read_sizes
from msda_op.triton.arguments import Inputs, convention_arguments
from msda_op.triton.kernel_launch import Launch
from msda_op.triton.sorted_gradient import cell_kernel, gather_kernel

# Elements of a [BLOCK_I, BLOCK_D] tile of `gather_kernel`, which one warp keeps in registers (16 a lane).
_GATHER_ELEMENTS = 512
# Samples of a block of `cell_kernel`, which does little with each.
_CELL_BLOCK = 256
_MAX_INT32 = 2**31 - 1


def sorted_value_gradient(grad_output: Tensor, inputs: Inputs, dtype: torch.dtype, options: Options) -> Tensor:
    """Returns the gradient of value in `dtype`, added up in float32 in a fixed order (see `sorted_gradient`).

    Offsets and logits are turned into locations and weights first, by the same arithmetic as the fused kernels.
    """
    value = inputs.value
    if grad_output.numel() == 0:
        return torch.zeros_like(value, dtype=dtype, memory_format=torch.contiguous_format)
    sizes = read_sizes(value, inputs.scores, options.value_layout)
    locations, weights = inputs.points.contiguous(), inputs.scores.contiguous()
    if inputs.reference_points is not None:
        locations = sampling_locations_from_offsets(inputs.reference_points, locations, inputs.spatial_shapes)
        weights = weights.float().flatten(3).softmax(-1)
    no_cell = sizes.batch * sizes.num_heads * sizes.value_length * 4
    cells = weights.new_empty(weights.numel(), dtype=torch.int32 if no_cell <= _MAX_INT32 else torch.int64)
    grad_value = torch.empty_like(value, dtype=dtype, memory_format=torch.contiguous_format)
    tables = {name: getattr(inputs, name).contiguous() for name in ("spatial_shapes", "level_start_index")}
    constants = convention_arguments(sizes, options) | {"num_queries": sizes.num_queries, **tables}
    cell_launch(locations, cells, no_cell, sizes, constants).run(value)
    cells, order = torch.sort(cells, stable=True)
    numbers = torch.arange(no_cell + 1, dtype=cells.dtype, device=cells.device)
    cell_starts = torch.searchsorted(cells, numbers, out_int32=cells.numel() <= _MAX_INT32)
    gathered = {"locations": locations, "attention_weights": weights, "order": order, "cell_starts": cell_starts}
    gather_launch(grad_output, gathered, grad_value, sizes, options, constants).run(value)
    return grad_value


def cell_launch(locations: Tensor, cells: Tensor, no_cell: int, sizes: Sizes, constants: dict[str, Any]) -> Launch:
    """Returns the launch that fills `cells`."""
    num_samples = cells.numel() // sizes.batch
    arguments = {
        "locations": locations,
        "cells": cells,
        "value_length": sizes.value_length,
        "no_cell": no_cell,
        "BLOCK_I": _CELL_BLOCK,
        **constants,
    }
    return Launch(cell_kernel, triton.cdiv(num_samples, _CELL_BLOCK) * sizes.batch, arguments, num_warps=4)


def gather_launch(
    grad_output: Tensor,
    gathered: dict[str, Tensor],
    grad_value: Tensor,
    sizes: Sizes,
    options: Options,
    constants: dict[str, Any],
) -> Launch:
    """Returns the launch that fills `grad_value`."""
    block_d = triton.next_power_of_2(sizes.head_dim)
    arguments = {
        "grad_output": grad_output.contiguous(),
        **gathered,
        "grad_value": grad_value,
        "value_length": sizes.value_length,
        "D": sizes.head_dim,
        "HEAD_MAJOR": options.value_layout == "BNLC",
        "BLOCK_I": max(1, _GATHER_ELEMENTS // block_d),
        "BLOCK_D": block_d,
        **constants,
    }
    return Launch(gather_kernel, sizes.batch * sizes.num_heads * sizes.value_length, arguments, num_warps=1)
