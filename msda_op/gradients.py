"""The backward pass as a function of its own, for callers who keep the gradient of value in buffers of theirs."""

from collections.abc import Callable
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from msda_op.api import ms_deform_attn
from msda_op.backends import resolve_backend
from msda_op.levels import LevelStarts, SpatialShapes, device_tables, may_be_thin
from msda_op.options import Options, read_sizes
from msda_op.policy import accumulator_dtype, is_deterministic
from msda_op.validation import check_sample_sizes, validate_inputs


class Gradients(NamedTuple):
    """Gradients of one call, None where not asked for."""

    value: Tensor | None
    sampling_locations: Tensor | None
    attention_weights: Tensor | None


@torch.no_grad()
def ms_deform_attn_backward(
    grad_output: Tensor,
    value: Tensor,
    spatial_shapes: SpatialShapes,
    level_start_index: LevelStarts,
    sampling_locations: Tensor,
    attention_weights: Tensor,
    *,
    compute_grad_value: bool = True,
    compute_grad_sampling_locations: bool = True,
    compute_grad_attention_weights: bool = True,
    grad_value_buffer: Tensor | None = None,
    previous_grad_value: Tensor | None = None,
    num_scatter_buffers: int = 1,
    padding_mode: str = "zeros",
    align_corners: bool = False,
    value_layout: str = "BLNC",
    sampling_locations_layout: str = "BQHLP2",
    fp32_grad_accum: bool | None = None,
    deterministic: bool | None = None,
    backend: str = "auto",
) -> Gradients:
    """Differentiates `ms_deform_attn` at given inputs.

    The gradient of value is added to `num_scatter_buffers` buffers, which nobody zeroes here, and what is returned is
    their sum, in the order of the buffers, minus `previous_grad_value`: several calls on one value (say of all decoder
    layers) can share a buffer, and each can still learn its own share.

    Args:
        grad_output: `[B, Q, M*D]`, upstream gradient, any float dtype.
        value: as in `ms_deform_attn`, like the four that follow and the options.
        spatial_shapes: see there.
        level_start_index: see there.
        sampling_locations: see there.
        attention_weights: see there.
        compute_grad_value: whether to compute this gradient, and so for the other two.
        compute_grad_sampling_locations: see above.
        compute_grad_attention_weights: see above.
        grad_value_buffer: `[num_scatter_buffers, *value.shape]`, contiguous, to add to; float32, or the dtype of value
            where `fp32_grad_accum` is False or value is float64; None for fresh zeros.
        previous_grad_value: in the shape of value, what the sum of the buffers was before; None for nothing.
        num_scatter_buffers: number of buffers; neighbouring queries add to different ones, which lowers the contention
            of atomics on coarse levels for more memory. Sums in a fixed order (`deterministic`, and backends
            "reference" and "cuda") all go to the first.
        padding_mode: see `ms_deform_attn`.
        align_corners: see there.
        value_layout: see there.
        sampling_locations_layout: see there.
        fp32_grad_accum: see there.
        deterministic: see there.
        backend: see there.

    Returns:
        The gradients asked for, each in the dtype and shape of its input.

    Raises:
        ValueError: if an argument breaks a rule.
        RuntimeError: if the backend cannot run here.

    Notes:
        Not differentiable. Never waits for the device where `ms_deform_attn` does not. A share found by subtraction
        carries the rounding of the sums it is the difference of.
    """
    options = Options(padding_mode, align_corners, value_layout, sampling_locations_layout)
    validate_inputs(value, spatial_shapes, level_start_index, sampling_locations, attention_weights, options)
    chosen = resolve_backend(backend, value, options, deterministic)
    in_order = is_deterministic(deterministic)
    accumulator = torch.float64 if value.dtype == torch.float64 else accumulator_dtype(value.dtype, fp32_grad_accum)
    _check_grad_output(grad_output, value, attention_weights, value_layout)
    _check_buffers(grad_value_buffer, previous_grad_value, value, num_scatter_buffers, accumulator, compute_grad_value)
    buffer = grad_value_buffer
    if compute_grad_value and buffer is None:
        buffer = value.new_zeros((num_scatter_buffers, *value.shape), dtype=accumulator)

    needs = (compute_grad_sampling_locations, compute_grad_attention_weights)
    if chosen == "triton":
        check_sample_sizes(value=value, sampling_locations=sampling_locations)
        tables = device_tables(spatial_shapes, level_start_index, value.device)
        inputs = (value, *tables, sampling_locations, attention_weights)
        others = _by_kernels(buffer, grad_output, inputs, may_be_thin(spatial_shapes), options, in_order, needs)
    else:

        def op(value: Tensor, locations: Tensor, weights: Tensor) -> Tensor:
            tables = (spatial_shapes, level_start_index)
            return ms_deform_attn(
                value, *tables, locations, weights, **options._asdict(), deterministic=deterministic, backend=chosen
            )

        others = _by_autograd(buffer, grad_output, op, (value, sampling_locations, attention_weights), needs)
    remaining = iter(others)
    grad_locations, grad_weights = (next(remaining) if needed else None for needed in needs)
    grad_value = None
    if buffer is not None:
        total = _sum_of_buffers(buffer, previous_grad_value)
        # One buffer is its own sum, and a caller's is not to be given back as if it were a new tensor.
        grad_value = total.to(value.dtype, copy=buffer is grad_value_buffer and previous_grad_value is None)
    return Gradients(grad_value, grad_locations, grad_weights)


