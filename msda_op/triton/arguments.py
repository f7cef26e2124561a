"""Tensors of a pass, and the constants that all plain kernels take."""

from typing import Any, NamedTuple

from torch import Tensor

from msda_op.options import Options, Sizes


class Inputs(NamedTuple):
    """Tensors of a forward pass, validated, the level table on the device."""

    value: Tensor
    spatial_shapes: Tensor
    level_start_index: Tensor
    points: Tensor
    scores: Tensor
    reference_points: Tensor | None


class Needs(NamedTuple):
    """Which gradients are asked for."""

    value: bool
    points: bool
    scores: bool
    reference_points: bool


class Targets(NamedTuple):
    """Tensors that a backward pass writes; None for what is not asked for. `grad_value` are `[n, *value.shape]` buffers
    that it adds to; `grad_reference` is `[B, Q, M, L, 2 or 4]` float32, each head's share."""

    grad_value: Tensor | None
    grad_points: Tensor | None
    grad_scores: Tensor | None
    grad_reference: Tensor | None


def convention_arguments(sizes: Sizes, options: Options) -> dict[str, Any]:
    """Returns sizes and conventions as the kernels name them."""
    return {
        "M": sizes.num_heads,
        "L": sizes.num_levels,
        "K": sizes.num_points,
        "PAIR_FIRST": options.sampling_locations_layout == "B2QHLP",
        "BORDER": options.padding_mode == "border",
        "ALIGN_CORNERS": options.align_corners,
    }
