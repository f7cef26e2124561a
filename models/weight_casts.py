"""Casts the weights of many layers at once, where autocast would cast them one by one."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function

from models.layers.autocast import autocast_dtype
from models.layers.joint_linear import JointLinear
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


@contextmanager
def casting_weights(*roots: nn.Module) -> Iterator[None]:
    """Lets linear layers and convolutions find their weights cast, as autocast would cast them, by one kernel or a few.

    Autocast launches a cast for every weight, and one for its gradient: hundreds of small kernels a step. Results and
    gradients are the same bits. What a `JointLinear` joins is joined by the same kernels. Without autocast nothing
    happens.

    Args:
        *roots: modules with everything below them; none of it may switch autocast off.

    Notes:
        Gradients of the weights arrive together, after the backward pass of the last root's layers. Layers that are
        recomputed in the backward pass (gradient checkpointing) cast their weights one by one there.
    """
    modules = [module for root in roots for module in root.modules()]
    joints = [
        module
        for module in modules
        if isinstance(module, JointLinear) and module.layers[0].weight.dtype == torch.float32
    ]
    groups = [tensors for joint in joints for tensors in joint.parameters_to_join()]
    joined = {id(tensor) for tensors in groups for tensor in tensors}
    places = [
        Place(module, name)
        for module in modules
        if isinstance(module, _CAST_BY_AUTOCAST)
        for name, parameter in module._parameters.items()
        if parameter is not None and parameter.dtype == torch.float32 and id(parameter) not in joined
    ]
    singles = [tensor for place in places if (tensor := place.tensor) is not None]
    found = next(chain(*groups, singles), None)
    dtype = None if found is None else autocast_dtype(found.device)
    if dtype is None:
        yield
        return
    weights_and_biases, singly = cast_together(groups, singles, dtype)
    with replacing_parameters(places, singly):
        for joint, weight, bias in zip(joints, weights_and_biases[::2], weights_and_biases[1::2], strict=True):
            joint.joined = weight, bias
        try:
            yield
        finally:
            for joint in joints:
                joint.joined = None


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


def cast_together(
    groups: Sequence[Sequence[Tensor]], tensors: Sequence[Tensor], dtype: torch.dtype
) -> tuple[list[Tensor], list[Tensor]]:
    """Casts tensors of one dtype, with as few kernels as there are chunks of them.

    Args:
        groups: tensors of one dtype and device to be joined, those of a group along their first dimension.
        tensors: further ones to be cast singly, any shapes and strides without gaps.
        dtype: dtype of the results.

    Returns:
        The joined groups, and the single tensors, which keep their strides. Both are differentiable where a tensor is;
        gradients come back in the dtypes of the tensors.
    """
    joined = tuple(len(group) for group in groups)
    results = _CastTogether.apply(dtype, joined, *(tensor for group in groups for tensor in group), *tensors)
    return list(results[: len(groups)]), list(results[len(groups) :])


class _CastTogether(Function):
    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, joined: tuple[int, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.dtype = tensors[0].dtype
        members, singles = iter(tensors), tensors[sum(joined) :]
        groups = [list(islice(members, size)) for size in joined]
        ctx.rows = [[len(tensor) for tensor in group] for group in groups]
        results = [
            group[0].new_empty((sum(rows), *group[0].shape[1:]), dtype=dtype)
            for group, rows in zip(groups, ctx.rows, strict=True)
        ]
        parts = [part for result, rows in zip(results, ctx.rows, strict=True) for part in result.split(rows)]
        copies = [torch.empty_like(tensor, dtype=dtype) for tensor in singles]
        torch._foreach_copy_(parts + copies, list(tensors))
        # One gradient among many would have all of them required: of frozen layers, and of everything before them.
        sources = [*groups, *([tensor] for tensor in singles)]
        casts = (*results, *copies)
        needed = [any(tensor.requires_grad for tensor in group) for group in sources]
        ctx.mark_non_differentiable(*(cast for cast, need in zip(casts, needed, strict=True) if not need))
        return casts

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        separate: list[Tensor | None] = []
        for gradient, rows in zip(gradients, ctx.rows, strict=False):
            separate.extend(gradient.split(rows) if gradient is not None else [None] * len(rows))
        separate.extend(gradients[len(ctx.rows) :])
        present = [gradient for gradient in separate if gradient is not None]
        copies = [torch.empty_like(gradient, dtype=ctx.dtype) for gradient in present]
        if copies:
            torch._foreach_copy_(copies, present)
        remaining = iter(copies)
        return (None, None, *(None if gradient is None else next(remaining) for gradient in separate))