def _by_kernels(
    buffer: Tensor | None,
    grad_output: Tensor,
    inputs: tuple[Tensor, ...],
    thin_levels: bool,
    options: Options,
    in_order: bool,
    needs: tuple[bool, bool],
) -> list[Tensor]:
    from msda_op import registration  # Triton is not installed everywhere, and is imported where it is used

    conventions = (thin_levels, *options)
    if buffer is None:
        return registration.backward(grad_output, *inputs, None, *conventions, True, in_order, False, *needs, False)
    _, _, _, *differentiable = inputs
    targets = [
        torch.empty_like(tensor, memory_format=torch.contiguous_format) if needed else None
        for tensor, needed in zip(differentiable, needs, strict=True)
    ]
    registration.accumulate_backward(buffer, *targets, grad_output, *inputs, *conventions, in_order)
    return [target for target in targets if target is not None]


def _by_autograd(
    buffer: Tensor | None,
    grad_output: Tensor,
    op: Callable[..., Tensor],
    inputs: tuple[Tensor, Tensor, Tensor],
    needs: tuple[bool, bool],
) -> list[Tensor]:
    value = inputs[0] if buffer is None else inputs[0].to(torch.promote_types(buffer.dtype, inputs[0].dtype))
    needed = (buffer is not None, *needs)
    with torch.enable_grad():
        tensors = zip((value, *inputs[1:]), needed, strict=True)
        leaves = [tensor.detach().requires_grad_(need) for tensor, need in tensors]
        output: Any = op(*leaves)
        asked = [leaf for leaf in leaves if leaf.requires_grad]
        gradients = list(torch.autograd.grad(output, asked, grad_output.to(output.dtype))) if asked else []
    if buffer is not None:
        buffer[0].add_(gradients.pop(0))
    return gradients


def _sum_of_buffers(buffer: Tensor, previous: Tensor | None) -> Tensor:
    total = reduce(torch.add, (part.to(torch.promote_types(part.dtype, torch.float32)) for part in buffer.unbind()))
    return total if previous is None else total - previous


def _check_grad_output(grad_output: Tensor, value: Tensor, attention_weights: Tensor, value_layout: str) -> None:
    sizes = read_sizes(value, attention_weights, value_layout)
    expected = (sizes.batch, sizes.num_queries, sizes.num_heads * sizes.head_dim)
    if grad_output.shape != expected or grad_output.device != value.device or not grad_output.is_floating_point():
        raise ValueError(
            f"grad_output must be a float tensor {expected} [B, Q, M*D] on {value.device}, got {grad_output.dtype} "
            f"{tuple(grad_output.shape)} on {grad_output.device}; pass the gradient of the output"
        )


def _check_buffers(
    buffer: Tensor | None,
    previous: Tensor | None,
    value: Tensor,
    num_scatter_buffers: int,
    accumulator: torch.dtype,
    compute_grad_value: bool,
) -> None:
    if num_scatter_buffers < 1:
        raise ValueError(f"num_scatter_buffers must be at least 1, got {num_scatter_buffers}; pass 1 for one buffer")
    for name, tensor in (("grad_value_buffer", buffer), ("previous_grad_value", previous)):
        if tensor is not None and not compute_grad_value:
            raise ValueError(f"{name} must be None without compute_grad_value, got a tensor; leave it out")
    if buffer is not None:
        expected = (num_scatter_buffers, *value.shape)
        found = (tuple(buffer.shape), buffer.dtype, buffer.device)
        if found != (expected, accumulator, value.device) or not buffer.is_contiguous():
            raise ValueError(
                f"grad_value_buffer must be contiguous, {expected} [num_scatter_buffers, *value.shape], {accumulator} "
                f"on {value.device}, got {found}, contiguous: {buffer.is_contiguous()}; allocate it like that"
            )
    if previous is not None and (previous.shape != value.shape or previous.device != value.device):
        raise ValueError(
            f"previous_grad_value must have the shape {tuple(value.shape)} of value on {value.device}, got "
            f"{tuple(previous.shape)} on {previous.device}; pass the sum of the buffers before this call"
        )
