"""`torch.library` ops around the Triton kernels: schemas, fake implementations, gradients.

Importing this module imports Triton and registers `msda_op::forward`, `msda_op::backward` and
`msda_op::accumulate_backward`; `msda_op.api` does so on the first call of the "triton" backend. Plain and fused op are
the same three: `points` are sampling locations and `scores` attention weights, or, where `reference_points` are given,
sampling offsets and attention logits.

Eager code takes a shorter way, see `eager`, which `msda_op.api` calls.

The forward op is traceable: `torch.compile` and export see its kernels. The backward ops are single nodes to them: of a
traced kernel PyTorch finds out by its code which arguments it writes, and takes an argument for written whose numbers
decide on an address that atomics add to, or that inline PTX gets to see. It would copy value and locations, and write
them back.

The ops have no autocast rule, on purpose: autocast passes their arguments on as they are, so that value and scores may
be half while the locations stay float32.
"""

from typing import Any

import torch
import triton
from torch import Tensor

from msda_op.options import Options, read_sizes
from msda_op.triton import launch
from msda_op.triton.launch import Inputs, Needs

# PyTorch cannot trace kernels that the interpreter runs: with TRITON_INTERPRET=1 the forward is a single node as well.
_register_forward = torch.library.custom_op if triton.knobs.runtime.interpret else torch.library.triton_op


@_register_forward("msda_op::forward", mutates_args=())
def forward(
    value: Tensor,
    spatial_shapes: Tensor,
    level_start_index: Tensor,
    points: Tensor,
    scores: Tensor,
    reference_points: Tensor | None,
    thin_levels: bool,
    padding_mode: str,
    align_corners: bool,
    value_layout: str,
    points_layout: str,
    fp32_grad_accum: bool,
    deterministic: bool,
) -> Tensor:
    """Forward kernel as an op; the last two arguments are for its gradient.

    `thin_levels` says whether levels may have a single row or column; kernels that are told that none has save work.
    """
    inputs = Inputs(value, spatial_shapes, level_start_index, points, scores, reference_points)
    return launch.forward(inputs, Options(padding_mode, align_corners, value_layout, points_layout), thin_levels)


@forward.register_fake
def _(
    value: Tensor,
    spatial_shapes: Tensor,
    level_start_index: Tensor,
    points: Tensor,
    scores: Tensor,
    reference_points: Tensor | None,
    thin_levels: bool,
    padding_mode: str,
    align_corners: bool,
    value_layout: str,
    points_layout: str,
    fp32_grad_accum: bool,
    deterministic: bool,
) -> Tensor:
    sizes = read_sizes(value, scores, value_layout)
    return value.new_empty(sizes.batch, sizes.num_queries, sizes.num_heads * sizes.head_dim)


@torch.library.custom_op("msda_op::backward", mutates_args=())
def backward(
    grad_output: Tensor,
    value: Tensor,
    spatial_shapes: Tensor,
    level_start_index: Tensor,
    points: Tensor,
    scores: Tensor,
    reference_points: Tensor | None,
    thin_levels: bool,
    padding_mode: str,
    align_corners: bool,
    value_layout: str,
    points_layout: str,
    fp32_grad_accum: bool,
    deterministic: bool,
    needs_value: bool,
    needs_points: bool,
    needs_scores: bool,
    needs_reference_points: bool,
) -> list[Tensor]:
    """Backward kernels as an op; returns the gradients asked for: of value, points, scores, reference points."""
    return launch.backward(
        grad_output,
        Inputs(value, spatial_shapes, level_start_index, points, scores, reference_points),
        Options(padding_mode, align_corners, value_layout, points_layout),
        thin_levels,
        fp32_grad_accum,
        deterministic,
        Needs(needs_value, needs_points, needs_scores, needs_reference_points),
    )


