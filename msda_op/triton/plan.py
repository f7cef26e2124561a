"""Which kernels a call takes, and why: the one function that chooses, and that a user can ask."""

from dataclasses import dataclass
from typing import Literal

import torch

from msda_op.options import Options, Sizes
from msda_op.triton.hopper.support import supports
from msda_op.triton.hopper.tuning import choose_scatter


@dataclass(frozen=True)
class KernelPlan:
    """Kernels of one call.

    Args:
        forward: "hopper", the fast kernels of compute capability 9.0, or "tiles", the plain ones for every shape,
            dtype and architecture.
        backward: the same for the gradients of locations and weights.
        grad_value: how the gradient of value is added up: "atomics" inside the backward kernel; "records" of samples,
            which "hopper" reduces on the tensor cores, in a fixed order where one is asked for; or "sorted" samples in
            a fixed order.
        reason: why, in one sentence.
    """

    forward: Literal["hopper", "tiles"]
    backward: Literal["hopper", "tiles"]
    grad_value: Literal["atomics", "records", "sorted"]
    reason: str


def choose_kernels(
    sizes: Sizes,
    dtype: torch.dtype,
    options: Options,
    *,
    fused: bool,
    deterministic: bool,
    capability: tuple[int, int] | None,
    fp32_grad_accum: bool = True,
    num_buffers: int = 1,
) -> KernelPlan:
    """Chooses the kernels of one call of backend "triton".

    Args:
        sizes: B, S, M, D, Q, L, K of the call.
        dtype: dtype of `value`.
        options: sampling conventions and layouts.
        fused: whether softmax and location arithmetic run in the kernel.
        deterministic: whether the gradient of value must have the same bits in every run.
        capability: compute capability of the GPU; None for the interpreter.
        fp32_grad_accum: whether the gradient of value is added up in float32.
        num_buffers: buffers that share the adds of the gradient of value.

    Returns:
        The plan; it depends on nothing but these arguments.
    """
    refusal = supports(sizes, dtype, options, fused=fused, capability=capability)
    forward: Literal["hopper", "tiles"] = "tiles" if refusal else "hopper"
    if refusal is None and not fp32_grad_accum:
        refusal = "the Hopper kernels add in float32 alone, and half precision is asked for"
    if refusal is None and num_buffers > 1:
        refusal = f"the Hopper kernels add to one buffer, and {num_buffers} are given"
    if refusal is None and deterministic and dtype == torch.float32:
        refusal = "the Hopper kernels cannot sort records of float32, and sums in a fixed order are asked for"
    if refusal is None:
        num_samples = sizes.batch * sizes.num_queries * sizes.num_heads * sizes.num_levels * sizes.num_points
        if deterministic:
            return KernelPlan(
                forward, "hopper", "records", "records can be sorted, and sums in a fixed order are asked for"
            )
        if choose_scatter(num_samples) == "records":
            return KernelPlan(forward, "hopper", "records", "so many samples meet that adding them up first pays")
        return KernelPlan(forward, "hopper", "atomics", "so few samples are added to memory fastest one by one")
    if deterministic:
        return KernelPlan(forward, "tiles", "sorted", f"{refusal}; atomics keep no fixed order")
    return KernelPlan(forward, "tiles", "atomics", f"{refusal}; plain tiles take every call")
