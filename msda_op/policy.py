"""Rules that fill in what a caller leaves open: precision and order of the sums in the gradient of value."""

import torch


def accumulates_in_fp32(dtype: torch.dtype, fp32_grad_accum: bool | None) -> bool:
    """Returns whether the gradient of a value of `dtype` is added up in float32 and rounded once.

    | value, architecture            | half atomics             | None means | because                                |
    | ------------------------------ | ------------------------ | ---------- | -------------------------------------- |
    | float32, all                   |                          | float32    |                                        |
    | bfloat16, sm_80, sm_86, sm_89  | compare-and-swap loops   | float32    | emulated, and loses precision          |
    | bfloat16, sm_90 and later      | vectors in hardware      | float32    | error 2e-2: a coarse pixel takes over  |
    |                                |                          |            | a thousand adds at 8 bits each         |
    | float16, all                   | pairs; sm_90 vectors     | float32    | as many adds at 11 bits, and sums      |
    |                                |                          |            | beyond 65504 would overflow on the way |

    So None means float32 whatever the architecture; False adds in the dtype of value: half of the memory and of the
    traffic, for callers who can bear the error.

    Args:
        dtype: dtype of `value`.
        fp32_grad_accum: what the caller asks for; None leaves it to the table.
    """
    return dtype == torch.float32 or fp32_grad_accum is not False


def accumulator_dtype(dtype: torch.dtype, fp32_grad_accum: bool | None) -> torch.dtype:
    """Returns the dtype in which the gradient of a value of `dtype` is added up (see `accumulates_in_fp32`)."""
    return torch.float32 if accumulates_in_fp32(dtype, fp32_grad_accum) else dtype


def is_deterministic(deterministic: bool | None) -> bool:
    """Returns whether the same bits are asked for in every run; None follows `torch.use_deterministic_algorithms`."""
    return torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic
