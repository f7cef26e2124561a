"""Memory of forward launches: a call like an earlier one launches the same compiled kernel, prepared once.

Choosing kernels and tiles, and Triton's own look at each argument, cost the host several times what a decoder's kernel
takes. Calls are alike where everything agrees that decides on a kernel and its arguments except addresses: shapes,
dtypes, device and conventions, with contiguous tensors that start at multiples of 16 bytes, which Triton compiles for.
The kernel is handed their addresses, see `kernel_launch`.
"""

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from msda_op.triton.kernel_launch import Launch

_MAX_CALLS = 4096


class _Recipe(NamedTuple):
    """A launch without its tensors.

    Args:
        compiled: Triton's compiled kernel.
        num_programs: of a grid of one dimension.
        arguments: in the kernel's order, None in place of tensors.
        places: of the tensors of a call among them.
        output_place: of the output.
        output_shape: of the output.
    """

    compiled: Any
    num_programs: int
    arguments: tuple[Any, ...]
    places: tuple[int, ...]
    output_place: int
    output_shape: tuple[int, ...]


_recipes: dict[Hashable, _Recipe] = {}


def describe_call(tensors: tuple[Tensor | None, ...], conventions: Hashable) -> Hashable | None:
    """Returns what alike calls have in common, or None for a call that is not to be remembered.

    Args:
        tensors: of the call, value first.
        conventions: what else decides on the kernel.
    """
    value = tensors[0]
    if type(value) is not Tensor or triton.knobs.runtime.interpret:
        return None
    if value.is_cuda and value.get_device() != torch.cuda.current_device():
        return None
    forms: list[Hashable] = [conventions, value.device]
    for tensor in tensors:
        if tensor is None:
            forms.append(None)
        elif tensor.is_contiguous() and tensor.data_ptr() % 16 == 0:
            forms += (tensor.shape, tensor.dtype)
        else:
            return None
    return tuple(forms)


def launch_again(call: Hashable, tensors: tuple[Tensor | None, ...]) -> Tensor | None:
    """Launches what was remembered of a call like this one and returns its output; None where nothing was."""
    recipe = _recipes.get(call)
    if recipe is None:
        return None
    value = tensors[0]
    assert value is not None
    output = value.new_empty(recipe.output_shape)
    arguments = list(recipe.arguments)
    given = (tensor for tensor in tensors if tensor is not None)
    for place, tensor in zip(recipe.places, given, strict=True):
        arguments[place] = tensor.data_ptr()
    arguments[recipe.output_place] = output.data_ptr()
    recipe.compiled[recipe.num_programs, 1, 1](*arguments)
    return output


def remember(call: Hashable, tensors: tuple[Tensor | None, ...], output: Tensor, launch: Launch, compiled: Any) -> None:
    """Keeps a launch for calls like this one; the oldest are forgotten.

    A call that gives one tensor twice is not kept: one like it may give two.
    """
    arguments = [launch.arguments[name] for name in launch.kernel.arg_names]
    if len({id(tensor) for tensor in tensors if tensor is not None}) < sum(tensor is not None for tensor in tensors):
        return
    if len(_recipes) >= _MAX_CALLS:
        del _recipes[next(iter(_recipes))]

    def place_of(tensor: Tensor) -> int:
        return next(place for place, argument in enumerate(arguments) if argument is tensor)

    _recipes[call] = _Recipe(
        compiled,
        launch.num_programs,
        tuple(None if isinstance(argument, Tensor) else argument for argument in arguments),
        tuple(place_of(tensor) for tensor in tensors if tensor is not None),
        place_of(output),
        tuple(output.shape),
    )
