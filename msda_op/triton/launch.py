"""Allocates outputs, and launches the kernels that `plan` chooses: those of `hopper`, or plain ones in tiles.

Points and scores stand for locations and attention weights, or, where reference points are given, for the offsets and
logits of the fused op. What a launch consists of is a `Launch`, so that it can be looked at without being run.
"""

from typing import Any, Literal, NamedTuple

import torch
import triton
from torch import Tensor

from msda_op.options import Options, Sizes, read_sizes
from msda_op.policy import accumulator_dtype
from msda_op.triton import hopper
from msda_op.triton.arguments import Inputs, Needs, Targets, convention_arguments
from msda_op.triton.backward import backward_kernel
from msda_op.triton.forward import forward_kernel
from msda_op.triton.hopper import launch as hopper_launch
from msda_op.triton.hopper.call import Call, empty_like, empty_parts, prepare_call
from msda_op.triton.hopper.tuning import choose_scatter
from msda_op.triton.kernel_launch import Launch
from msda_op.triton.launch_table import LaunchKey, choose_regime, choose_shape
from msda_op.triton.plan import KernelPlan, choose_kernels
from msda_op.triton.sorted_launch import sorted_value_gradient


class Tile(NamedTuple):
    """Launch shape of a kernel: queries, points and channels of a tile, and the warps that share it."""

    block_q: int
    block_k: int
    block_d: int
    num_warps: int


def choose_tile(stage: Literal["forward", "backward"], value: Tensor, sizes: Sizes) -> Tile:
    """Returns the tile of a pass: all points and channels of a head, as many queries as the launch table says."""
    block_k, block_d = triton.next_power_of_2(sizes.num_points), triton.next_power_of_2(sizes.head_dim)
    capability = _capability_of(value)
    architecture = None if capability is None else 10 * capability[0] + capability[1]
    regime = choose_regime(sizes.batch, sizes.num_queries)
    shape = choose_shape(LaunchKey(architecture, stage, value.element_size(), block_k, block_d, regime))
    return Tile(shape.block_q, block_k, block_d, shape.num_warps)


def _capability_of(tensor: Tensor) -> tuple[int, int] | None:
    return torch.cuda.get_device_capability(tensor.device) if tensor.is_cuda else None


def forward(inputs: Inputs, options: Options, thin_levels: bool) -> Tensor:
    """Returns `[B, Q, M*D]` in the dtype of `value`; inputs of any strides (copied).

    Args:
        inputs: of the pass.
        options: conventions and layouts.
        thin_levels: whether levels may have a single row or column, which some kernels take at an extra cost.
    """
    inputs = make_contiguous(inputs)
    output = inputs.value.new_empty(output_shape(inputs, options))
    if output.numel() > 0:
        start_forward(inputs, output, options, thin_levels, plan_of(inputs, options))
    return output


def make_contiguous(inputs: Inputs, but_for: tuple[str, ...] = ()) -> Inputs:
    """Returns inputs that are contiguous, but for those that are named."""
    return Inputs(
        **{
            name: tensor if tensor is None or name in but_for else tensor.contiguous()
            for name, tensor in inputs._asdict().items()
        }
    )


def output_shape(inputs: Inputs, options: Options) -> tuple[int, int, int]:
    """Returns `(B, Q, M*D)`."""
    sizes = read_sizes(inputs.value, inputs.scores, options.value_layout)
    return sizes.batch, sizes.num_queries, sizes.num_heads * sizes.head_dim


def start_forward(
    inputs: Inputs, output: Tensor, options: Options, thin_levels: bool, plan: KernelPlan
) -> tuple[Launch, Any]:
    """Launches the kernel that fills `output`; returns the launch and what `Launch.run` does."""
    if plan.forward == "hopper":
        launch = hopper_launch.forward_launch(_hopper_call(inputs, options, thin_levels), output)
    else:
        launch = forward_launch(inputs, output, options)
    return launch, launch.run(output)


