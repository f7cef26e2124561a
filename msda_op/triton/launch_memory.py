"""Memory of launches: what one consisted of but for the addresses of its tensors.

Choosing kernels and tiles, and Triton's own look at each argument, cost the host several times what a decoder's kernel
takes. Whoever knows that a launch would be like an earlier one (see `call_memory`) repeats that, with other tensors.
The kernel is handed their addresses, see `kernel_launch`.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from torch import Tensor

from msda_op.triton.kernel_launch import Launch, bind


class Recipe(NamedTuple):
    """A launch without its tensors.

    Args:
        start: starts the compiled kernel on its grid.
        arguments: in the kernel's order, None in place of tensors.
        places: of the tensors of the launch among them.
    """

    start: Callable[..., None]
    arguments: tuple[Any, ...]
    places: tuple[int, ...]

    def run(self, tensors: Iterable[Tensor | None]) -> None:
        """Launches again on the current device, with tensors like those of the first time, in their order."""
        arguments = list(self.arguments)
        given = [tensor.data_ptr() for tensor in tensors if tensor is not None]
        for place, address in zip(self.places, given, strict=True):
            arguments[place] = address
        self.start(*arguments)


def write_recipe(launch: Launch, compiled: Any, tensors: Iterable[Tensor | None]) -> Recipe | None:
    """Returns how to repeat a launch with other tensors.

    Args:
        launch: the launch.
        compiled: what it ran; None where nothing was compiled.
        tensors: of the call, among them all that the kernel was given.

    Returns:
        The recipe; None where there is none, because the kernel was given a copy of a tensor, or one of them twice.
    """
    if compiled is None:
        return None
    arguments = [launch.arguments[name] for name in launch.kernel.arg_names]
    places = []
    for tensor in tensors:
        if tensor is not None:
            found = [place for place, argument in enumerate(arguments) if argument is tensor]
            if len(found) != 1:
                return None
            places += found
    if len(places) < sum(isinstance(argument, Tensor) for argument in arguments):
        return None
    constants = tuple(None if isinstance(argument, Tensor) else argument for argument in arguments)
    return Recipe(bind(compiled, launch.num_programs), constants, tuple(places))
