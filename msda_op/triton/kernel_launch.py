"""One launch of a kernel, as a value: it can be looked at, traced by `torch.compile`, and run."""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor


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
                return self.kernel[grid](**self.arguments, num_warps=self.num_warps, maxnreg=self.registers)
        kernel = torch.library.wrap_triton(_configure(self.kernel, self.num_warps, self.registers))
        kernel[grid](**self.arguments)
        return None


@lru_cache
def _configure(kernel: Any, num_warps: int, registers: int | None) -> Any:
    """Returns a kernel that brings its options along, as a tuner with a single choice, which tunes nothing.

    PyTorch traces a configuration with all its fields, but not `maxnreg` among the arguments of a launch.
    """
    return triton.autotune([triton.Config({}, num_warps=num_warps, maxnreg=registers)], key=[])(kernel)
