"""Which calls the Hopper path takes."""

import torch
from torch import Tensor
from triton import knobs

from msda_op.levels import HostShapes

_MAX_INT32 = 2**31 - 1
MAX_QUERIES = 2**17
MAX_LEVELS = 8
MAX_POINTS = 16
MAX_LEVEL_PIXELS = 2**24
HEAD_DIMS = (32, 64)
VALUE_LAYOUTS = ("BLNC", "BNLC")


def supports(
    value: Tensor, spatial_shapes: HostShapes, samples: Tensor, *, fused: bool = False, value_layout: str = "BLNC"
) -> str | None:
    """Tells why the Hopper path does not take a call; None where it does.

    Args:
        value: `[B, S, M, D]`, or `[B, M, S, D]` for layout "BNLC".
        spatial_shapes: L pairs (h, w).
        samples: sampling locations or offsets `[B, Q, M, L, K, 2]`.
        fused: whether the call brings reference points, offsets and logits.
        value_layout: "BLNC" or "BNLC".

    Notes:
        Looks at shapes, dtypes and devices only. The bounds on h and w come from the 2 x 2 block that is clamped into a
        level; on pixels of a level, from the float32 that numbers them; on Q, from the 17 bits of a record.
    """
    return (
        _refuse_device(value.device)
        or _refuse_value(value, value_layout)
        or _refuse_samples(value, spatial_shapes, samples, fused)
    )


def _refuse_device(device: torch.device) -> str | None:
    if device.type == "cpu":
        return None if knobs.runtime.interpret else "it runs on a GPU, or on the CPU in Triton's interpreter"
    if device.type != "cuda" or torch.version.cuda is None or torch.cuda.get_device_capability(device) != (9, 0):
        return "it is made for NVIDIA GPUs of compute capability 9.0"
    return None


def _refuse_value(value: Tensor, value_layout: str) -> str | None:
    if value_layout not in VALUE_LAYOUTS:
        return f"value_layout must be one of {VALUE_LAYOUTS}, got {value_layout!r}"
    if value.dtype not in (torch.bfloat16, torch.float16):
        return f"value must be bfloat16 or float16, got {value.dtype}"
    if value.shape[3] not in HEAD_DIMS:
        return f"D must be one of {HEAD_DIMS}, got {value.shape[3]}"
    return None


def _refuse_samples(value: Tensor, spatial_shapes: HostShapes, samples: Tensor, fused: bool) -> str | None:
    num_queries, num_levels, num_points = samples.shape[1], samples.shape[3], samples.shape[4]
    if any(h < 2 or w < 2 for h, w in spatial_shapes):
        return f"levels must have at least 2 rows and 2 columns, got {spatial_shapes}"
    if any(h * w > MAX_LEVEL_PIXELS for h, w in spatial_shapes):
        return f"levels must have at most {MAX_LEVEL_PIXELS} pixels, got {spatial_shapes}"
    if num_levels > MAX_LEVELS or num_points > MAX_POINTS:
        return f"L must be at most {MAX_LEVELS} and K at most {MAX_POINTS}, got L = {num_levels}, K = {num_points}"
    if fused and num_levels * -(-num_points // 4) > 4:
        return f"the fused form takes L * ceil(K / 4) of at most 4, got L = {num_levels}, K = {num_points}"
    if num_queries > MAX_QUERIES:
        return f"Q must be at most {MAX_QUERIES}, got {num_queries}"
    if max(value.shape[1:].numel(), samples.shape[1:].numel()) > _MAX_INT32:
        return f"value and samples must have at most {_MAX_INT32} elements in a batch item"
    return None
