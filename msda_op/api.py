"""The op as users call it: check the arguments, choose the backend openly, call it."""

from collections.abc import Hashable
from typing import Any

from torch import Tensor

from msda_op import compat
from msda_op.backends import resolve_backend
from msda_op.call_memory import describe_call, recall
from msda_op.levels import LevelStarts, SpatialShapes, device_tables, may_be_thin, read_shapes
from msda_op.locations import sampling_locations_from_offsets
from msda_op.options import Options, value_as_blnc
from msda_op.policy import accumulates_in_fp32, is_deterministic
from msda_op.reference import attention_weights_from_logits, ms_deform_attn_reference
from msda_op.validation import check_level_table, check_sample_sizes, validate_fused_inputs, validate_inputs


def ms_deform_attn(
    value: Tensor,
    spatial_shapes: SpatialShapes,
    level_start_index: LevelStarts,
    sampling_locations: Tensor,
    attention_weights: Tensor,
    *,
    padding_mode: str = "zeros",
    align_corners: bool = False,
    value_layout: str = "BLNC",
    sampling_locations_layout: str = "BQHLP2",
    fp32_grad_accum: bool | None = None,
    deterministic: bool | None = None,
    backend: str = "auto",
) -> Tensor:
    """Multi-scale deformable attention without its projections (arXiv 2010.04159, eq. 3).

    output[b, q, m] = sum_l sum_k attention_weights[b, q, m, l, k] * bilinear(value_l[b, :, m], location[b, q, m, l, k])

    Args:
        value: `[B, S, M, D]`, float32, float16, bfloat16 or (reference only) float64; levels one after the other,
            row-major.
        spatial_shapes: `[L, 2]` int32 or int64 tensor, or L pairs; rows are (h, w) and their products add up to S.
        level_start_index: `[L]` int32 or int64 tensor, or L ints, first row of each level; may be None where
            `spatial_shapes` holds pairs.
        sampling_locations: `[B, Q, M, L, K, 2]` (x, y), float32 (or float64 with a float64 value); 0..1 spans the
            padded level; NaN samples nothing.
        attention_weights: `[B, Q, M, L, K]`, any float dtype.
        padding_mode: outside a level value is zero ("zeros"), or that of the level's nearest pixel ("border").
        align_corners: whether locations 0 and 1 are the centres of a level's outermost pixels, instead of their outer
            edges; as in `torch.nn.functional.grid_sample`.
        value_layout: "BLNC", or "BNLC" for a head-major value `[B, M, S, D]`.
        sampling_locations_layout: "BQHLP2", or "B2QHLP" for `[B, 2, Q, M, L, K]`.
        fp32_grad_accum: False lets "triton" add up the gradient of a half-precision value in its own dtype: half of the
            traffic, errors of some percent; None and True add in float32 (see `msda_op.policy`). The other backends
            always add in at least float32.
        deterministic: whether the gradients must have the same bits in every run; None follows
            `torch.use_deterministic_algorithms`.
        backend: one of `BACKENDS`; "auto" is what `choose_backend` answers.

    Returns:
        `[B, Q, M*D]` in the dtype of `value`.

    Raises:
        ValueError: if an argument breaks a rule, the backend's name is unknown, or does not take this dtype or option.
        RuntimeError: if the backend cannot run here.

    Notes:
        Differentiable in value, locations and weights; "reference" any number of times, the others once.
        Unless `deterministic`, "triton" and "cuda" add the gradient of value up in any order, so its last bits differ
        between runs. Never waits for the device, except that "reference" reads a level table in device memory. Tables
        on the host are checked in full, tables in device memory by shape, dtype and device alone. On Hopper GPUs a
        forward pass of many samples whose value needs a gradient keeps tables of about 1 MiB (at the size of an
        encoder, see `msda_op.triton.launch.counting_forward`) until the backward pass.
    """
    in_order = is_deterministic(deterministic)
    tensors, tables = (value, sampling_locations, attention_weights), (spatial_shapes, level_start_index)
    conventions = (padding_mode, align_corners, value_layout, sampling_locations_layout)
    call = describe_call(tensors, tables, (*conventions, fp32_grad_accum, in_order, backend))
    known = recall(call)
    if known is not None:
        return known(value, tables, sampling_locations, attention_weights)
    options = Options(*conventions)
    validate_inputs(value, spatial_shapes, level_start_index, sampling_locations, attention_weights, options)
    chosen = resolve_backend(backend, value, options, deterministic)
    if chosen == "reference":
        shapes = read_shapes(spatial_shapes)
        check_level_table(shapes, value_as_blnc(value, value_layout).shape[1])
        return ms_deform_attn_reference(value, shapes, sampling_locations, attention_weights, options)
    if chosen == "cuda":
        on_device = device_tables(*tables, value.device)
        return compat.original_ms_deform_attn(value, *on_device, sampling_locations, attention_weights)
    check_sample_sizes(value=value, sampling_locations=sampling_locations)
    ways = (accumulates_in_fp32(value.dtype, fp32_grad_accum), in_order)
    return _attend(value, tables, (sampling_locations, attention_weights, None), (*options, *ways), call)


