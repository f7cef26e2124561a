"""Allocates outputs, picks tiles and launches the kernels."""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from msda_op.triton.backward import backward_kernel
from msda_op.triton.forward import forward_kernel

# Elements of a [BLOCK_Q, BLOCK_K, BLOCK_D] tile that one warp keeps in registers (16 a lane).
_WARP_ELEMENTS = 512
_MAX_WARPS = 8


class Tile(NamedTuple):
    """Launch shape of a kernel: queries, points and channels of a tile, and the warps that share it."""

    block_q: int
    block_k: int
    block_d: int
    num_warps: int


def choose_tile(head_dim: int, num_points: int) -> Tile:
    """Returns a tile that fills one warp; more warps only where a single query needs them.

    With one warp the reductions over points and channels need no shared memory and no barrier.
    """
    block_k, block_d = triton.next_power_of_2(num_points), triton.next_power_of_2(head_dim)
    block_q = max(1, _WARP_ELEMENTS // (block_k * block_d))
    num_warps = min(_MAX_WARPS, max(1, block_q * block_k * block_d // _WARP_ELEMENTS))
    return Tile(block_q, block_k, block_d, num_warps)


def forward(
    value: Tensor,
    spatial_shapes: Tensor,
    level_start_index: Tensor,
    sampling_locations: Tensor,
    attention_weights: Tensor,
) -> Tensor:
    """Returns `[B, Q, M*D]` in the dtype of `value`; inputs as in `msda_op.ms_deform_attn`, of any strides (copied)."""
    batch, value_length, num_heads, head_dim = value.shape
    _, num_queries, _, num_levels, num_points, _ = sampling_locations.shape
    output = value.new_empty(batch, num_queries, num_heads * head_dim)
    if output.numel() == 0:
        return output
    tile = choose_tile(head_dim, num_points)
    with torch.cuda.device_of(value):
        forward_kernel[(triton.cdiv(num_queries, tile.block_q) * num_heads * batch,)](
            value.contiguous(),
            spatial_shapes.contiguous(),
            level_start_index.contiguous(),
            sampling_locations.contiguous(),
            attention_weights.contiguous(),
            output,
            num_queries,
            value_length,
            M=num_heads,
            D=head_dim,
            L=num_levels,
            K=num_points,
            BLOCK_Q=tile.block_q,
            BLOCK_K=tile.block_k,
            BLOCK_D=tile.block_d,
            num_warps=tile.num_warps,
        )
    return output


def backward(
    grad_output: Tensor,
    value: Tensor,
    spatial_shapes: Tensor,
    level_start_index: Tensor,
    sampling_locations: Tensor,
    attention_weights: Tensor,
    needs_value: bool,
    needs_locations: bool,
    needs_weights: bool,
) -> list[Tensor]:
    """Returns the gradients that are asked for, in the order value, locations, weights, each in its input's dtype.

    The gradient of `value` is summed in float32 and rounded once.
    """
    batch, value_length, num_heads, head_dim = value.shape
    _, num_queries, _, num_levels, num_points, _ = sampling_locations.shape
    grad_value = torch.zeros(value.shape, dtype=torch.float32, device=value.device) if needs_value else None
    grad_locations = (
        torch.empty_like(sampling_locations, memory_format=torch.contiguous_format) if needs_locations else None
    )
    grad_weights = torch.empty_like(attention_weights, memory_format=torch.contiguous_format) if needs_weights else None
    if grad_output.numel() > 0:
        tile = choose_tile(head_dim, num_points)
        with torch.cuda.device_of(value):
            backward_kernel[(triton.cdiv(num_queries, tile.block_q) * num_heads * batch,)](
                grad_output.contiguous(),
                value.contiguous(),
                spatial_shapes.contiguous(),
                level_start_index.contiguous(),
                sampling_locations.contiguous(),
                attention_weights.contiguous(),
                grad_value,
                grad_locations,
                grad_weights,
                num_queries,
                value_length,
                M=num_heads,
                D=head_dim,
                L=num_levels,
                K=num_points,
                BLOCK_Q=tile.block_q,
                BLOCK_K=tile.block_k,
                BLOCK_D=tile.block_d,
                num_warps=tile.num_warps,
            )
    grad_value = None if grad_value is None else grad_value.to(value.dtype)
    return [gradient for gradient in (grad_value, grad_locations, grad_weights) if gradient is not None]
