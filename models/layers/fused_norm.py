"""LayerNorm(residual + dropout(branch)): a kernel forward, two in the backward pass.

Importing this module imports Triton and registers `triton_detr::residual_norm` and its backward op, which
`torch.compile` sees. A call of a registered op costs the host 0.1 ms more than one of an autograd function, which is
what eager code calls: there are 30 such calls in a step.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from models.layers.dropout_kernels import MIN_COLUMNS, round_probability
from models.layers.fused_norm_kernels import backward_kernel, forward_kernel
from models.layers.row_sum import add_partial_sums
from msda_op.triton.kernel_launch import Launch

# Elements of a block of rows, 8 a lane.
_BLOCK_ELEMENTS = 2048
_NUM_WARPS = 8
_BACKWARD_BLOCK_ELEMENTS = 1024
_BACKWARD_NUM_WARPS = 4
# Programs that share the rows in the backward pass, four of each multiprocessor of a large GPU.
_MAX_PROGRAMS = 528


def residual_norm(
    residual: Tensor,
    branch: Tensor,
    weight: Tensor,
    bias: Tensor,
    seed: Tensor | None,
    probability: float,
    eps: float,
    dtype: torch.dtype,
) -> Tensor:
    """Adds, drops and normalises.

    output = (s - mean(s)) / sqrt(var(s) + eps) * weight + bias, s = residual + dropout(branch)  (arXiv 1607.06450, 3.1)

    Args:
        residual: `[..., C]`, float32, float16 or bfloat16.
        branch: the same shape, any of these dtypes.
        weight: `[C]`.
        bias: `[C]`.
        seed: int64 `[1]` on the device, what the dropped channels are drawn from; None drops nothing.
        probability: of dropping a channel of the branch, in 0..1 without 1; see `round_probability`.
        eps: added to the variance.
        dtype: dtype of the output.

    Returns:
        dtype `[..., C]`.

    Notes:
        Differentiable once in the first four. Deterministic: sums have a fixed order. Float32 inside.
    """
    arguments = (residual, branch, weight, bias, seed, probability, eps, dtype)
    return forward(*arguments)[0] if torch.compiler.is_compiling() else _ResidualNorm.apply(*arguments)


def _run_forward(
    residual: Tensor,
    branch: Tensor,
    weight: Tensor,
    bias: Tensor,
    seed: Tensor | None,
    probability: float,
    eps: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the output; and mean and inverse deviation of each row, float32 `[rows]`, for the backward pass."""
    residual, branch = residual.contiguous(), branch.contiguous()
    num_rows = residual.numel() // residual.shape[-1]
    output = torch.empty_like(residual, dtype=dtype)
    mean, inverse_deviation = (residual.new_empty(num_rows, dtype=torch.float32) for _ in range(2))
    if num_rows > 0:
        sizes = _sizes(residual, seed, probability, _BLOCK_ELEMENTS)
        arguments = {
            "residual": residual,
            "branch": branch,
            "weight": weight,
            "bias": bias,
            "seed": seed,
            "output": output,
            "mean": mean,
            "inverse_deviation": inverse_deviation,
            "eps": eps,
            **sizes,
        }
        Launch(forward_kernel, triton.cdiv(num_rows, sizes["BLOCK_R"]), arguments, _NUM_WARPS).run(residual)
    return output, mean, inverse_deviation


