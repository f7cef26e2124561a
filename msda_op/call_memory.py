"""Memory of calls: one like an earlier one is looked at once.

Everything that the host does before a kernel starts (checks, the choice of a backend, level tables, the choice of
kernels and their arguments) follows from what `describe_call` returns, and from nothing else. So what came of it is
kept under that description, as a function that runs such calls: see `eager`. A detector repeats a few calls for ever.
"""

from collections.abc import Callable, Hashable
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from msda_op.levels import LevelStarts, SpatialShapes

MAX_CALLS = 4096
_PLAIN_TYPES = {Tensor, torch.nn.Parameter, type(None)}
_INTS, _TUPLES = {int}, {tuple}
_ways: dict[Hashable, Callable[..., Tensor]] = {}
_last_pairs: SpatialShapes = ()


def is_watched(*tensors: Tensor | None) -> bool:
    """Tells whether anything but autograd looks on: PyTorch traces, maps or transforms the call, or a type of tensor.

    The two questions to PyTorch that its documentation leaves out are those that `torch.autograd.Function` and
    PyTorch's own modes ask.
    """
    return (
        torch.compiler.is_compiling()
        or is_in_torch_dispatch_mode()
        or torch._C._are_functorch_transforms_active()
        or not _PLAIN_TYPES.issuperset(map(type, tensors))
    )


def describe_call(
    tensors: tuple[Tensor | None, ...], tables: tuple[SpatialShapes, LevelStarts], choices: tuple[Any, ...]
) -> Hashable | None:
    """Returns all that decides on what is done in a call, or None where it can change or is not to be known.

    Args:
        tensors: of the call, as they came; of them shapes, strides, dtypes, devices and whether they start at multiples
            of 16 bytes count, which kernels are compiled for.
        tables: spatial shapes and first rows of the levels; tuples count with their numbers, tensors on a GPU as
            `tensors` do, and nothing else is described.
        choices: the other arguments, and what the call asks of PyTorch's state.
    """
    if is_watched(*tensors):
        return None
    spatial_shapes, level_start_index = tables
    seen: list[Any] = [choices]
    if type(spatial_shapes) is Tensor and type(level_start_index) is Tensor and spatial_shapes.is_cuda:
        tensors = (*tensors, spatial_shapes, level_start_index)
    elif _are_pairs(spatial_shapes) and (level_start_index is None or _are_ints(level_start_index)):
        seen += tables
    else:
        return None
    for tensor in tensors:
        if tensor is None:
            seen.append(None)
        else:
            seen += (tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.data_ptr() % 16)
    return tuple(seen)


def recall(call: Hashable | None) -> Callable[..., Tensor] | None:
    """Returns what `remember` was given for a call like this one; None where there was none."""
    return None if call is None else _ways.get(call)


def remember(call: Hashable, way: Callable[..., Tensor]) -> None:
    """Keeps the way in which calls like this one are run; the oldest are forgotten."""
    if len(_ways) >= MAX_CALLS:
        del _ways[next(iter(_ways))]
    _ways[call] = way


def _are_ints(numbers: Any) -> bool:
    """Tells a tuple of ints; a float or a bool would count as the int that it equals."""
    return type(numbers) is tuple and _INTS.issuperset(map(type, numbers))


def _are_pairs(pairs: Any) -> bool:
    """Tells a tuple of tuples of ints; the last one found, which the layers of a detector share, is looked at once."""
    global _last_pairs
    if pairs is _last_pairs:
        return True
    found = (
        type(pairs) is tuple
        and _TUPLES.issuperset(map(type, pairs))
        and _INTS.issuperset(map(type, chain.from_iterable(pairs)))
    )
    if found:
        _last_pairs = pairs
    return found
