"""Backends: which there are, which "auto" means, and what each can do."""

import warnings
from importlib.util import find_spec

import torch
from torch import Tensor

from msda_op import compat
from msda_op.options import DEFAULT_OPTIONS, Options
from msda_op.policy import is_deterministic

BACKENDS = ("auto", "triton", "reference", "cuda")

_HAS_TRITON = find_spec("triton") is not None
_TRITON_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


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


def resolve_backend(backend: str, value: Tensor, options: Options, deterministic: bool | None) -> str:
    """Returns the backend of a call, after checking that it can do what the call asks for.

    Args:
        backend: one of `BACKENDS`.
        value: the call's value.
        options: the call's options, checked.
        deterministic: what the caller asks for; None follows `torch.use_deterministic_algorithms`.

    Raises:
        ValueError: if the name is unknown, or the backend does not have this dtype, option or order of sums.
        RuntimeError: if the backend cannot run here, or PyTorch's deterministic mode forbids it.
    """
    chosen = choose_backend(value.device, value.dtype) if backend == "auto" else backend
    require_backend(chosen, value.device.type)
    if chosen != "reference" and value.dtype not in _TRITON_DTYPES:
        raise ValueError(
            f"value must be float32, float16 or bfloat16 for backend {chosen!r}, got {value.dtype}; "
            f"convert it or pass backend='reference'"
        )
    if chosen == "cuda" and options != DEFAULT_OPTIONS:
        raise ValueError(
            f"backend must be 'triton' or 'reference' for options other than the original op's, got 'cuda' with "
            f"{options}; pass another backend or {DEFAULT_OPTIONS}"
        )
    if chosen == "cuda" or (chosen == "reference" and value.is_cuda):
        _refuse_fixed_order(chosen, deterministic)
    return chosen


def _refuse_fixed_order(backend: str, deterministic: bool | None) -> None:
    if deterministic:
        raise ValueError(
            f"deterministic must be False or None for backend {backend!r} on a GPU, whose atomics add in any order, "
            f"got True; pass backend='triton'"
        )
    # PyTorch speaks up for its own kernels, which "reference" is made of.
    if backend == "cuda" and is_deterministic(deterministic):
        message = (
            "backend must be deterministic under torch.use_deterministic_algorithms(True), got 'cuda', whose atomics "
            "add in any order; pass backend='triton'"
        )
        if not torch.is_deterministic_algorithms_warn_only_enabled():
            raise RuntimeError(message)
        warnings.warn(message, stacklevel=4)


def _require_triton(device_type: str) -> None:
    if not _HAS_TRITON:
        raise RuntimeError(
            "backend 'triton' needs the triton package, got none; install it or pass backend='reference'"
        )
    if device_type != "cuda" and not _is_interpreted():
        raise RuntimeError(
            f"backend 'triton' must run on an NVIDIA GPU, got device type {device_type!r}; move the tensors to one, "
            f"pass backend='reference', or set TRITON_INTERPRET=1 before the start to interpret the kernels on the CPU"
        )


@torch.compiler.assume_constant_result
def _is_interpreted() -> bool:
    import triton

    return triton.knobs.runtime.interpret
