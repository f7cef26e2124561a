"""The op as users call it: check the arguments, choose the backend openly, call it."""

from importlib.util import find_spec

import torch
from torch import Tensor

from msda_op import compat
from msda_op.levels import LevelStarts, SpatialShapes, device_tables, read_shapes
from msda_op.reference import ms_deform_attn_reference
from msda_op.validation import check_level_table, check_sample_sizes, validate_inputs

BACKENDS = ("auto", "triton", "reference", "cuda")

_HAS_TRITON = find_spec("triton") is not None
_TRITON_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def ms_deform_attn(
    value: Tensor,
    spatial_shapes: SpatialShapes,
    level_start_index: LevelStarts,
    sampling_locations: Tensor,
    attention_weights: Tensor,
    *,
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
            padded level; outside it value is zero, and NaN or infinity sample nothing.
        attention_weights: `[B, Q, M, L, K]`, any float dtype.
        backend: one of `BACKENDS`; "auto" is what `choose_backend` answers.

    Returns:
        `[B, Q, M*D]` in the dtype of `value`.

    Raises:
        ValueError: if an argument breaks a rule, or the backend's name is unknown or does not take this dtype.
        RuntimeError: if the backend cannot run here.

    Notes:
        Differentiable in value, locations and weights; "reference" any number of times, the others once.
        "triton" and "cuda" add the gradient of value up in any order, so its last bits differ between runs.
        Never waits for the device, except that "reference" reads a level table in device memory. Tables on the host
        are checked in full, tables in device memory by shape, dtype and device alone.
    """
    validate_inputs(value, spatial_shapes, level_start_index, sampling_locations, attention_weights)
    chosen = choose_backend(value.device, value.dtype) if backend == "auto" else backend
    require_backend(chosen, value.device.type)
    if chosen == "reference":
        shapes = read_shapes(spatial_shapes)
        check_level_table(shapes, value.shape[1])
        return ms_deform_attn_reference(value, shapes, sampling_locations, attention_weights)
    if value.dtype not in _TRITON_DTYPES:
        raise ValueError(
            f"value must be float32, float16 or bfloat16 for backend {chosen!r}, got {value.dtype}; "
            f"convert it or pass backend='reference'"
        )
    tables = device_tables(spatial_shapes, level_start_index, value.device)
    if chosen == "cuda":
        return compat.original_ms_deform_attn(value, *tables, sampling_locations, attention_weights)
    check_sample_sizes(value, sampling_locations)
    from msda_op import registration  # Triton is not installed everywhere, and is imported where it is used

    return registration.forward(value, *tables, sampling_locations, attention_weights)


def choose_backend(device: torch.device, dtype: torch.dtype) -> str:
    """Returns what backend "auto" stands for: "triton" for CUDA tensors of up to 32 bits, else "reference".

    Args:
        device: device of `value`.
        dtype: dtype of `value`.
    """
    return "triton" if device.type == "cuda" and dtype in _TRITON_DTYPES else "reference"


def require_backend(backend: str, device_type: str) -> None:
    """Checks that a backend can run for tensors of a device type on this machine.

    Args:
        backend: one of `BACKENDS`.
        device_type: "cpu", "cuda", ... as in `torch.device.type`.

    Raises:
        ValueError: if the name is unknown.
        RuntimeError: if the backend cannot run here; the message says what to do.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}; pass one of them")
    if backend == "triton":
        _require_triton(device_type)
    if backend == "cuda":
        compat.require_original_op(device_type)


def _require_triton(device_type: str) -> None:
    if not _HAS_TRITON:
        raise RuntimeError(
            "backend 'triton' needs the triton package, got none; install it or pass backend='reference'"
        )
    import triton

    if device_type != "cuda" and not triton.knobs.runtime.interpret:
        raise RuntimeError(
            f"backend 'triton' must run on an NVIDIA GPU, got device type {device_type!r}; move the tensors to one, "
            f"pass backend='reference', or set TRITON_INTERPRET=1 before the start to interpret the kernels on the CPU"
        )
