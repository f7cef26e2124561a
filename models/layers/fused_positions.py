"""Sine position encoding plus level embedding, of all levels at once: two kernels forward, two backward.

Importing this module imports Triton. Code that `torch.compile` sees composes the same of PyTorch's functions, which it
fuses by itself.
"""

from functools import cache, lru_cache
from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from models.layers.fused_positions_kernels import encode_kernel, sum_levels_kernel, sum_tiles_kernel, turns_kernel
from msda_op.levels import HostShapes, device_tables
from msda_op.triton.kernel_launch import Launch

_NUM_WARPS = 4
# Of a strip: lines, and pixels of each that are counted at a time.
_STRIP_LINES = 8
_STRIP_BLOCK = 128
# Of encodings: pairs of channels that are computed at a time, eight a lane, and how often a program does so.
_ENCODED_PAIRS = 1024
_ENCODED_BLOCKS = 4
# Of sums: bytes of a block, four loads of 16 bytes a lane; its channels, whole cache lines of every dtype; and pixels
# of a tile. The sums of the tiles are few, and spread over more programs.
_SUMMED_BYTES = 8192
_SUMMED_CHANNELS = 64
_SUMMED_PIXELS = 256
_LEVEL_ROWS = 128
_LEVEL_CHANNELS = 16


def embed_positions(
    padding_mask: Tensor,
    spatial_shapes: HostShapes,
    level_embed: Tensor,
    temperature: float,
    offset: float,
    eps: float,
    dtype: torch.dtype,
) -> Tensor:
    """Encodes the row and the column of each pixel, and adds its level's embedding.

    Channel 2i of a row's C / 2 channels is sin(2 pi t / temperature^(4i / C)), channel 2i + 1 the cosine of the same
    (arXiv 1706.03762, 3.5), with t = (row + offset) / (rows + eps), both counted in unpadded pixels of the column; the
    column's channels follow, counted in those of the row.

    Args:
        padding_mask: bool [B, S], True = padding, levels one after the other.
        spatial_shapes: L host pairs (h, w).
        level_embed: float32, float16 or bfloat16 [L, C], C a multiple of 4.
        temperature: ratio of the longest wavelength to the shortest.
        offset: added to the one-based row and column.
        eps: added to the divisor, above 0.
        dtype: dtype of the output, one of the same.

    Returns:
        dtype [B, S, C], rounded once.

    Notes:
        Differentiable once in level_embed. Deterministic: sums have a fixed order. Float32 inside. A pixel whose row or
        column is all padding has an angle of offset / eps turns, whose fraction float32 cannot hold: its encoding is
        finite, but not that of PyTorch's functions, which round elsewhere. Nothing reads it, as the pixel is padding.
    """
    return _EmbedPositions.apply(padding_mask, spatial_shapes, level_embed, temperature, offset, eps, dtype)


