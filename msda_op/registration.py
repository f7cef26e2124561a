"""`torch.library` ops around the Triton kernels: schemas, fake implementations, gradients.

Importing this module imports Triton and registers `msda_op::forward` and `msda_op::backward`; `msda_op.api` does so on
the first call of the "triton" backend. The ops have no autocast rule, on purpose: autocast passes their arguments
on as they are, so that value and weights may be half while the locations stay float32.
"""

from typing import Any

import torch
from torch import Tensor

from msda_op.triton import launch

# The kernels launch through custom_op, not triton_op: triton_op takes the body as fake implementation and traces into
# it, which the interpreter (the CPU path of the tests) cannot do.


@torch.library.custom_op("msda_op::forward", mutates_args=())
def forward(
    value: Tensor,
    spatial_shapes: Tensor,
    level_start_index: Tensor,
    sampling_locations: Tensor,
    attention_weights: Tensor,
) -> Tensor:
    """Forward kernel as an op; arguments as in `msda_op.ms_deform_attn`, with the level table on the device."""
    return launch.forward(value, spatial_shapes, level_start_index, sampling_locations, attention_weights)


@forward.register_fake
def _(
    value: Tensor,
    spatial_shapes: Tensor,
    level_start_index: Tensor,
    sampling_locations: Tensor,
    attention_weights: Tensor,
) -> Tensor:
    batch, _, num_heads, head_dim = value.shape
    return value.new_empty(batch, sampling_locations.shape[1], num_heads * head_dim)


@torch.library.custom_op("msda_op::backward", mutates_args=())
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
    """Backward kernel as an op; returns the gradients asked for, in the order value, locations, weights."""
    return launch.backward(
        grad_output,
        value,
        spatial_shapes,
        level_start_index,
        sampling_locations,
        attention_weights,
        needs_value,
        needs_locations,
        needs_weights,
    )


@backward.register_fake
def _(
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
    asked = ((value, needs_value), (sampling_locations, needs_locations), (attention_weights, needs_weights))
    return [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor, needed in asked if needed]


def _save_inputs(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
    needs_value, _, _, needs_locations, needs_weights = ctx.needs_input_grad
    gradients = iter(backward(grad_output, *ctx.saved_tensors, needs_value, needs_locations, needs_weights))
    return (
        next(gradients) if needs_value else None,
        None,
        None,
        next(gradients) if needs_locations else None,
        next(gradients) if needs_weights else None,
    )


def _refuse_second_derivative(ctx: Any, *_: Any) -> None:
    raise RuntimeError(
        "backend 'triton' must be differentiated once only, got a second derivative; "
        "pass backend='reference', which has derivatives of any order"
    )


forward.register_autograd(_differentiate, setup_context=_save_inputs)
backward.register_autograd(_refuse_second_derivative)