def fused_ms_deform_attn(
    value: Tensor,
    spatial_shapes: SpatialShapes,
    level_start_index: LevelStarts,
    reference_points: Tensor,
    sampling_offsets: Tensor,
    attention_logits: Tensor,
    *,
    padding_mode: str = "zeros",
    align_corners: bool = False,
    value_layout: str = "BLNC",
    fp32_grad_accum: bool | None = None,
    deterministic: bool | None = None,
    backend: str = "auto",
) -> Tensor:
    """Multi-scale deformable attention from predicted offsets and logits (arXiv 2010.04159, eq. 3 and appendix A.4).

    output = ms_deform_attn(value, locations, weights), with weights = softmax over the L*K logits of a query and head,
    and locations as in `sampling_locations_from_offsets`. "triton" computes both inside its kernels, in float32, and
    writes neither to memory; the other backends compose the three functions.

    Args:
        value: as in `ms_deform_attn`.
        spatial_shapes: as in `ms_deform_attn`.
        level_start_index: as in `ms_deform_attn`.
        reference_points: `[B, Q, L, 2]` (x, y) or `[B, Q, L, 4]` (cx, cy, w, h), float32 (or float64 with a float64
            value); 0..1 spans the padded level.
        sampling_offsets: `[B, Q, M, L, K, 2]` (x, y), any float dtype; pixels of the level for points, shares of half
            the size, times K, for boxes.
        attention_logits: `[B, Q, M, L, K]` or `[B, Q, M, L*K]`, any float dtype.
        padding_mode: as in `ms_deform_attn`.
        align_corners: as in `ms_deform_attn`.
        value_layout: as in `ms_deform_attn`.
        fp32_grad_accum: as in `ms_deform_attn`.
        deterministic: as in `ms_deform_attn`.
        backend: as in `ms_deform_attn`.

    Returns:
        `[B, Q, M*D]` in the dtype of `value`.

    Raises:
        ValueError: as `ms_deform_attn`.
        RuntimeError: as `ms_deform_attn`.

    Notes:
        Differentiable in value, reference points, offsets and logits, each in its dtype, and only where asked for;
        order, precision and waiting as in `ms_deform_attn`.
    """
    if attention_logits.dim() == 4 and sampling_offsets.dim() == 6:
        attention_logits = split_levels(attention_logits, sampling_offsets)
    in_order = is_deterministic(deterministic)
    samples, tables = (sampling_offsets, attention_logits, reference_points), (spatial_shapes, level_start_index)
    choices = (padding_mode, align_corners, value_layout, fp32_grad_accum, in_order, backend)
    call = describe_call((value, *samples), tables, choices)
    known = recall(call)
    if known is not None:
        return known(value, tables, *samples)
    options = Options(padding_mode, align_corners, value_layout)
    validate_fused_inputs(
        value, spatial_shapes, level_start_index, reference_points, sampling_offsets, attention_logits, options
    )
    chosen = resolve_backend(backend, value, options, deterministic)
    if chosen != "triton":
        return ms_deform_attn(
            value,
            spatial_shapes,
            level_start_index,
            sampling_locations_from_offsets(reference_points, sampling_offsets, spatial_shapes),
            attention_weights_from_logits(attention_logits),
            padding_mode=padding_mode,
            align_corners=align_corners,
            value_layout=value_layout,
            deterministic=deterministic,
            backend=chosen,
        )
    check_sample_sizes(value=value, sampling_offsets=sampling_offsets)
    ways = (accumulates_in_fp32(value.dtype, fp32_grad_accum), in_order)
    return _attend(value, tables, samples, (*options, *ways), call)


def _attend(
    value: Tensor,
    tables: tuple[SpatialShapes, LevelStarts],
    samples: tuple[Tensor, Tensor, Tensor | None],
    conventions: tuple[Any, ...],
    call: Hashable | None,
) -> Tensor:
    from msda_op import eager  # Triton is not installed everywhere, and is imported where it is used
    from msda_op.triton.arguments import Inputs

    points, scores, reference_points = samples
    inputs = Inputs(value, *device_tables(*tables, value.device), points, scores, reference_points)
    conventions = (may_be_thin(tables[0]), *conventions)
    return eager.attend(inputs, conventions, call, own_tables=not isinstance(tables[0], Tensor))


def split_levels(attention_logits: Tensor, sampling_offsets: Tensor) -> Tensor:
    """Returns logits `[B, Q, M, L*K]` as `[B, Q, M, L, K]`, L and K being those of the offsets.

    Raises:
        ValueError: if there are not L*K logits to a query and head.
    """
    num_levels, num_points = sampling_offsets.shape[3:5]
    if attention_logits.shape[3] != num_levels * num_points:
        raise ValueError(
            f"attention_logits must end in L*K = {num_levels * num_points} logits, got shape "
            f"{tuple(attention_logits.shape)}; give one logit to each offset"
        )
    return attention_logits.unflatten(3, (num_levels, num_points))