def _run_backward(
    grad_output: Tensor,
    residual: Tensor,
    branch: Tensor,
    weight: Tensor,
    seed: Tensor | None,
    mean: Tensor,
    inverse_deviation: Tensor,
    probability: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of residual and branch, and those of weight and bias as one `[2, C]` in their dtype."""
    launch = backward_launch(grad_output, residual, branch, weight, seed, mean, inverse_deviation, probability)
    launch.run(residual)
    written = launch.arguments
    grad_parameters = add_partial_sums(written["sums"].flatten(1), weight).unflatten(0, (2, -1))
    return written["grad_residual"], written["grad_branch"], grad_parameters


def backward_launch(
    grad_output: Tensor,
    residual: Tensor,
    branch: Tensor,
    weight: Tensor,
    seed: Tensor | None,
    mean: Tensor,
    inverse_deviation: Tensor,
    probability: float,
    atomic: bool = False,
) -> Launch:
    """Returns the launch that fills its arguments `grad_residual`, `grad_branch` and `sums`.

    Args:
        grad_output: of the output.
        residual: of the forward pass, as all that follow.
        branch: see there.
        weight: see there.
        seed: see there.
        mean: float32 `[rows]`.
        inverse_deviation: float32 `[rows]`.
        probability: see there.
        atomic: whether programs add to the same sums, which are zeros at the start, in no fixed order.

    Notes:
        The sums are float32 `[n, 2, C]`, to be added up over n programs, for weight and bias; with atomics n is 1.
    """
    grad_output, residual, branch = (tensor.contiguous() for tensor in (grad_output, residual, branch))
    grad_residual, grad_branch = torch.empty_like(residual), torch.empty_like(branch)
    sizes = _sizes(residual, seed, probability, _BACKWARD_BLOCK_ELEMENTS)
    num_programs = max(1, min(_MAX_PROGRAMS, triton.cdiv(sizes["num_rows"], sizes["BLOCK_R"])))
    allocate = weight.new_zeros if atomic else weight.new_empty
    arguments = {
        "grad_output": grad_output,
        "residual": residual,
        "branch": branch,
        "weight": weight,
        "seed": seed,
        "mean": mean,
        "inverse_deviation": inverse_deviation,
        "grad_residual": grad_residual,
        "grad_branch": grad_branch,
        "sums": allocate((1 if atomic else num_programs, 2, residual.shape[-1]), dtype=torch.float32),
        "ATOMIC": atomic,
        **sizes,
    }
    return Launch(backward_kernel, num_programs, arguments, _BACKWARD_NUM_WARPS)


def _sizes(residual: Tensor, seed: Tensor | None, probability: float, block_elements: int) -> dict[str, Any]:
    block_c = max(MIN_COLUMNS, triton.next_power_of_2(residual.shape[-1]))
    threshold, scale = round_probability(probability)
    return {
        "num_rows": residual.numel() // residual.shape[-1],
        "num_channels": residual.shape[-1],
        "threshold": threshold,
        "scale": scale,
        "DROPS": seed is not None,
        "BLOCK_R": max(1, block_elements // block_c),
        "BLOCK_C": block_c,
    }


class _ResidualNorm(Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        output = _run_forward(*arguments)
        _save(ctx, arguments, output)
        return output[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        residual, branch, weight, seed, mean, inverse_deviation = ctx.saved_tensors
        gradients = _run_backward(grad_output, residual, branch, weight, seed, mean, inverse_deviation, ctx.probability)
        return _spread(*gradients)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    residual, branch, weight, _, seed, ctx.probability, _, _ = inputs
    ctx.save_for_backward(residual, branch, weight, seed, *output[1:])


def _spread(grad_residual: Tensor, grad_branch: Tensor, grad_parameters: Tensor) -> tuple[Tensor | None, ...]:
    """Returns a gradient for each argument of `residual_norm`."""
    return grad_residual, grad_branch, *grad_parameters.unbind(), None, None, None, None


def _register(name: str, body: Callable) -> Any:
    """Registers a body that launches kernels, visibly to `torch.compile` unless the interpreter runs them."""
    register = torch.library.custom_op if triton.knobs.runtime.interpret else torch.library.triton_op
    return register(name, body, mutates_args=())


forward = _register("triton_detr::residual_norm", _run_forward)
backward = _register("triton_detr::residual_norm_backward", _run_backward)


@forward.register_fake
def _(
    residual: Tensor,
    branch: Tensor,
    weight: Tensor,
    bias: Tensor,
    seed: Tensor | None,
    probability: float,
    eps: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    rows = residual.new_empty(residual.numel() // residual.shape[-1], dtype=torch.float32)
    return residual.new_empty(residual.shape, dtype=dtype), rows, torch.empty_like(rows)


@backward.register_fake
def _(
    grad_output: Tensor,
    residual: Tensor,
    branch: Tensor,
    weight: Tensor,
    seed: Tensor | None,
    mean: Tensor,
    inverse_deviation: Tensor,
    probability: float,
) -> tuple[Tensor, Tensor, Tensor]:
    contiguous = torch.contiguous_format
    grad_residual, grad_branch = (torch.empty_like(each, memory_format=contiguous) for each in (residual, branch))
    return grad_residual, grad_branch, weight.new_empty((2, residual.shape[-1]))


def _differentiate(ctx: Any, grad_output: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    return _spread(*backward(grad_output, *ctx.saved_tensors, ctx.probability))


forward.register_autograd(_differentiate, setup_context=_save)
