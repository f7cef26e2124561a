"""Casts the weights of many layers at once, where autocast would cast them one by one."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function

from models.layers.self_attention import SelfAttention

_CAST_BY_AUTOCAST = (nn.Linear, nn.Conv2d, SelfAttention)


class Place(NamedTuple):
    """Where a parameter stands: the module that owns it, and its name there."""

    module: nn.Module
    name: str

    @property
    def tensor(self) -> Tensor | None:
        """What stands there now."""
        return self.module._parameters[self.name]


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Returns the dtype that autocast now computes in on a device, None where it is off."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


@contextmanager
def casting_weights(*roots: nn.Module) -> Iterator[None]:
    """Lets linear layers and convolutions find their weights cast, as autocast would cast them, by one kernel or a few.

    Autocast launches a cast for every weight, and one for its gradient: hundreds of small kernels a step. Results and
    gradients are the same bits. Without autocast nothing happens.

    Args:
        *roots: modules with everything below them; none of it may switch autocast off.

    Notes:
        Gradients of the weights arrive together, after the backward pass of the last root's layers. Layers that are
        recomputed in the backward pass (gradient checkpointing) cast their weights one by one there.
    """
    places = [
        Place(module, name)
        for root in roots
        for module in root.modules()
        if isinstance(module, _CAST_BY_AUTOCAST)
        for name, parameter in module._parameters.items()
        if parameter is not None and parameter.dtype == torch.float32
    ]
    weights = [tensor for place in places if (tensor := place.tensor) is not None]
    dtype = autocast_dtype(weights[0].device) if weights else None
    if dtype is None:
        yield
    else:
        with replacing_parameters(places, cast_together(weights, dtype)):
            yield


@contextmanager
def replacing_parameters(places: Sequence[Place], tensors: Sequence[Tensor]) -> Iterator[None]:
    """Has the modules compute with tensors in place of their parameters, and puts the parameters back."""
    originals = [place.module._parameters[place.name] for place in places]
    for place, tensor in zip(places, tensors, strict=True):
        place.module._parameters[place.name] = tensor  # type: ignore[assignment]  # any tensor will do for a while
    try:
        yield
    finally:
        for place, original in zip(places, originals, strict=True):
            place.module._parameters[place.name] = original


def cast_together(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Casts tensors of one dtype, with as few kernels as there are chunks of them.

    Args:
        tensors: of one dtype and device, any shapes and strides without gaps.
        dtype: dtype of the results, which keep the strides.

    Returns:
        The results, differentiable; gradients come back in the dtypes of the tensors.
    """
    return list(_CastTogether.apply(dtype, *tensors))


class _CastTogether(Function):
    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.dtype = tensors[0].dtype
        return tuple(_copies(tensors, dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        present = [gradient for gradient in gradients if gradient is not None]
        copies = iter(_copies(present, ctx.dtype))
        return (None, *(None if gradient is None else next(copies) for gradient in gradients))


def _copies(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    copies = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
    if copies:
        torch._foreach_copy_(copies, list(tensors))
    return copies
