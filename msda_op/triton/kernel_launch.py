"""One launch of a kernel, as a value: it can be looked at, traced by `torch.compile`, and run.

Launches that agree in all but the addresses of their tensors run the same compiled kernel. It is kept, since Triton's
own look at each argument costs the host more than many a kernel takes. What Triton compiles for is part of the key:
dtypes, whether addresses are multiples of 16, and numbers. It gets addresses in the place of tensors then, of each of
which it would ask the driver where it lies.
"""

from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

_MAX_COMPILED = 4096
_compiled: dict[Hashable, Any] = {}


class Launch(NamedTuple):
    """One launch of a kernel.

    Args:
        kernel: jit function.
        num_programs: of a grid of one dimension.
        arguments: by name.
        num_warps: of a program.
        registers: that a lane may use; None leaves them to ptxas.
    """

    kernel: Any
    num_programs: int
    arguments: dict[str, Any]
    num_warps: int
    registers: int | None = None

    def run(self, device_of: Tensor) -> Any:
        """Launches on the device of a tensor, or, while PyTorch traces an op on tensors of its own type, notes it.

        Returns:
            The compiled kernel that was launched; None from the interpreter and from a trace.
        """
        grid = (self.num_programs,)
        if triton.knobs.runtime.interpret:  # which has no registers
            self.kernel[grid](**self.arguments, num_warps=self.num_warps)
            return None
        if type(device_of) is Tensor:
            with torch.cuda.device_of(device_of):
                return self._start(device_of.device)
        kernel = torch.library.wrap_triton(_configure(self.kernel, self.num_warps, self.registers))
        kernel[grid](**self.arguments)
        return None

    def _start(self, device: torch.device) -> Any:
        handed, forms = [], []
        for name in self.kernel.arg_names:
            argument = self.arguments[name]
            is_tensor = isinstance(argument, Tensor)
            handed.append(argument.data_ptr() if is_tensor else argument)
            forms.append((argument.dtype, handed[-1] % 16 == 0) if is_tensor else argument)
        key = (self.kernel.fn, self.num_warps, self.registers, device, *forms)
        compiled = _compiled.get(key)
        if compiled is not None:
            compiled[self.num_programs, 1, 1](*handed)
            return compiled
        grid = (self.num_programs,)
        compiled = self.kernel[grid](**self.arguments, num_warps=self.num_warps, maxnreg=self.registers)
        if len(_compiled) >= _MAX_COMPILED:
            _compiled.clear()
        _compiled[key] = compiled
        return compiled


def bind(compiled: Any, num_programs: int) -> Callable[..., None]:
    """Returns a function that starts a compiled kernel on a grid, given its arguments, as `compiled[grid]` does.

    Triton describes each launch to its hooks and calls them, which takes the host longer than the launch, and unless a
    profiler has set some there are none.
    """
    start_with_hooks = compiled[num_programs, 1, 1]
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    driver, runtime = triton.runtime.driver.active, triton.knobs.runtime
    get_device, get_stream = driver.get_current_device, driver.get_current_stream

    def start(*arguments: Any) -> None:
        entered, left = runtime.launch_enter_hook, runtime.launch_exit_hook
        if getattr(entered, "calls", entered) or getattr(left, "calls", left):  # a chain of hooks, one, or None
            start_with_hooks(*arguments)
        else:
            run(num_programs, 1, 1, get_stream(get_device()), function, metadata, None, None, None, *arguments)

    return start


@lru_cache
def _configure(kernel: Any, num_warps: int, registers: int | None) -> Any:
    """Returns a kernel that brings its options along, as a tuner with a single choice, which tunes nothing.

    PyTorch traces a configuration with all its fields, but not `maxnreg` among the arguments of a launch.
    """
    return triton.autotune([triton.Config({}, num_warps=num_warps, maxnreg=registers)], key=[])(kernel)
