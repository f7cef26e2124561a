"""Which kernels a call takes, and why: the one function that chooses, and that a user can ask."""

from dataclasses import dataclass
from typing import Literal

import torch

from msda_op.options import Options, Sizes


@dataclass(frozen=True)
class KernelPlan:
    """Kernels of one call.

    Args:
        forward: "tiles", the plain kernel for every shape, dtype and architecture.
        backward: "tiles", the same for the gradients of locations and weights.
        grad_value: how the gradient of value is added up: "atomics" inside the backward kernel, or "sorted" samples in
            a fixed order.
        reason: why, in one sentence.
    """

    forward: Literal["tiles"]
    backward: Literal["tiles"]
    grad_value: Literal["atomics", "sorted"]
    reason: str


def choose_kernels(
    sizes: Sizes,
    dtype: torch.dtype,
    options: Options,
    *,
    fused: bool,
    deterministic: bool,
    capability: tuple[int, int] | None,
) -> KernelPlan:
    """Chooses the kernels of one call of backend "triton".

    Args:
        sizes: B, S, M, D, Q, L, K of the call.
        dtype: dtype of `value`.
        options: sampling conventions and layouts.
        fused: whether softmax and location arithmetic run in the kernel.
        deterministic: whether the gradient of value must have the same bits in every run.
        capability: compute capability of the GPU; None for the interpreter.

    Returns:
        The plan; it depends on nothing but these arguments.
    """
    if deterministic:
        return KernelPlan("tiles", "tiles", "sorted", "sums in a fixed order are asked for, and atomics keep none")
    return KernelPlan("tiles", "tiles", "atomics", "plain tiles take every size, dtype, option and architecture")
