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

    def run(self, device_of: Tensor) -> None:
        """Launches on the device of a tensor."""
        kernel, options = self.kernel, {"num_warps": self.num_warps}
        if not triton.knobs.runtime.interpret:  # the interpreter has neither registers nor anything to wrap
            if self.registers is not None:
                kernel, options = _limit_registers(kernel, self.num_warps, self.registers), {}
            # PyTorch sees through a wrapped kernel when it traces.
            kernel = torch.library.wrap_triton(kernel)
        with torch.cuda.device_of(device_of):
            kernel[(self.num_programs,)](**self.arguments, **options)


@lru_cache
def _limit_registers(kernel: Any, num_warps: int, registers: int) -> Any:
    """Returns a kernel that is compiled for so many registers.

    As a tuner with a single choice, which tunes nothing: PyTorch traces a configuration with all its fields, but not
    `maxnreg` among the arguments of a launch.
    """
    return triton.autotune([triton.Config({}, num_warps=num_warps, maxnreg=registers)], key=[])(kernel)
