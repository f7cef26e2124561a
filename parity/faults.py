"""Faults for negative controls: ways in which an op or its caller can be wrong, each with a size from 0 to 1.

A fault at size s lies the share s of the way from right (0) to the whole fault (1), so that the smallest size that a
level still detects tells how sharp the level is.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from models.layers.ms_deform_attn import MSDeformAttn
from msda_op.levels import HostShapes, level_starts
from parity.comparisons import Op
from parity.interception import replacing_op

_QUERY_CHUNKS = 256

Damage = Callable[[Op, float, Tensor, HostShapes, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Fault:
    """A way of being wrong.

    Args:
        name: words for a report.
        seen_by: levels that must detect the whole fault.
        damage: runs an op wrongly; None where the fault is the caller's (padding).
        faint: whether a trajectory under half-precision autocast may miss it, below what rounding does there.
    """

    name: str
    seen_by: tuple[str, ...]
    damage: Damage | None
    faint: bool = False

    def break_op(self, op: Op, size: float) -> Op:
        """Returns an op with this fault.

        Raises:
            ValueError: if the fault is not one of the op's.
        """
        damage = self.damage
        if damage is None:
            raise ValueError(f"fault must be the op's own, got {self.name!r}; inject it into a model")
        return lambda value, shapes, locations, weights: damage(op, size, value, shapes, locations, weights)

    @contextmanager
    def injected(self, model: nn.Module, op: Op, size: float) -> Iterator[None]:
        """Has the model's attention suffer from this fault, with `op` doing the work."""
        if self.damage is not None:
            with replacing_op(self.break_op(op, size)):
                yield
            return
        hooks = []
        for attention in model.modules():
            if isinstance(attention, MSDeformAttn):
                hooks += _keep_padded_values(attention, size)
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def _flip_align_corners(
    op: Op, size: float, value: Tensor, shapes: HostShapes, locations: Tensor, weights: Tensor
) -> Tensor:
    sizes_wh = _sizes_wh(shapes, locations)
    flipped = (locations * (sizes_wh - 1) + 0.5) / sizes_wh
    return op(value, shapes, locations + size * (flipped - locations), weights)


def _shift_half_a_pixel(
    op: Op, size: float, value: Tensor, shapes: HostShapes, locations: Tensor, weights: Tensor
) -> Tensor:
    return op(value, shapes, locations + 0.5 * size / _sizes_wh(shapes, locations), weights)


def _drop_a_level(op: Op, size: float, value: Tensor, shapes: HostShapes, locations: Tensor, weights: Tensor) -> Tensor:
    kept = torch.ones(len(shapes), 1, dtype=weights.dtype, device=weights.device)
    kept[-1] = 1 - size
    return op(value, shapes, locations, weights * kept)


def _scale_location_gradient(
    op: Op, size: float, value: Tensor, shapes: HostShapes, locations: Tensor, weights: Tensor
) -> Tensor:
    return op(value, shapes, _scale_gradient(locations, 1 - 0.1 * size), weights)


def _detach_attention(
    op: Op, size: float, value: Tensor, shapes: HostShapes, locations: Tensor, weights: Tensor
) -> Tensor:
    return op(value, shapes, locations, _scale_gradient(weights, 1 - size))


def _turn_gradients_around(
    op: Op, size: float, value: Tensor, shapes: HostShapes, locations: Tensor, weights: Tensor
) -> Tensor:
    value, locations, weights = (_scale_gradient(tensor, 1 - 2 * size) for tensor in (value, locations, weights))
    return op(value, shapes, locations, weights)


def _swap_axes(op: Op, size: float, value: Tensor, shapes: HostShapes, locations: Tensor, weights: Tensor) -> Tensor:
    return op(value, shapes, locations + size * (locations.flip(-1) - locations), weights)


