"""The four functions of the Hopper path, on plain tensors, without autograd."""

import torch
from torch import Tensor

from msda_op.levels import HostShapes
from msda_op.triton.hopper.launch import Wanted, prepare_call, run_backward, run_forward
from msda_op.triton.hopper.tuning import Scatter


def forward(
    value: Tensor,
    spatial_shapes: HostShapes,
    sampling_locations: Tensor,
    attention_weights: Tensor,
    *,
    value_layout: str = "BLNC",
) -> Tensor:
    """Multi-scale deformable attention (arXiv 2010.04159, eq. 3, without projections); see the package for its limits.

    Args:
        value: `[B, S, M, D]`, or `[B, M, S, D]` for layout "BNLC"; bfloat16 or float16.
        spatial_shapes: L pairs (h, w).
        sampling_locations: `[B, Q, M, L, K, 2]` (x, y), float32; 0..1 spans the padded level.
        attention_weights: `[B, Q, M, L, K]`, any float dtype.
        value_layout: "BLNC" or "BNLC".

    Returns:
        `[B, Q, M*D]` in the dtype of `value`.
    """
    return run_forward(prepare_call(value, spatial_shapes, sampling_locations, None, attention_weights, value_layout))


def fused_forward(
    value: Tensor,
    spatial_shapes: HostShapes,
    reference_points: Tensor,
    sampling_offsets: Tensor,
    attention_logits: Tensor,
    *,
    value_layout: str = "BLNC",
) -> Tensor:
    """The same of reference points, offsets and logits: locations and the softmax over L * K are computed inside.

    Args:
        value: as in `forward`.
        spatial_shapes: L pairs (h, w).
        reference_points: `[B, Q, L, 2]` (x, y) or `[B, Q, L, 4]` (cx, cy, w, h); used in float32.
        sampling_offsets: `[B, Q, M, L, K, 2]` (x, y), float32, bfloat16 or float16.
        attention_logits: `[B, Q, M, L, K]`, any float dtype.
        value_layout: "BLNC" or "BNLC".

    Returns:
        `[B, Q, M*D]` in the dtype of `value`.
    """
    return run_forward(
        prepare_call(value, spatial_shapes, reference_points, sampling_offsets, attention_logits, value_layout)
    )


def backward(
    grad_output: Tensor,
    value: Tensor,
    spatial_shapes: HostShapes,
    sampling_locations: Tensor,
    attention_weights: Tensor,
    *,
    compute_grad_value: bool = True,
    compute_grad_sampling_locations: bool = True,
    compute_grad_attention_weights: bool = True,
    deterministic: bool = False,
    value_layout: str = "BLNC",
    scatter: Scatter | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of `forward`.

    Args:
        grad_output: `[B, Q, M*D]`, dtype of `value`.
        value: as in `forward`, as the next three.
        spatial_shapes: see there.
        sampling_locations: see there.
        attention_weights: see there.
        compute_grad_value: whether to return the gradient of `value`.
        compute_grad_sampling_locations: whether to return that of `sampling_locations`.
        compute_grad_attention_weights: whether to return that of `attention_weights`.
        deterministic: whether the gradient of `value` must be the same in every run; the others always are.
        value_layout: "BLNC" or "BNLC".
        scatter: the way to the gradient of `value`, "atomics" or "records"; None for the faster. Deterministic
            gradients always take records.

    Returns:
        Gradients of value, locations and weights in the dtypes of their inputs; None where not asked for.
    """
    call = prepare_call(value, spatial_shapes, sampling_locations, None, attention_weights, value_layout)
    wanted = Wanted(
        torch.empty_like(call.samples.places) if compute_grad_sampling_locations else None,
        None,
        torch.empty_like(call.samples.weights) if compute_grad_attention_weights else None,
    )
    grad_value = run_backward(call, grad_output, wanted, compute_grad_value, deterministic, scatter)
    return grad_value, wanted.locations, wanted.weights


def fused_backward(
    grad_output: Tensor,
    value: Tensor,
    spatial_shapes: HostShapes,
    reference_points: Tensor,
    sampling_offsets: Tensor,
    attention_logits: Tensor,
    *,
    compute_grad_value: bool = True,
    compute_grad_reference_points: bool = False,
    compute_grad_sampling_offsets: bool = True,
    compute_grad_attention_logits: bool = True,
    deterministic: bool = False,
    value_layout: str = "BLNC",
    scatter: Scatter | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of `fused_forward`; arguments as there and in `backward`.

    Returns:
        Gradients of value, reference points, offsets and logits in the dtypes of their inputs; None if not asked for.

    Notes:
        With reference points the kernel writes the gradient of the locations in float32 (8 bytes a sample), from
        which PyTorch derives those of points and offsets.
    """
    call = prepare_call(value, spatial_shapes, reference_points, sampling_offsets, attention_logits, value_layout)
    offsets = call.samples.offsets
    assert offsets is not None
    direct_offsets = compute_grad_sampling_offsets and not compute_grad_reference_points
    wanted = Wanted(
        torch.empty_like(offsets, dtype=torch.float32) if compute_grad_reference_points else None,
        torch.empty_like(offsets) if direct_offsets else None,
        torch.empty_like(call.samples.weights) if compute_grad_attention_logits else None,
    )
    grad_value = run_backward(call, grad_output, wanted, compute_grad_value, deterministic, scatter)
    grad_references, grad_offsets = None, wanted.offsets
    if wanted.locations is not None:
        grad_references, grad_offsets = _differentiate_locations(
            wanted.locations, call.samples.places, offsets, call.levels()
        )
        grad_references = grad_references.to(reference_points.dtype)
        if not compute_grad_sampling_offsets:
            grad_offsets = None
    return grad_value, grad_references, grad_offsets, wanted.weights


def _differentiate_locations(
    grad_locations: Tensor, reference_points: Tensor, sampling_offsets: Tensor, levels: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of reference points (float32) and offsets from that of the locations they make."""
    grad_centres = grad_locations.sum(dim=(2, 4))
    if reference_points.shape[-1] == 2:
        sizes_wh = levels[:, :2].flip(-1)
        grad_offsets = grad_locations / sizes_wh[:, None, :]
        return grad_centres, grad_offsets.to(sampling_offsets.dtype)
    scale = 0.5 / sampling_offsets.shape[4]
    grad_sizes = (grad_locations * sampling_offsets.float()).sum(dim=(2, 4)) * scale
    grad_offsets = grad_locations * reference_points[:, :, None, :, None, 2:] * scale
    return torch.cat((grad_centres, grad_sizes), -1), grad_offsets.to(sampling_offsets.dtype)
