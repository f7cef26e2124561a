"""Puts something in place of, or around, the op that the attention modules call."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

import msda_op
from msda_op import ms_deform_attn  # bound here: the original, also while something stands in its place
from parity.comparisons import Op

Around = Callable[[Callable[..., Tensor], tuple[Any, ...], dict[str, Any]], Tensor]

# SplitMix64 (Steele et al., doi 10.1145/2660193.2660195): the step between states, and shift and factor of each round
# that mixes one; as int64, whose products wrap.
_STATE_STEP = 0x9E3779B97F4A7C15 - 2**64
_ROUNDS = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))


def op_of(backend: str) -> Op:
    """Returns the op with a backend as comparisons call it."""

    def call(value: Tensor, spatial_shapes: Any, locations: Tensor, weights: Tensor) -> Tensor:
        return ms_deform_attn(value, spatial_shapes, None, locations, weights, backend=backend)

    return call


@contextmanager
def replacing_op(op: Op) -> Iterator[None]:
    """Has every attention module call `op`; locations and weights of a fused call are computed in PyTorch before.

    Args:
        op: called with value, spatial_shapes, sampling_locations, attention_weights.
    """

    def replace(call: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        value, spatial_shapes, _, *rest = args
        if len(rest) == 3:
            reference_points, offsets, logits = rest
            locations = msda_op.sampling_locations_from_offsets(reference_points, offsets, spatial_shapes)
            weights = logits.float().flatten(3).softmax(-1).view(offsets.shape[:-1])
        else:
            locations, weights = rest
        return op(value, spatial_shapes, locations, weights)

    with calling_around_op(replace):
        yield


@contextmanager
def rounding_otherwise(seed: int) -> Iterator[None]:
    """Moves every half-precision output of the op by one unit in the last place, up or down at random.

    This is what a sound op with another order of its sums does; gradients on their way back change as much. Outputs in
    float32 stay as they are.

    Args:
        seed: of the directions, which follow from it and from each output's place and bits: a CUDA graph draws others
            for other outputs, and a layer that is recomputed the same again.
    """

    def move(call: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        output = call(*args, **kwargs)
        if output.dtype not in (torch.bfloat16, torch.float16):
            return output
        return output * (1 + _draw_directions(output, seed) * torch.finfo(output.dtype).eps).to(output.dtype)

    with calling_around_op(move):
        yield


def _draw_directions(output: Tensor, seed: int) -> Tensor:
    """Returns -1 or 1 for each element of a half-precision tensor, from a hash of its bits, its place and the seed."""
    bits = output.detach().contiguous().view(torch.int16).long()
    place = torch.arange(output.numel(), device=output.device).view(output.shape)
    mixed = bits + (place + seed * 2**40) * _STATE_STEP
    for shift, factor in _ROUNDS:
        mixed = (mixed ^ ((mixed >> shift) & (2 ** (64 - shift) - 1))) * factor
    return torch.where(mixed < 0, -1, 1)


@contextmanager
def calling_around_op(around: Around) -> Iterator[None]:
    """Calls `around(op, args, kwargs)` in place of every call of the op from an attention module.

    The modules find the op, plain or fused, as an attribute of `msda_op`; it is exchanged there and put back.
    """
    originals = {name: getattr(msda_op, name) for name in ("ms_deform_attn", "fused_ms_deform_attn")}

    def wrap(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *args, **kwargs: around(call, args, kwargs)

    for name, call in originals.items():
        setattr(msda_op, name, wrap(call))
    try:
        yield
    finally:
        for name, call in originals.items():
            setattr(msda_op, name, call)