@backward.register_fake
def _(
    grad_output: Tensor,
    value: Tensor,
    spatial_shapes: Tensor,
    level_start_index: Tensor,
    points: Tensor,
    scores: Tensor,
    reference_points: Tensor | None,
    thin_levels: bool,
    padding_mode: str,
    align_corners: bool,
    value_layout: str,
    points_layout: str,
    fp32_grad_accum: bool,
    deterministic: bool,
    needs_value: bool,
    needs_points: bool,
    needs_scores: bool,
    needs_reference_points: bool,
) -> list[Tensor]:
    tensors = (value, points, scores, reference_points)
    needs = (needs_value, needs_points, needs_scores, needs_reference_points)
    return [
        torch.empty_like(tensor, memory_format=torch.contiguous_format)
        for tensor, needed in zip(tensors, needs, strict=True)
        if needed and tensor is not None
    ]


@torch.library.custom_op(
    "msda_op::accumulate_backward", mutates_args=("grad_value_buffer", "grad_locations", "grad_weights")
)
def accumulate_backward(
    grad_value_buffer: Tensor,
    grad_locations: Tensor | None,
    grad_weights: Tensor | None,
    grad_output: Tensor,
    value: Tensor,
    spatial_shapes: Tensor,
    level_start_index: Tensor,
    sampling_locations: Tensor,
    attention_weights: Tensor,
    thin_levels: bool,
    padding_mode: str,
    align_corners: bool,
    value_layout: str,
    sampling_locations_layout: str,
    deterministic: bool,
) -> None:
    """Adds the gradient of value to `[n, *value.shape]` buffers, and fills those of locations and weights if given."""
    launch.accumulate_backward(
        grad_output,
        Inputs(value, spatial_shapes, level_start_index, sampling_locations, attention_weights, None),
        Options(padding_mode, align_corners, value_layout, sampling_locations_layout),
        thin_levels,
        deterministic,
        launch.Targets(grad_value_buffer, grad_locations, grad_weights, None),
    )


@accumulate_backward.register_fake
def _(
    grad_value_buffer: Tensor,
    grad_locations: Tensor | None,
    grad_weights: Tensor | None,
    grad_output: Tensor,
    value: Tensor,
    spatial_shapes: Tensor,
    level_start_index: Tensor,
    sampling_locations: Tensor,
    attention_weights: Tensor,
    thin_levels: bool,
    padding_mode: str,
    align_corners: bool,
    value_layout: str,
    sampling_locations_layout: str,
    deterministic: bool,
) -> None:
    return


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:6])
    ctx.conventions = inputs[6:]


def _differentiate(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
    needs_value, _, _, *needs_others = ctx.needs_input_grad[:6]
    needs = (needs_value, *needs_others)
    returned = iter(backward(grad_output, *ctx.saved_tensors, *ctx.conventions, *needs))
    grad_value, *others = (next(returned) if needed else None for needed in needs)
    return grad_value, None, None, *others, *(None for _ in ctx.conventions)


def _refuse_second_derivative(ctx: Any, *_: Any) -> None:
    raise RuntimeError(
        "backend 'triton' must be differentiated once only, got a second derivative; "
        "pass backend='reference', which has derivatives of any order"
    )


forward.register_autograd(_differentiate, setup_context=_save_inputs)
backward.register_autograd(_refuse_second_derivative)


@forward.register_vmap
def _(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Tensor, int]:
    """Makes the mapped dimension part of the batch; gradients follow, outside of the mapped function."""
    if in_dims[1:3] != (None, None):
        raise ValueError(
            "spatial_shapes and level_start_index must be the same for all calls that vmap makes one, got mapped "
            "tensors; map over the others alone"
        )

    def fold(tensor: Tensor | None, in_dim: int | None) -> Tensor | None:
        if tensor is None:
            return None
        stacked = tensor.movedim(in_dim, 0) if in_dim is not None else tensor.expand(info.batch_size, *tensor.shape)
        return stacked.flatten(0, 1)

    value, spatial_shapes, level_start_index, *samples = arguments[:6]
    folded = [fold(*pair) for pair in zip(samples, in_dims[3:6], strict=True)]
    output = forward(fold(value, in_dims[0]), spatial_shapes, level_start_index, *folded, *arguments[6:])
    return output.unflatten(0, (info.batch_size, -1)), 0
