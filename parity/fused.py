"""Comparison of the fused op with its composition: inputs, and the same rule as in `parity.comparisons`."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial

import torch
from torch import Tensor

from msda_op import fused_ms_deform_attn
from msda_op.options import DEFAULT_OPTIONS, Options
from parity.cases import Case
from parity.comparisons import Comparison, compare_results

FUSED_INPUT_NAMES = ("value", "reference_points", "sampling_offsets", "attention_logits")

FusedOp = Callable[..., Tensor]


@dataclass(frozen=True)
class FusedInputs:
    """Tensors of one call of the fused op, and the upstream gradient `[B, Q, M*D]`."""

    value: Tensor
    spatial_shapes: tuple[tuple[int, int], ...]
    reference_points: Tensor
    sampling_offsets: Tensor
    attention_logits: Tensor
    grad_output: Tensor

    def double(self) -> "FusedInputs":
        """Returns the same numbers in float64."""
        tensors = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "spatial_shapes"}
        return replace(self, **{name: tensor.double() for name, tensor in tensors.items()})


def make_fused_inputs(
    case: Case,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    num_coordinates: int,
    options: Options = DEFAULT_OPTIONS,
) -> FusedInputs:
    """Draws the inputs of a case for the fused op; equal seeds give equal numbers on every device.

    Placement "centres": points on pixel centres, moved by whole pixels; "edges": points on 0 and 1, not moved; "far":
    long offsets; "broken": NaN and infinite offsets between sound ones. Otherwise points and offsets are random: the
    inputs are rounded before anyone reads them, so all implementations stand on one side of a pixel centre unless a
    location comes within float32 rounding of it.

    Args:
        case: what to draw.
        dtype: dtype of value, offsets, logits and upstream gradient; reference points are float32.
        device: where to put them.
        seed: of the generator.
        num_coordinates: 2 for points (x, y), 4 for boxes (cx, cy, w, h).
        options: decide the layout of value.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    b, q, m, d, k = case.batch, case.num_queries, case.num_heads, case.head_dim, case.num_points
    num_levels = len(case.spatial_shapes)
    sizes_wh = torch.tensor([(w, h) for h, w in case.spatial_shapes], dtype=torch.float64)
    value = normal(b, sum(h * w for h, w in case.spatial_shapes), m, d)
    points = torch.rand(b, q, num_levels, 2, generator=generator, dtype=torch.float64)
    extents = torch.rand(b, q, num_levels, num_coordinates - 2, generator=generator, dtype=torch.float64)
    offsets = normal(b, q, m, num_levels, k, 2) * (20 if case.placement == "far" else 2)
    if case.placement == "centres":
        points, offsets = ((points * sizes_wh).floor() + 0.5) / sizes_wh, offsets.round()
    elif case.placement == "edges":
        points, offsets = points.round(), torch.zeros_like(offsets)
    elif case.placement == "broken":
        odd = torch.tensor([torch.nan, torch.inf, -torch.inf, 1.0, 1.0, 1.0], dtype=torch.float64)
        offsets = offsets * odd[torch.randint(len(odd), offsets.shape, generator=generator)]
    if options.value_layout == "BNLC":
        value = value.transpose(1, 2).contiguous()
    inputs = FusedInputs(
        value.to(dtype),
        case.spatial_shapes,
        torch.cat((points, extents), dim=-1).float(),
        offsets.to(dtype),
        normal(b, q, m, num_levels, k).to(dtype),
        normal(b, q, m * d).to(dtype),
    )
    names = (*FUSED_INPUT_NAMES, "grad_output")
    return replace(inputs, **{name: getattr(inputs, name).to(device) for name in names})


def evaluate_fused(op: FusedOp, inputs: FusedInputs, gradients: tuple[str, ...]) -> dict[str, Tensor]:
    """Runs a fused op forward and backward.

    Args:
        op: called as `fused_ms_deform_attn` without keywords.
        inputs: what to call it with, and the upstream gradient.
        gradients: names of the inputs that need a gradient.

    Returns:
        "output" and the gradients by name of their input.
    """
    leaves = {name: getattr(inputs, name).detach().requires_grad_(name in gradients) for name in FUSED_INPUT_NAMES}
    value, *others = leaves.values()
    output = op(value, inputs.spatial_shapes, None, *others)
    grads = torch.autograd.grad(output, [leaves[name] for name in gradients], inputs.grad_output)
    return {"output": output.detach(), **dict(zip(gradients, grads, strict=True))}


def compare_fused(
    op: FusedOp, inputs: FusedInputs, gradients: tuple[str, ...], options: Options = DEFAULT_OPTIONS
) -> tuple[Comparison, ...]:
    """Compares a fused op with locations, softmax and reference: output, then the gradients asked for.

    Args:
        op: what is judged; it knows the options itself.
        inputs: drawn for these options.
        gradients: names of the inputs that need a gradient.
        options: conventions and layout of value.
    """
    padding_mode, align_corners, value_layout, _ = options
    composition = partial(
        fused_ms_deform_attn,
        padding_mode=padding_mode,
        align_corners=align_corners,
        value_layout=value_layout,
        backend="reference",
    )
    return compare_results(
        evaluate_fused(composition, inputs.double(), gradients),
        evaluate_fused(composition, inputs, gradients),
        evaluate_fused(op, inputs, gradients),
    )
