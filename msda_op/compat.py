"""Both directions between the original op and ours.

Adapters call the original CUDA op where a package on this machine brings it (backend "cuda"); drop-in classes have the
signatures of mmcv and of the official code, and call our op.
"""

from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

OriginalOp = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]

# The original kernels work through a batch in steps that must divide it; 64 is their customary upper end.
_LARGEST_STEP = 64


def require_original_op(device_type: str) -> None:
    """Checks that the original CUDA op is installed and can run on a device type.

    Raises:
        RuntimeError: if no package brings it, or the tensors are not on a GPU.
    """
    if device_type != "cuda":
        raise RuntimeError(
            f"backend 'cuda' must run on an NVIDIA GPU, got device type {device_type!r}; "
            f"move the tensors to one or pass backend='reference'"
        )
    if _installed_package() is None:
        raise RuntimeError(
            f"backend 'cuda' needs one of the packages {', '.join(_ADAPTERS)}, got none; install one (for example "
            f"`pip install torch-ms-deform-attn`, built with nvcc) or pass backend='triton'"
        )


def original_ms_deform_attn(
    value: Tensor,
    spatial_shapes: Tensor,
    level_start_index: Tensor,
    sampling_locations: Tensor,
    attention_weights: Tensor,
) -> Tensor:
    """Calls the original CUDA op in float32, on inputs that `msda_op.validation` has passed.

    Args:
        value: `[B, S, M, D]`; cast up to float32.
        spatial_shapes: `[L, 2]` (h, w) on the device.
        level_start_index: `[L]` on the device.
        sampling_locations: `[B, Q, M, L, K, 2]` (x, y), float32.
        attention_weights: `[B, Q, M, L, K]`; cast up to float32.

    Returns:
        `[B, Q, M*D]` in the dtype of `value`.

    Notes:
        Differentiable once in value, locations and weights. The kernels take any batch size here.
    """
    if sampling_locations.numel() == 0:  # the original launches an empty grid, which CUDA refuses
        return value.new_zeros(value.shape[0], sampling_locations.shape[1], value.shape[2:].numel()) + 0 * value.sum()
    output = _load_original_op()(
        value.float().contiguous(),
        spatial_shapes.long(),
        level_start_index.long(),
        sampling_locations.contiguous(),
        attention_weights.float().contiguous(),
    )
    return output.to(value.dtype)


def batch_step(batch: int) -> int:
    """Returns the largest step of at most 64 items that divides a batch."""
    return max(step for step in range(1, _LARGEST_STEP + 1) if batch % step == 0)


class MultiScaleDeformableAttnFunction:
    """Stands in for `mmcv.ops.multi_scale_deform_attn.MultiScaleDeformableAttnFunction`."""

    @staticmethod
    def apply(
        value: Tensor,
        value_spatial_shapes: Tensor,
        value_level_start_index: Tensor,
        sampling_locations: Tensor,
        attention_weights: Tensor,
        im2col_step: int,
    ) -> Tensor:
        """Calls `msda_op.ms_deform_attn` with backend "auto".

        Args:
            value: `[B, S, M, D]`.
            value_spatial_shapes: `[L, 2]` (h, w).
            value_level_start_index: `[L]`.
            sampling_locations: `[B, Q, M, L, K, 2]` (x, y); half precision, which these callers may pass, is cast up.
            attention_weights: `[B, Q, M, L, K]`.
            im2col_step: ignored; the kernels take any batch at once.

        Returns:
            `[B, Q, M*D]` in the dtype of `value`.

        Raises:
            ValueError: if an argument breaks a rule of `ms_deform_attn`.

        Notes:
            Differentiable in value, locations and weights.
        """
        from msda_op.api import ms_deform_attn  # which itself calls the adapters of this module

        locations = sampling_locations if sampling_locations.dtype.itemsize > 2 else sampling_locations.float()
        return ms_deform_attn(value, value_spatial_shapes, value_level_start_index, locations, attention_weights)


class MSDeformAttnFunction(MultiScaleDeformableAttnFunction):
    """Stands in for `models.ops.functions.MSDeformAttnFunction` of the official Deformable-DETR."""


@lru_cache(maxsize=1)
def _installed_package() -> str | None:
    return next((name for name in _ADAPTERS if find_spec(name) is not None), None)


@lru_cache(maxsize=1)
def _load_original_op() -> OriginalOp:
    name = _installed_package()
    assert name is not None, "require_original_op comes first"
    return _ADAPTERS[name]()


def _from_torch_ms_deform_attn() -> OriginalOp:
    return import_module("torch_ms_deform_attn").ms_deform_attn


def _from_official_extension() -> OriginalOp:
    extension = import_module("MultiScaleDeformableAttention")

    class OfficialFunction(torch.autograd.Function):
        """The extension's forward and backward as one differentiable function."""

        @staticmethod
        def forward(ctx: Any, *inputs: Tensor) -> Tensor:
            ctx.save_for_backward(*inputs)
            return extension.ms_deform_attn_forward(*inputs, batch_step(inputs[0].shape[0]))

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
            inputs = ctx.saved_tensors
            grad_value, grad_locations, grad_weights = extension.ms_deform_attn_backward(
                *inputs, grad_output.contiguous(), batch_step(inputs[0].shape[0])
            )
            return grad_value, None, None, grad_locations, grad_weights

    return OfficialFunction.apply


def _from_mmcv() -> OriginalOp:
    function = import_module("mmcv.ops.multi_scale_deform_attn").MultiScaleDeformableAttnFunction

    def call(value: Tensor, *others: Tensor) -> Tensor:
        return function.apply(value, *others, batch_step(value.shape[0]))

    return call


_ADAPTERS: dict[str, Callable[[], OriginalOp]] = {
    "torch_ms_deform_attn": _from_torch_ms_deform_attn,
    "MultiScaleDeformableAttention": _from_official_extension,
    "mmcv": _from_mmcv,
}
