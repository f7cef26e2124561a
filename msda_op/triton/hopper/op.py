"""The four functions of the Hopper path, on plain tensors, without autograd."""

import torch
from torch import Tensor

from msda_op.levels import LevelStarts, SpatialShapes, device_tables, may_be_thin
from msda_op.triton.hopper.call import Call, are_joint, empty_like, empty_parts, prepare_call
from msda_op.triton.hopper.launch import Buckets, Wanted, run_backward, run_forward
from msda_op.triton.hopper.tuning import Scatter


def forward(
    value: Tensor,
    spatial_shapes: SpatialShapes,
    sampling_locations: Tensor,
    attention_weights: Tensor,
    *,
    level_start_index: LevelStarts = None,
    value_layout: str = "BLNC",
    thin_levels: bool | None = None,
) -> Tensor:
    """Multi-scale deformable attention (arXiv 2010.04159, eq. 3, without projections); see the package for its limits.

    Args:
        value: `[B, S, M, D]`, or `[B, M, S, D]` for layout "BNLC"; bfloat16, float16 or float32.
        spatial_shapes: `[L, 2]` (h, w) int32 or int64 tensor, or L pairs.
        sampling_locations: `[B, Q, M, L, K, 2]` (x, y), float32; 0..1 spans the padded level.
        attention_weights: `[B, Q, M, L, K]`, any float dtype.
        level_start_index: `[L]` first row of each level in value; may be None where `spatial_shapes` holds pairs.
        value_layout: "BLNC" or "BNLC".
        thin_levels: whether levels may have a single row or column; None looks at pairs, and takes it of a tensor.

    Returns:
        `[B, Q, M*D]` in the dtype of `value`.
    """
    tables = (spatial_shapes, level_start_index)
    samples = (sampling_locations, None, attention_weights)
    return run_forward(_prepare(value, tables, *samples, value_layout, thin_levels))


def fused_forward(
    value: Tensor,
    spatial_shapes: SpatialShapes,
    reference_points: Tensor,
    sampling_offsets: Tensor,
    attention_logits: Tensor,
    *,
    level_start_index: LevelStarts = None,
    value_layout: str = "BLNC",
    thin_levels: bool | None = None,
) -> Tensor:
    """The same of reference points, offsets and logits: locations and the softmax over L * K are computed inside.

    Args:
        value: as in `forward`.
        spatial_shapes: as in `forward`.
        reference_points: `[B, Q, L, 2]` (x, y) or `[B, Q, L, 4]` (cx, cy, w, h), float32.
        sampling_offsets: `[B, Q, M, L, K, 2]` (x, y), float32, bfloat16 or float16.
        attention_logits: `[B, Q, M, L, K]`, any float dtype.
        level_start_index: as in `forward`.
        value_layout: "BLNC" or "BNLC".
        thin_levels: as in `forward`.

    Returns:
        `[B, Q, M*D]` in the dtype of `value`.
    """
    tables = (spatial_shapes, level_start_index)
    samples = (reference_points, sampling_offsets, attention_logits)
    return run_forward(_prepare(value, tables, *samples, value_layout, thin_levels))