def counting_forward(
    inputs: Inputs, options: Options, thin_levels: bool, fp32_grad_accum: bool, deterministic: bool
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Returns what `forward` does, and what the backward pass then need not count, to be handed to it.

    That is nothing unless the gradient of value will be reduced from records, whose tables take some more than
    B * M * (S / 3 + Q * L * K / 384) int32: 1.2 MiB at the size of an encoder.
    """
    if counts_samples(inputs, plan_of(inputs, options, deterministic, fp32_grad_accum)):
        return forward_of_records(inputs, options, thin_levels)
    return forward(inputs, options, thin_levels), ()


def forward_of_records(inputs: Inputs, options: Options, thin_levels: bool) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Does what `counting_forward` does where a plan `counts_samples`."""
    return hopper_launch.run_counting_forward(_hopper_call(inputs, options, thin_levels))


def counts_samples(inputs: Inputs, plan: KernelPlan) -> bool:
    """Tells whether the forward pass of a plan counts samples for its backward pass."""
    by_records = plan.backward == "hopper" and plan.grad_value == "records"
    num_samples = inputs.scores.numel()
    return by_records and num_samples > 0 and choose_scatter(num_samples) == "records"


def plan_of(
    inputs: Inputs,
    options: Options,
    deterministic: bool = False,
    fp32_grad_accum: bool = True,
    num_buffers: int = 1,
) -> KernelPlan:
    """Returns the plan of a call, see `choose_kernels`."""
    value = inputs.value
    return choose_kernels(
        read_sizes(value, inputs.scores, options.value_layout),
        value.dtype,
        options,
        fused=inputs.reference_points is not None,
        deterministic=deterministic,
        capability=_capability_of(value),
        fp32_grad_accum=fp32_grad_accum,
        num_buffers=num_buffers,
    )


def _hopper_call(inputs: Inputs, options: Options, thin_levels: bool) -> Call:
    value, spatial_shapes, level_start_index, points, scores, reference_points = inputs
    places, offsets = (points, None) if reference_points is None else (reference_points, points)
    tables = (spatial_shapes, level_start_index)
    return prepare_call(value, tables, places, offsets, scores, options.value_layout, thin_levels)


def forward_launch(inputs: Inputs, output: Tensor, options: Options) -> Launch:
    """Returns the launch of the plain kernel that fills `output`."""
    sizes = read_sizes(inputs.value, inputs.scores, options.value_layout)
    tile = choose_tile("forward", inputs.value, sizes)
    arguments = {**_tensor_arguments(inputs), "output": output, **_size_arguments(sizes, options, inputs, tile)}
    return Launch(forward_kernel, _num_programs(sizes, tile), arguments, tile.num_warps)


def backward(
    grad_output: Tensor,
    inputs: Inputs,
    options: Options,
    thin_levels: bool,
    fp32_grad_accum: bool,
    deterministic: bool,
    needs: Needs,
    counted: tuple[Tensor, ...] = (),
) -> list[Tensor]:
    """Returns the gradients asked for, in the order of `Needs`, each in its input's dtype and shape, contiguous.

    `counted` comes from `counting_forward` of the same call; nothing in it is written.
    """
    plan = plan_of(inputs, options, deterministic, fp32_grad_accum)
    ways = (plan, options, thin_levels, fp32_grad_accum, deterministic)
    gradients = differentiate(grad_output, inputs, *ways, needs, counted)
    return [gradient for gradient in gradients if gradient is not None]


def differentiate(
    grad_output: Tensor,
    inputs: Inputs,
    plan: KernelPlan,
    options: Options,
    thin_levels: bool,
    fp32_grad_accum: bool,
    deterministic: bool,
    needs: Needs,
    counted: tuple[Tensor, ...],
    joint: bool = False,
) -> tuple[Tensor | None, ...]:
    """Returns all gradients in the order of `Needs`, None where not asked for.

    Args:
        grad_output: of the output.
        inputs: of the forward.
        plan: from `plan_of` the following.
        options: see `forward`.
        thin_levels: see there.
        fp32_grad_accum: whether the gradient of value is added up in float32.
        deterministic: whether in a fixed order.
        needs: what is asked for.
        counted: see `backward`.
        joint: whether gradients of offsets and logits are to be the parts of one tensor, as these are, where possible.
    """
    if plan.backward == "hopper":
        ways = (plan, deterministic, needs, counted, joint)
        return _backward_by_hopper(grad_output, inputs, options, thin_levels, *ways)
    return _backward_by_tiles(grad_output, inputs, options, plan, fp32_grad_accum, needs)


def takes_one_launch(plan: KernelPlan, needs: Needs) -> bool:
    """Tells whether `start_backward` gives all gradients that are asked for."""
    adds = plan.grad_value == "atomics" or not needs.value
    return plan.backward == "hopper" and adds and not needs.reference_points


def allocate_targets(inputs: Inputs, needs: Needs, joint: bool) -> Targets:
    """Returns what `start_backward` fills; `joint` as in `differentiate`."""
    value, _, _, points, scores, _ = inputs
    grad_value = torch.zeros_like(value, dtype=torch.float32) if needs.value else None
    if joint and needs.points and needs.scores:
        return Targets(grad_value, *empty_parts(points, scores), None)
    grad_points = empty_like(points) if needs.points else None
    return Targets(grad_value, grad_points, empty_like(scores) if needs.scores else None, None)


def start_backward(
    grad_output: Tensor, inputs: Inputs, targets: Targets, options: Options, thin_levels: bool
) -> tuple[Launch, Any]:
    """Launches the Hopper kernel that fills the targets, adding to that of value; returns what `start_forward` does.

    The gradient of value is of its shape here, in float32; `grad_output` is contiguous, aligned and of its dtype.
    """
    call = _hopper_call(inputs, options, thin_levels)
    if inputs.reference_points is None:
        wanted = hopper_launch.Wanted(targets.grad_points, None, targets.grad_scores)
    else:
        wanted = hopper_launch.Wanted(None, targets.grad_points, targets.grad_scores)
    launch = hopper_launch.main_launch(call, grad_output, wanted, targets.grad_value)
    return launch, launch.run(call.value)


def _backward_by_hopper(
    grad_output: Tensor,
    inputs: Inputs,
    options: Options,
    thin_levels: bool,
    plan: KernelPlan,
    deterministic: bool,
    needs: Needs,
    counted: tuple[Tensor, ...],
    joint: bool,
) -> tuple[Tensor | None, ...]:
    value, spatial_shapes, level_start_index, points, scores, reference_points = inputs
    ways: dict[str, Any] = {
        "level_start_index": level_start_index,
        "value_layout": options.value_layout,
        "thin_levels": thin_levels,
        "deterministic": deterministic,
        "scatter": plan.grad_value,
        "counted": hopper_launch.Buckets(*counted) if counted else None,
    }
    grad_output = grad_output.to(value.dtype)
    if reference_points is None:
        gradients = hopper.backward(
            grad_output,
            value,
            spatial_shapes,
            points,
            scores,
            compute_grad_value=needs.value,
            compute_grad_sampling_locations=needs.points,
            compute_grad_attention_weights=needs.scores,
            **ways,
        )
        return *gradients, None
    grad_value, grad_reference, grad_points, grad_scores = hopper.fused_backward(
        grad_output,
        value,
        spatial_shapes,
        reference_points,
        points,
        scores,
        compute_grad_value=needs.value,
        compute_grad_reference_points=needs.reference_points,
        compute_grad_sampling_offsets=needs.points,
        compute_grad_attention_logits=needs.scores,
        joint=joint,
        **ways,
    )
    return grad_value, grad_points, grad_scores, grad_reference


def _backward_by_tiles(
    grad_output: Tensor, inputs: Inputs, options: Options, plan: KernelPlan, fp32_grad_accum: bool, needs: Needs
) -> tuple[Tensor | None, ...]:
    value, reference_points = inputs.value, inputs.reference_points
    sizes = read_sizes(value, inputs.scores, options.value_layout)
    in_order = plan.grad_value == "sorted"
    accumulator = accumulator_dtype(value.dtype, fp32_grad_accum)
    shares = (sizes.batch, sizes.num_queries, sizes.num_heads, sizes.num_levels)
    targets = Targets(
        value.new_zeros((1, *value.shape), dtype=accumulator) if needs.value and not in_order else None,
        torch.empty_like(inputs.points, memory_format=torch.contiguous_format) if needs.points else None,
        torch.empty_like(inputs.scores, memory_format=torch.contiguous_format) if needs.scores else None,
        reference_points.new_empty((*shares, reference_points.shape[-1]), dtype=torch.float32)
        if needs.reference_points and reference_points is not None
        else None,
    )
    scatter(grad_output, inputs, targets, options)
    grad_value = None if targets.grad_value is None else targets.grad_value[0].to(value.dtype)
    if needs.value and in_order:
        grad_value = sorted_value_gradient(grad_output, inputs, value.dtype, options)
    grad_reference = None
    if targets.grad_reference is not None and reference_points is not None:
        grad_reference = targets.grad_reference.sum(2).to(reference_points.dtype)
    return grad_value, targets.grad_points, targets.grad_scores, grad_reference


def accumulate_backward(
    grad_output: Tensor, inputs: Inputs, options: Options, thin_levels: bool, deterministic: bool, targets: Targets
) -> None:
    """Writes the targets; sums in a fixed order go to the first buffer."""
    buffer = targets.grad_value
    assert buffer is not None, "without a buffer to add to, backward() does it"
    num_buffers = 1 if deterministic else buffer.shape[0]
    plan = plan_of(inputs, options, deterministic, buffer.dtype == torch.float32, num_buffers)
    if plan.backward == "hopper":
        assert plan.grad_value != "sorted", "that is how tiles keep an order"
        call = _hopper_call(inputs, options, thin_levels)
        wanted = hopper_launch.Wanted(targets.grad_points, None, targets.grad_scores)
        upstream = grad_output.to(call.value.dtype)
        hopper_launch.run_backward(call, upstream, wanted, True, buffer[0], plan.grad_value, deterministic)
    elif plan.grad_value == "sorted":
        scatter(grad_output, inputs, targets._replace(grad_value=None), options)
        buffer[0].add_(sorted_value_gradient(grad_output, inputs, buffer.dtype, options))
    else:
        scatter(grad_output, inputs, targets, options)


def scatter(grad_output: Tensor, inputs: Inputs, targets: Targets, options: Options) -> None:
    """Writes the targets, adding to the buffers of value in any order."""
    if any(target is not None for target in targets) and grad_output.numel() > 0:
        backward_launch(grad_output, inputs, targets, options).run(grad_output)


def backward_launch(grad_output: Tensor, inputs: Inputs, targets: Targets, options: Options) -> Launch:
    """Returns the launch that writes the targets."""
    sizes = read_sizes(inputs.value, inputs.scores, options.value_layout)
    tile = choose_tile("backward", inputs.value, sizes)
    arguments = {
        "grad_output": grad_output.contiguous(),
        **_tensor_arguments(inputs),
        **targets._asdict(),
        **_size_arguments(sizes, options, inputs, tile),
        "buffer_stride": inputs.value.numel(),
        "NUM_BUFFERS": 1 if targets.grad_value is None else targets.grad_value.shape[0],
    }
    return Launch(backward_kernel, _num_programs(sizes, tile), arguments, tile.num_warps)


def _num_programs(sizes: Sizes, tile: Tile) -> int:
    return triton.cdiv(sizes.num_queries, tile.block_q) * sizes.num_heads * sizes.batch


def _tensor_arguments(inputs: Inputs) -> dict[str, Tensor | None]:
    return {name: None if tensor is None else tensor.contiguous() for name, tensor in inputs._asdict().items()}


def _size_arguments(sizes: Sizes, options: Options, inputs: Inputs, tile: Tile) -> dict[str, Any]:
    reference_points = inputs.reference_points
    return {
        "num_queries": sizes.num_queries,
        "value_length": sizes.value_length,
        "D": sizes.head_dim,
        "HEAD_MAJOR": options.value_layout == "BNLC",
        "NUM_COORDINATES": 0 if reference_points is None else reference_points.shape[-1],
        "BLOCK_Q": tile.block_q,
        "BLOCK_L": triton.next_power_of_2(sizes.num_levels),
        "BLOCK_K": tile.block_k,
        "BLOCK_D": tile.block_d,
        **convention_arguments(sizes, options),
    }