class _EmbedPositions(Function):
    @staticmethod
    def forward(
        ctx: Any,
        padding_mask: Tensor,
        spatial_shapes: HostShapes,
        level_embed: Tensor,
        temperature: float,
        offset: float,
        eps: float,
        dtype: torch.dtype,
    ) -> Tensor:
        padding_mask = padding_mask.contiguous()
        tables = device_tables(spatial_shapes, None, padding_mask.device)
        turns = _count_turns(padding_mask, spatial_shapes, tables, offset, eps)
        ctx.spatial_shapes, ctx.table, ctx.dtype = spatial_shapes, tables[0], level_embed.dtype
        return _encode(turns, spatial_shapes, tables[0], level_embed.contiguous(), temperature, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        grad_level_embed = _sum_levels(grad_output.contiguous(), ctx.spatial_shapes, ctx.table, ctx.dtype)
        return None, None, grad_level_embed, None, None, None, None


def _count_turns(
    padding_mask: Tensor, spatial_shapes: HostShapes, tables: tuple[Tensor, Tensor], offset: float, eps: float
) -> Tensor:
    """Returns the angles of rows and columns in full turns, float32 [2, B, S]."""
    batch_size, num_pixels = padding_mask.shape
    turns = padding_mask.new_empty((2, batch_size, num_pixels), dtype=torch.float32)
    arguments = {
        "padding": padding_mask,
        "turns": turns,
        "spatial_shapes": tables[0],
        "level_start_index": tables[1],
        "offset": float(offset),
        "eps": float(eps),
        "batch_size": batch_size,
        "num_pixels": num_pixels,
        "NUM_LEVELS": len(spatial_shapes),
        "LINES": _STRIP_LINES,
        "BLOCK": _STRIP_BLOCK,
    }
    if turns.numel() > 0:
        num_strips = _num_strips(spatial_shapes)
        Launch(turns_kernel, 2 * len(spatial_shapes) * batch_size * num_strips, arguments, _NUM_WARPS).run(padding_mask)
    return turns


def _encode(
    turns: Tensor,
    spatial_shapes: HostShapes,
    table: Tensor,
    level_embed: Tensor,
    temperature: float,
    dtype: torch.dtype,
) -> Tensor:
    _, batch_size, num_pixels = turns.shape
    num_channels = level_embed.shape[1]
    output = turns.new_empty((batch_size, num_pixels, num_channels), dtype=dtype)
    block_p, block_r = _encoding_block(num_channels)
    arguments = {
        "turns": turns,
        "frequencies": _frequencies(num_channels // 4, temperature, turns.device),
        "level_embed": level_embed,
        "output": output,
        "spatial_shapes": table,
        "batch_size": batch_size,
        "num_pixels": num_pixels,
        "num_channels": num_channels,
        "NUM_LEVELS": len(spatial_shapes),
        "TILE_R": _ENCODED_BLOCKS * block_r,
        "BLOCK_R": block_r,
        "BLOCK_P": block_p,
    }
    if output.numel() > 0:
        num_tiles = _num_tiles(spatial_shapes, arguments["TILE_R"])
        Launch(encode_kernel, 2 * batch_size * num_tiles, arguments, _NUM_WARPS).run(turns)
    return output


def _sum_levels(gradient: Tensor, spatial_shapes: HostShapes, table: Tensor, dtype: torch.dtype) -> Tensor:
    """Adds the rows of each level up, of all images: [B, S, C] -> dtype [L, C]."""
    batch_size, num_pixels, num_channels = gradient.shape
    num_sums = _num_tiles(spatial_shapes, _SUMMED_PIXELS) * batch_size
    sums = gradient.new_empty((num_sums, num_channels), dtype=torch.float32)
    shared = {
        "sums": sums,
        "spatial_shapes": table,
        "batch_size": batch_size,
        "num_channels": num_channels,
        "NUM_LEVELS": len(spatial_shapes),
        "TILE_R": _SUMMED_PIXELS,
    }
    block_r = _SUMMED_BYTES // (_SUMMED_CHANNELS * gradient.element_size())
    tile = {"gradient": gradient, "num_pixels": num_pixels, "BLOCK_R": block_r, "BLOCK_C": _SUMMED_CHANNELS}
    if num_sums > 0:
        num_programs = num_sums * triton.cdiv(num_channels, _SUMMED_CHANNELS)
        Launch(sum_tiles_kernel, num_programs, shared | tile, _NUM_WARPS).run(gradient)
    grad_level_embed = gradient.new_empty((len(spatial_shapes), num_channels), dtype=dtype)
    level = {"grad_level_embed": grad_level_embed, "BLOCK_R": _LEVEL_ROWS, "BLOCK_C": _LEVEL_CHANNELS}
    num_programs = len(spatial_shapes) * triton.cdiv(num_channels, _LEVEL_CHANNELS)
    Launch(sum_levels_kernel, num_programs, shared | level, _NUM_WARPS).run(gradient)
    return grad_level_embed


@cache  # a CUDA graph knows no more of a table than its address
def _frequencies(num_pairs: int, temperature: float, device: torch.device) -> Tensor:
    """Returns temperature^(-i / num_pairs) of each pair i, float32, rounded once."""
    with torch.inference_mode(False):
        powers = [temperature ** (-pair / num_pairs) for pair in range(num_pairs)]
        return torch.tensor(powers, dtype=torch.float32, device=device)


@lru_cache(maxsize=4096)  # of few sizes, and asked for at every call
def _num_tiles(spatial_shapes: HostShapes, tile_pixels: int) -> int:
    return sum(triton.cdiv(height * width, tile_pixels) for height, width in spatial_shapes)


@lru_cache(maxsize=4096)
def _num_strips(spatial_shapes: HostShapes) -> int:
    """Returns the most strips of a level, of its rows or of its columns."""
    return triton.cdiv(max(max(shape) for shape in spatial_shapes), _STRIP_LINES)


@lru_cache(maxsize=64)
def _encoding_block(num_channels: int) -> tuple[int, int]:
    """Returns the pairs of channels of a block, a power of 2, and its pixels."""
    block_p = max(4, triton.next_power_of_2(num_channels // 4))
    return block_p, max(1, _ENCODED_PAIRS // block_p)
