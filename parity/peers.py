"""Implementations of the op to compare with, each where its package can be imported."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor

from msda_op import fused_ms_deform_attn, ms_deform_attn, sampling_locations_from_offsets
from msda_op.compat import batch_step
from msda_op.levels import HostShapes, device_tables
from msda_op.reference import attention_weights_from_logits
from parity.comparisons import Op

# Called with value, spatial_shapes and level_start_index on the device, sampling_locations, attention_weights.
TableOp = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Peer:
    """One implementation.

    Args:
        name: as in a report.
        op: the call, as `parity.comparisons` makes it; its level table reaches the device once and stays there.
        captured: whether it promises never to wait for the device, so that a CUDA graph can capture it.
    """

    name: str
    op: Op
    captured: bool = False


def own_implementations() -> list[Peer]:
    """Returns this project's kernels, those that add in a fixed order, and the reference: `grid_sample` and sums."""
    return [
        Peer("msda_op triton", partial(_own, "triton"), captured=True),
        Peer("msda_op triton, deterministic", partial(_own, "triton", deterministic=True)),
        Peer("msda_op reference", partial(_own, "reference")),
    ]


def fused_implementations(reference_points: Tensor) -> list[Peer]:
    """Returns the fused op, and the same composed of softmax, locations and the plain kernels.

    Args:
        reference_points: `[B, Q, L, 2]` (x, y), those of every batch item. The ops are called with sampling offsets in
            place of locations and with logits in place of attention weights.
    """
    return [
        Peer("msda_op triton, fused", partial(_fused, reference_points, "triton"), captured=True),
        Peer("softmax + locations + msda_op triton", partial(_composed, reference_points), captured=True),
    ]


def fused_reference(reference_points: Tensor) -> Op:
    """Returns what `fused_implementations` of the same points are judged by."""
    return partial(_fused, reference_points, "reference")


def _fused(
    reference_points: Tensor, backend: str, value: Tensor, shapes: HostShapes, offsets: Tensor, logits: Tensor
) -> Tensor:
    points = reference_points[: value.shape[0]]
    if value.dtype == torch.float64:
        points = points.double()
    return fused_ms_deform_attn(value, shapes, None, points, offsets, logits, backend=backend)


def _composed(reference_points: Tensor, value: Tensor, shapes: HostShapes, offsets: Tensor, logits: Tensor) -> Tensor:
    points = reference_points[: value.shape[0]]
    locations = sampling_locations_from_offsets(points, offsets, device_tables(shapes, None, value.device)[0])
    return _own("triton", value, shapes, locations, attention_weights_from_logits(logits))


def find_peers() -> tuple[list[Peer], dict[str, str]]:
    """Returns the peers whose packages are here, and for the others the reason why not, by package.

    Notes:
        An implementation that takes float32 alone is given float32, and its output cast back: both casts are timed, as
        a caller would pay for them. One that wants a single dtype gets its locations rounded to it.
    """
    found: list[Peer] = []
    missing = {}
    for packages, adapt in _ADAPTERS.items():
        package = " or ".join(packages)
        if not any(find_spec(name) for name in packages):
            missing[package] = "not installed"
            continue
        try:
            found += [Peer(name, _with_tables(op)) for name, op in adapt().items()]
        except ImportError as error:
            missing[package] = f"cannot be imported: {error}"
    return found, missing


def _own(
    backend: str,
    value: Tensor,
    shapes: HostShapes,
    locations: Tensor,
    weights: Tensor,
    deterministic: bool | None = None,
) -> Tensor:
    # The pairs, as the models of this project pass them: they tell that no level is thin, which saves work.
    return ms_deform_attn(value, shapes, None, locations, weights, deterministic=deterministic, backend=backend)


def _with_tables(op: TableOp) -> Op:
    def call(value: Tensor, shapes: HostShapes, locations: Tensor, weights: Tensor) -> Tensor:
        return op(value, *device_tables(shapes, None, value.device), locations, weights)

    return call


def _in_float32(op: TableOp) -> TableOp:
    def call(value: Tensor, shapes: Tensor, starts: Tensor, locations: Tensor, weights: Tensor) -> Tensor:
        return op(value.float(), shapes, starts, locations, weights.float()).to(value.dtype)

    return call


def _deformops() -> dict[str, TableOp]:
    registry = import_module("deformops.registry")

    def call(*tensors: Tensor, fp32acc: bool) -> Tensor:
        *others, weights = tensors
        return registry.msda(*others, weights.flatten(3), backend=registry.Backend.TRITON, fp32acc=fp32acc)

    return {
        "deformops, float32 accumulator": partial(call, fp32acc=True),
        "deformops, native accumulator": partial(call, fp32acc=False),
    }


def _original() -> dict[str, TableOp]:
    # Takes the package that comes first in msda_op.compat; the two that bring the original op have the same kernels.
    return {"original CUDA op": partial(ms_deform_attn, backend="cuda")}


def _mmcv() -> dict[str, TableOp]:
    function = import_module("mmcv.ops.multi_scale_deform_attn").MultiScaleDeformableAttnFunction

    def call(value: Tensor, *others: Tensor) -> Tensor:
        return function.apply(value, *others, batch_step(value.shape[0]))

    return {"mmcv": _in_float32(call)}


def _msda_triton() -> dict[str, TableOp]:
    attend = import_module("msda_triton").multi_scale_deformable_attention

    def call(value: Tensor, shapes: Tensor, starts: Tensor, locations: Tensor, weights: Tensor) -> Tensor:
        return attend(value, shapes, starts, locations.to(value.dtype), weights)

    return {"msda_triton": call}


_ADAPTERS: dict[tuple[str, ...], Callable[[], dict[str, TableOp]]] = {
    ("deformops",): _deformops,
    ("torch_ms_deform_attn", "MultiScaleDeformableAttention"): _original,
    ("mmcv",): _mmcv,
    ("msda_triton",): _msda_triton,
}