def _accumulate_in_bf16(
    op: Op, size: float, value: Tensor, shapes: HostShapes, locations: Tensor, weights: Tensor
) -> Tensor:
    """Adds the shares of the queries to the value gradient one after the other in bfloat16, except on the finest level.

    A level that the pyramid has no coarser one than counts as coarse.
    """
    batch, num_queries = locations.shape[:2]
    chunk = max(1, -(-num_queries // _QUERY_CHUNKS))
    num_chunks = max(1, -(-num_queries // chunk))
    first_coarse = level_starts(shapes)[1] if len(shapes) > 1 else 0

    def share_out(of_queries: Tensor) -> Tensor:
        """Makes images of the chunks of each image's queries, the last one filled up with zeros."""
        rest = of_queries.new_zeros(batch, num_chunks * chunk - num_queries, *of_queries.shape[2:])
        return torch.cat([of_queries, rest], dim=1).view(batch * num_chunks, chunk, *of_queries.shape[2:])

    values = _BrokenSum.apply(value, num_chunks, first_coarse, size)
    output = op(values, shapes, share_out(locations), share_out(weights))
    return output.view(batch, num_chunks * chunk, output.shape[-1])[:, :num_queries]


FAULTS = (
    Fault("align_corners flipped", ("op", "model", "trajectory", "evaluation"), _flip_align_corners),
    Fault("half a pixel of shift", ("op", "model", "trajectory", "evaluation"), _shift_half_a_pixel),
    Fault("one level dropped", ("op", "model", "trajectory", "evaluation"), _drop_a_level),
    Fault("location gradient x 0.9", ("op", "model", "trajectory"), _scale_location_gradient, faint=True),
    Fault("attention gradient detached", ("op", "model", "trajectory"), _detach_attention),
    Fault("x and y swapped", ("op", "model", "trajectory", "evaluation"), _swap_axes),
    Fault("padded values not zeroed", ("model", "trajectory"), None, faint=True),
    Fault("gradients of the wrong sign", ("op", "model", "trajectory", "ensemble"), _turn_gradients_around),
    Fault("value gradient added in bf16", ("op", "model", "trajectory"), _accumulate_in_bf16, faint=True),
)


def find_fault(name: str) -> Fault:
    """Returns the fault called `name`.

    Raises:
        ValueError: if there is none.
    """
    for fault in FAULTS:
        if fault.name == name:
            return fault
    raise ValueError(f"fault must be one of {', '.join(fault.name for fault in FAULTS)}, got {name!r}; choose one")


def _sizes_wh(shapes: HostShapes, like: Tensor) -> Tensor:
    """Returns `[L, 1, 2]` level sizes (w, h)."""
    return torch.tensor([(w, h) for h, w in shapes], dtype=like.dtype, device=like.device)[:, None]


def _scale_gradient(tensor: Tensor, factor: float) -> Tensor:
    """Returns the same numbers, whose gradient is multiplied on its way back."""
    same = tensor.view_as(tensor)
    if same.requires_grad:
        same.register_hook(lambda gradient: factor * gradient)
    return same


class _BrokenSum(torch.autograd.Function):
    """Repeats each image's values, and adds their gradients up one after the other in bfloat16, in part."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, copies: int, first_row: int, size: float) -> Tensor:
        ctx.copies, ctx.first_row, ctx.size = copies, first_row, size
        return value.repeat_interleave(copies, dim=0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        shares = gradient.unflatten(0, (len(gradient) // ctx.copies, ctx.copies))
        exact = shares.float().sum(1)
        rounded = torch.zeros_like(exact, dtype=torch.bfloat16)
        for share in shares.unbind(1):
            rounded += share
        coarse = slice(ctx.first_row, None)
        exact[:, coarse] += ctx.size * (rounded.float() - exact)[:, coarse]
        return exact.to(gradient.dtype), None, None, None


def _keep_padded_values(attention: MSDeformAttn, size: float) -> list[Any]:
    """Multiplies padded values by `size` instead of zero; returns the hooks to remove."""
    masks: list[Tensor] = []

    def take_mask(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        *others, padding_mask = args
        masks[:] = [padding_mask]
        return (*others, torch.zeros_like(padding_mask))

    def fade(module: nn.Module, args: tuple[Any, ...], value: Tensor) -> Tensor:
        return torch.where(masks[0].unsqueeze(-1), size * value, value)

    return [attention.register_forward_pre_hook(take_mask), attention.value_proj.register_forward_hook(fade)]