def backward(
    grad_output: Tensor,
    value: Tensor,
    spatial_shapes: SpatialShapes,
    sampling_locations: Tensor,
    attention_weights: Tensor,
    *,
    level_start_index: LevelStarts = None,
    compute_grad_value: bool = True,
    compute_grad_sampling_locations: bool = True,
    compute_grad_attention_weights: bool = True,
    deterministic: bool = False,
    value_layout: str = "BLNC",
    thin_levels: bool | None = None,
    scatter: Scatter = "records",
    counted: Buckets | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of `forward`.

    Args:
        grad_output: `[B, Q, M*D]`, dtype of `value`.
        value: as in `forward`, as the next three.
        spatial_shapes: see there.
        sampling_locations: see there.
        attention_weights: see there.
        level_start_index: see there.
        compute_grad_value: whether to return the gradient of `value`.
        compute_grad_sampling_locations: whether to return that of `sampling_locations`.
        compute_grad_attention_weights: whether to return that of `attention_weights`.
        deterministic: whether the gradient of `value` must be the same in every run, which takes `value` in half
            precision; the others always are.
        value_layout: "BLNC" or "BNLC".
        thin_levels: as in `forward`.
        scatter: the way to the gradient of `value`, "atomics" or "records"; deterministic gradients need records.
        counted: tables of the buckets from `launch.run_counting_forward` of the same inputs, which saves counting.

    Returns:
        Gradients of value, locations and weights in the dtypes of their inputs; None where not asked for.
    """
    tables = (spatial_shapes, level_start_index)
    samples = (sampling_locations, None, attention_weights)
    call = _prepare(value, tables, *samples, value_layout, thin_levels)
    wanted = Wanted(
        empty_like(call.places) if compute_grad_sampling_locations else None,
        None,
        empty_like(call.weights) if compute_grad_attention_weights else None,
    )
    grad_value = run_backward(call, grad_output, wanted, compute_grad_value, None, scatter, deterministic, counted)
    return None if grad_value is None else grad_value.to(value.dtype), wanted.locations, wanted.weights


def fused_backward(
    grad_output: Tensor,
    value: Tensor,
    spatial_shapes: SpatialShapes,
    reference_points: Tensor,
    sampling_offsets: Tensor,
    attention_logits: Tensor,
    *,
    level_start_index: LevelStarts = None,
    compute_grad_value: bool = True,
    compute_grad_reference_points: bool = False,
    compute_grad_sampling_offsets: bool = True,
    compute_grad_attention_logits: bool = True,
    deterministic: bool = False,
    value_layout: str = "BLNC",
    thin_levels: bool | None = None,
    scatter: Scatter = "records",
    counted: Buckets | None = None,
    joint: bool = False,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of `fused_forward`; arguments as there and in `backward`, and one more.

    Args:
        joint: whether gradients of offsets and logits that are the parts of one product, `[B, Q, 3*M*L*K]`, may be the
            parts of one tensor as well, where both are asked for and none of reference points.

    Returns:
        Gradients of value, reference points, offsets and logits in the dtypes of their inputs; None if not asked for.
        Contiguous, but for joint ones.

    Notes:
        With reference points the kernel writes the gradient of the locations in float32 (8 bytes a sample), from
        which PyTorch derives those of points and offsets.
    """
    tables = (spatial_shapes, level_start_index)
    samples = (reference_points, sampling_offsets, attention_logits)
    call = _prepare(value, tables, *samples, value_layout, thin_levels)
    offsets = call.offsets
    assert offsets is not None
    direct_offsets = compute_grad_sampling_offsets and not compute_grad_reference_points
    joint = joint and are_joint(sampling_offsets, attention_logits)
    if joint and direct_offsets and compute_grad_attention_logits:
        wanted = Wanted(None, *empty_parts(sampling_offsets, attention_logits))
    else:
        wanted = Wanted(
            empty_like(offsets, torch.float32) if compute_grad_reference_points else None,
            empty_like(offsets) if direct_offsets else None,
            empty_like(call.weights) if compute_grad_attention_logits else None,
        )
    grad_value = run_backward(call, grad_output, wanted, compute_grad_value, None, scatter, deterministic, counted)
    grad_value = None if grad_value is None else grad_value.to(value.dtype)
    grad_references, grad_offsets = None, wanted.offsets
    if wanted.locations is not None:
        grad_references, grad_offsets = _differentiate_locations(
            wanted.locations, call.places, offsets, call.spatial_shapes
        )
        grad_references = grad_references.to(reference_points.dtype)
        if not compute_grad_sampling_offsets:
            grad_offsets = None
    return grad_value, grad_references, grad_offsets, wanted.weights


def _prepare(
    value: Tensor,
    tables: tuple[SpatialShapes, LevelStarts],
    places: Tensor,
    offsets: Tensor | None,
    weights: Tensor,
    value_layout: str,
    thin_levels: bool | None,
) -> Call:
    on_device = device_tables(*tables, value.device)
    thin_levels = may_be_thin(tables[0]) if thin_levels is None else thin_levels
    return prepare_call(value, on_device, places, offsets, weights, value_layout, thin_levels)


def _differentiate_locations(
    grad_locations: Tensor, reference_points: Tensor, sampling_offsets: Tensor, spatial_shapes: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of reference points (float32) and offsets from that of the locations they make.

    A sample without gradient counts as zero even at an infinite offset.
    """
    grad_centres = grad_locations.sum(dim=(2, 4))
    if reference_points.shape[-1] == 2:
        sizes_wh = spatial_shapes.flip(-1)
        grad_offsets = grad_locations / sizes_wh[:, None, :]
        return grad_centres, grad_offsets.to(sampling_offsets.dtype)
    scale = 0.5 / sampling_offsets.shape[4]
    stretch = torch.where(grad_locations == 0, 0.0, grad_locations * sampling_offsets.float())
    grad_sizes = stretch.sum(dim=(2, 4)) * scale
    grad_offsets = grad_locations * reference_points[:, :, None, :, None, 2:] * scale
    return torch.cat((grad_centres, grad_sizes), -1), grad_offsets.to(sampling_offsets.dtype)
