"""`torch.library` ops around the Triton kernels: schemas, fake implementations, gradients.

Importing this module imports Triton and registers `msda_op::forward`, `msda_op::backward` and
`msda_op::accumulate_backward`; `msda_op.api` does so on the first call of the "triton" backend. Plain and fused op are
the same three: `points` are sampling locations and `scores` attention weights, or, where `reference_points` are given,
sampling offsets and attention logits.

A call of a registered op costs the host more than the kernels of a decoder. So `attend`, which is what `msda_op.api`
calls, takes an autograd function wherever nothing but autograd looks on, and the registered op elsewhere: when PyTorch
traces, maps or transforms the call. Either way `launch` does the work. The autograd function knows beforehand whether
the gradient of value will be wanted, and where it will be reduced from records, the forward kernel counts them; the
registered op leaves that to the backward pass.

The forward op is traceable: `torch.compile` and export see its kernels. The backward ops are single nodes to them: of a
traced kernel PyTorch finds out by its code which arguments it writes, and takes an argument for written whose numbers
decide on an address that atomics add to, or that inline PTX gets to see. It would copy value and locations, and write
them back.

The ops have no autocast rule, on purpose: autocast passes their arguments on as they are, so that value and scores may
be half while the locations stay float32.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

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


def attend(*arguments: Any) -> Tensor:
    """Returns what `forward` returns of the same arguments, by the shortest way.

    The two questions to PyTorch that its documentation leaves out are those that `torch.autograd.Function` and
    PyTorch's own modes ask.
    """
    looked_at = (
        torch.compiler.is_compiling()
        or is_in_torch_dispatch_mode()
        or torch._C._are_functorch_transforms_active()
        or not _PLAIN_TYPES.issuperset(map(type, arguments[:6]))
    )
    return forward(*arguments) if looked_at else _Attend.apply(*arguments)


_PLAIN_TYPES = {Tensor, torch.nn.Parameter, type(None)}


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        inputs, thin_levels, options = Inputs(*arguments[:6]), arguments[6], Options(*arguments[7:11])
        counted: tuple[Tensor, ...] = ()
        if ctx.needs_input_grad[0]:
            output, counted = launch.counting_forward(inputs, options, thin_levels, *arguments[11:])
        else:
            output = launch.forward(inputs, options, thin_levels)
        ctx.save_for_backward(*inputs, *counted)
        ctx.conventions = arguments[6:]
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # asked for once: checkpointing hands them out once
        # The registered op knows what to say to those who want a second derivative.
        run = backward if torch.is_grad_enabled() else partial(_run_backward, saved[6:])
        return _differentiate(ctx, grad_output, saved[:6], run)


_Attend.__name__ = "msda_op::attend"  # under which profilers list it, beside the registered ops


def _run_backward(counted: tuple[Tensor, ...], grad_output: Tensor, *arguments: Any) -> list[Tensor]:
    thin_levels, *options, fp32_grad_accum, deterministic = arguments[6:13]
    inputs, needs = Inputs(*arguments[:6]), Needs(*arguments[13:])
    ways = (thin_levels, fp32_grad_accum, deterministic)
    return launch.backward(grad_output, inputs, Options(*options), *ways, needs, counted)


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:6])
    ctx.conventions = inputs[6:]


def _differentiate_op(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
    return _differentiate(ctx, grad_output, ctx.saved_tensors, backward)


def _differentiate(
    ctx: Any, grad_output: Tensor, inputs: tuple[Tensor | None, ...], run: Callable[..., list[Tensor]]
) -> tuple[Tensor | None, ...]:
    needs_value, _, _, *needs_others = ctx.needs_input_grad[:6]
    needs = (needs_value, *needs_others)
    returned = iter(run(grad_output, *inputs, *ctx.conventions, *needs))
    grad_value, *others = (next(returned) if needed else None for needed in needs)
    return grad_value, None, None, *others, *(None for _ in ctx.conventions)


def _refuse_second_derivative(ctx: Any, *_: Any) -> None:
    raise RuntimeError(
        "backend 'triton' must be differentiated once only, got a second derivative; "
        "pass backend='reference', which has derivatives of any order"
    )


forward.register_autograd(_differentiate_op, setup_context=_save_inputs)
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
